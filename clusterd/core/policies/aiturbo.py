"""AITurbo alone: predictable and unpredictable jobs in one Borda-count multi-level feedback queue.

As reconstructed from the authors' code, its bugs repaired (ranks are places, gains sorted most first, service in
device-seconds). Predictable jobs are ranked by service and by gain, unpredictable ones by service twice; queues at 1
and 10 device-hours of attained service. Every 240 s each predictable job may take one step up or down, whichever saves
most of resources times remaining time; the user's plan is kept, with more or fewer replicas. Running jobs give way to
a challenger whose score is better by a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.core.estimates.attained_service import attained_s, likely_steps_left, steps_left
from clusterd.core.estimates.candidate_plans import CandidatePlans, PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.policies.base import Capacity, asked_size
from clusterd.core.policies.optimus import Rounds, now_on
from clusterd.core.queueing.order import QUEUES_DEVICE_S, ranks
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import JobId

KEEP = 0.1


class AITurbo(Rounds):
    """Borda count over attained service and predicted gain."""

    name = "aiturbo"
    published = PlanFreedom.REPLICAS
    interval_s: float | None = 240.0

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """By queue, then by score, running jobs a tenth ahead."""
        service = {job.id: attained_s(job, view.now_s) for job in jobs}
        by_service = ranks(service)
        gains: dict[JobId, float] = {}
        for job in jobs:
            candidates = self.candidates(job, view)
            if candidates is not None and steps_left(job) is not None:
                gains[job.id] = -self._step(job, view, candidates)[0]
        by_gain = ranks(gains)

        def key(job: Job) -> tuple[float, float, float, str]:
            score = by_service[job.id] + by_gain.get(job.id, by_service[job.id])
            score -= KEEP if job.attempt is not None else 0.0
            queue = sum(service[job.id] >= limit for limit in QUEUES_DEVICE_S)
            return queue, score, job.submitted_s, job.id

        return sorted(jobs, key=key)

    def first(self, job: Job, candidates: CandidatePlans, capacity: Capacity) -> Sequence[Estimate]:
        """Requested size of a new job."""
        return capacity.fits(candidates.by_speed[asked_size(job, candidates)])

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """In order, each one step from where it is; what does not fit is skipped."""
        found: list[tuple[Job, Sequence[Estimate]]] = []
        for job in self.order(view, jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None
            now = now_on(job, view, candidates)
            sizes = [asked_size(job, candidates)] if now is None else [now.devices]
            if steps_left(job) is not None and now is not None:
                gain, size = self._step(job, view, candidates)
                sizes = [size, *sizes] if gain > 0 else sizes
            for size in sizes:
                options = capacity.fits(candidates.by_speed[size])
                if options:
                    capacity.take(options[0])
                    found.append((job, options))
                    break
        return found

    def _step(self, job: Job, view: View, candidates: CandidatePlans) -> tuple[float, int]:
        """The neighbouring size that saves most remaining time per device it takes, or costs least per device given.

        The published measure, resources times remaining time, never grows a job whose speed-up is less than linear;
        seconds saved per device is the measure that does (see docs/simulate.md).
        """
        now = now_on(job, view, candidates)
        size = now.devices if now is not None else asked_size(job, candidates)
        left = likely_steps_left(job)
        here_s = left * candidates.by_speed[size][0].step_time_s
        larger = next((n for n in candidates.counts if n > size), None)
        best = (0.0, size)
        if larger is not None:
            saved_s = here_s - left * candidates.by_speed[larger][0].step_time_s
            best = max(best, (saved_s / (larger - size), larger))
        return best
