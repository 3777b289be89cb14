"""Base class of the baselines: jobs in some order get devices by count; `apply_targets` does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Self

from clusterd.core.allocation.evacuation import evacuations
from clusterd.core.allocation.request_grant import Grant, allocate
from clusterd.core.allocation.start_booked import start_booked
from clusterd.core.estimates.can_migrate import may_change
from clusterd.core.estimates.candidate_plans import CandidatePlans, CandidatePlansCache, PlanFreedom
from clusterd.core.ledger import of_ranks
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Target, apply_targets
from clusterd.core.queue_order import difference, places
from clusterd.core.queueing.order import arrival
from clusterd.core.state import Job
from clusterd.core.view import Proposal, Refusal, Start, View
from clusterd.types import JobId


class Capacity:
    """Devices by type that one round may grant."""

    def __init__(self, view: View, jobs: Iterable[Job]) -> None:
        """All that is free, and all that these running jobs hold."""
        self.left: dict[str, int] = {}
        for device in view.free.all_devices():
            self.left[device.name] = self.left.get(device.name, 0) + 1
        for job in jobs:
            if job.attempt is None:
                continue
            for device in of_ranks(view.hosts, job.attempt):
                if view.hosts[device.host].unusable is None:
                    self.left[device.name] = self.left.get(device.name, 0) + 1

    @classmethod
    def of(cls, left: Mapping[str, int]) -> Capacity:
        """Capacity of so many devices of each type."""
        found = cls.__new__(cls)
        found.left = dict(left)
        return found

    @property
    def total(self) -> int:
        """Number of devices of all types."""
        return sum(self.left.values())

    def fits(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """Estimates for which enough devices are left."""
        return [x for x in estimates if all(self.left.get(name, 0) >= n for name, n in x.by_type.items())]

    def take(self, estimate: Estimate) -> None:
        """Take the devices of an estimate."""
        for name, count in estimate.by_type.items():
            self.left[name] = self.left.get(name, 0) - count  # who runs may count on a type of which no host is up


class Key(NamedTuple):
    """Sort key of a queued job: the policy's own order, which puts jobs without a known speed last."""

    policy: int
    priority: int
    arrival: tuple[float, int, JobId]


class Baseline(ABC):
    """Policy that grants devices by count among the candidate plans of its `choice`, in an order of its own.

    Jobs of which no speed is known, commands among them, are black boxes: started as they ask, in the order of their
    arrival, and never stopped. In the daemon a preempted elastic job goes on from its newest checkpoint; one that has
    nowhere to save starts over.
    """

    name = "baseline"
    interval_s: float | None = None
    published = PlanFreedom.ASKED
    strict = False  # who cannot be served holds up those behind
    preempts = True

    def __init__(self, plans: bool = False) -> None:
        """`plans`: run under the best plan for the allocation instead of the user's."""
        self.plans = plans
        self.choice = _freed(self.published) if plans else self.published
        self.candidates_cache = CandidatePlansCache()
        if plans:
            self.name = f"{self.name}+plans"

    def propose(self, view: View) -> Proposal:
        """Serve jobs in order as far as devices go; jobs without a model leave drained hosts all the same."""
        known = [job.id for job in view.running if self.candidates(job, view) is not None]
        leaving = evacuations(view, skip=known)
        jobs = self.managed(view)
        wants = self.wants(view, jobs)
        proposal = apply_targets(view, wants, among=jobs, others=f"{self.name}: others come first")
        named = {w.job.id for w in wants}
        proposal.refusals += [
            Refusal(job.id, f"{self.name}: others come first")
            for job in jobs
            if not job.attempt and job.id not in named
        ]
        unmodelled = start_unmodelled(view, self.candidates_cache, self.choice, proposal)
        ordered = [job for job in self.order(view, jobs) if job.attempt is None]
        keys = {job.id: Key(number, 0, arrival(job)) for number, job in enumerate(ordered)}
        keys |= {job.id: Key(len(ordered), *_by_arrival(job)) for job in unmodelled}
        proposal.order = difference(view.order, places(keys))
        proposal.moves += leaving
        start_booked(view, proposal)
        return proposal

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A policy that would decide the same, without the candidate plans that this one remembers to be faster."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ |= deepcopy({**self.__dict__, "candidates_cache": None}, memo)
        made.candidates_cache = CandidatePlansCache()
        return made

    def managed(self, view: View) -> list[Job]:
        """Jobs whose speed is known and that wait or run undisturbed."""
        waiting = [j for j in view.queued if j.not_before_s <= view.now_s]
        return [
            j
            for j in [*waiting, *view.running]
            if self.candidates(j, view) and (j.attempt is None or may_change(j, view))
        ]

    def candidates(self, job: Job, view: View) -> CandidatePlans | None:
        """Candidate plans of a job under this policy; None: it has no performance model."""
        return self.candidates_cache.of(job, view.performance_tables, self.choice)

    def wants(self, view: View, jobs: list[Job]) -> list[Target]:
        """Targets of the jobs that are to run."""
        capacity = Capacity(view, jobs)
        wants: list[Target] = []
        for job in self.order(view, jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None, "only managed jobs are asked"
            options = self.options(job, view, candidates, capacity)
            if not options:
                if self.strict:
                    break
                continue
            capacity.take(options[0])
            wants.append(Target(job, options, self.name))
        return wants

    def options(self, job: Job, view: View, candidates: CandidatePlans, capacity: Capacity) -> Sequence[Estimate]:
        """Options of a job, best first, all on as many devices; empty: it does not run."""
        size = asked_size(job, candidates)
        return capacity.fits(candidates.by_speed[size])

    @abstractmethod
    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """Jobs in the order in which they are served."""


def _freed(choice: PlanFreedom) -> PlanFreedom:
    return PlanFreedom.SIZE if choice is PlanFreedom.ASKED else PlanFreedom.ANY


def asked_size(job: Job, candidates: CandidatePlans) -> int:
    """Requested number of devices, or the next larger one that is known to run."""
    asked = max(job.spec.resources.devices, 1)
    return next((n for n in candidates.counts if n >= asked), candidates.counts[-1])


def start_unmodelled(
    view: View, candidates_cache: CandidatePlansCache, choice: PlanFreedom, proposal: Proposal
) -> list[Job]:
    """Start jobs without a performance model on the devices that the proposal leaves free; returns them in order."""
    for start in proposal.starts:
        view.free.take_places(start.ranks, start.booked)
    for move in proposal.moves:
        view.free.take_places(move.ranks, move.booked)
    known = view.performance_tables
    unmodelled = [job for job in view.queued if candidates_cache.of(job, known, choice) is None]
    unmodelled.sort(key=_by_arrival)
    for job in unmodelled:
        answer = allocate(job, view)
        if isinstance(answer, Grant):
            where = answer.placement
            view.quotas.take(job.spec, sum(place.device is not None for place in where.ranks))
            view.free.take_places(where.ranks, where.booked, job.spec.resources.share)
            proposal.starts.append(Start(job.id, answer.plan, where.ranks, where.booked, answer.reason))
        else:
            proposal.refusals.append(answer)
    return unmodelled


def _by_arrival(job: Job) -> tuple[int, tuple[float, int, JobId]]:
    return -job.priority, arrival(job)


def step_s(job: Job, candidates: CandidatePlans, size: int) -> float:
    """Predicted step time on so many devices."""
    return candidates.by_speed[size][0].step_time_s
