"""Optimus (Peng et al., EuroSys 2018): marginal gain of remaining time per device, every 600 s.

Every job first gets the least on which it runs; then the device goes where it shortens a job's remaining time most, as
long as it shortens any (as in the artifacts of Pollux and Sia, where devices are the only resource). The user's plan is
kept, with more or fewer replicas. Between rounds new jobs start on the least that they run on, if it is free.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from clusterd.core.estimates.attained_service import likely_steps_left
from clusterd.core.estimates.candidate_plans import CandidatePlans, PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Target, current
from clusterd.core.policies.base import Baseline, Capacity
from clusterd.core.state import Job
from clusterd.core.view import View


class Rounds(Baseline):
    """A baseline that changes sizes in rounds only, and in between starts new jobs on what is free."""

    published = PlanFreedom.REPLICAS

    def __init__(self, plans: bool = False) -> None:
        super().__init__(plans)
        self._round = -1
        self._sizes: dict[str, Sequence[Estimate]] = {}

    def wants(self, view: View, jobs: list[Job]) -> list[Target]:
        """As decided in the last round; anew in a new one."""
        assert self.interval_s is not None
        number = int((view.now_s + 1e-6) // self.interval_s)
        capacity = Capacity(view, jobs)
        # A round begins when the moves of the last are over: half a cluster is no cluster to divide.
        if number != self._round and not any(is_moving(job) for job in view.running):
            self._round = number
            self._sizes = {}
            for job, options in self.divide(view, jobs, capacity):
                self._sizes[job.id] = options
            return [Target(j, self._sizes[j.id], self.name) for j in jobs if j.id in self._sizes]
        wants: list[Target] = []
        for job in jobs:
            options = self._sizes.get(job.id, ())
            # Who runs counts on the type that it has, where that is one of those that it is to have.
            kind = current(job, view)[0] if job.attempt is not None else None
            counted = [x for x in options if x.device_type == kind] or capacity.fits(options)
            if counted:
                capacity.take(counted[0])
            if counted or (options and job.attempt is not None):
                wants.append(Target(job, options, self.name))
        for job in self.order(view, [j for j in jobs if j.id not in self._sizes and j.attempt is None]):
            candidates = self.candidates(job, view)
            assert candidates is not None, "only managed jobs are asked"
            options = self.first(job, candidates, capacity)
            if options:
                self._sizes[job.id] = options
                capacity.take(options[0])
                wants.append(Target(job, options, self.name))
        return wants

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """In order of arrival."""
        return sorted(jobs, key=lambda j: (j.submitted_s, len(j.id), j.id))

    def first(self, job: Job, candidates: CandidatePlans, capacity: Capacity) -> Sequence[Estimate]:
        """Options of a new job between rounds."""
        return capacity.fits(candidates.by_speed[candidates.counts[0]])

    @abstractmethod
    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """Divide the devices in a new round; takes them from `capacity`."""


class Optimus(Rounds):
    """Marginal gain of remaining time."""

    name = "optimus"

    def __init__(self, plans: bool = False, interval_s: float = 600.0) -> None:
        super().__init__(plans)
        self.interval_s: float | None = interval_s

    def left(self, job: Job) -> float:
        """Steps that its remaining time is reckoned from."""
        return likely_steps_left(job)

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """The least for each in order of arrival, then the best gain per device."""
        sizes: dict[str, int] = {}
        given: dict[str, Job] = {}
        kinds: dict[str, str] = {}
        for job in self.order(view, jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None
            some = capacity.fits(candidates.by_speed[candidates.counts[0]])
            if some:
                capacity.take(some[0])
                sizes[job.id], given[job.id], kinds[job.id] = candidates.counts[0], job, some[0].device_type
        import heapq

        heap: list[tuple[float, str, int]] = []

        def push(job: Job) -> None:
            candidates = self.candidates(job, view)
            assert candidates is not None
            here = candidates.sizes[kinds[job.id]]
            size = sizes[job.id]
            larger = next((n for n in here if n > size), None)
            if larger is not None:
                gain_s = (here[size][0].step_time_s - here[larger][0].step_time_s) * self.left(job)
                if gain_s > 0:
                    heapq.heappush(heap, (-gain_s / (larger - size), job.id, larger))

        for job in given.values():
            push(job)
        while heap:
            _, job_id, larger = heapq.heappop(heap)
            more = larger - sizes[job_id]
            if capacity.left.get(kinds[job_id], 0) < more:
                continue
            capacity.left[kinds[job_id]] -= more
            sizes[job_id] = larger
            push(given[job_id])
        found: list[tuple[Job, Sequence[Estimate]]] = []
        for job_id, job in given.items():
            candidates = self.candidates(job, view)
            assert candidates is not None
            found.append((job, candidates.sizes[kinds[job_id]][sizes[job_id]]))
        return found


def is_moving(job: Job) -> bool:
    """True in the middle of a migration."""
    attempt = job.attempt
    return attempt is not None and bool(attempt.migration or job.resuming or attempt.retired)


def staying(job: Job, view: View, candidates: CandidatePlans) -> Sequence[Estimate]:
    """Options of a running job on as many devices of the same type, fastest first; empty: it does not run.

    A scheduler that does not know types leaves a job on those it was given; were it counted on the type where it would
    be fastest, others would wait for devices that nobody uses.
    """
    now = now_on(job, view, candidates)
    return candidates.sizes[now.device_type][now.devices] if now is not None else ()


def now_on(job: Job, view: View, candidates: CandidatePlans) -> Estimate | None:
    """Candidate estimate under which a job runs now."""
    if job.attempt is None:
        return None
    kind, shape = current(job, view)
    some = candidates.sizes.get(kind, {}).get(sum(shape), ())
    return next((x for x in some if x.shape == shape), None)
