"""Tiresias (Gu et al., NSDI 2019): discretised two-dimensional least attained service.

Service is devices times executed seconds. Jobs sink through queues as they get service; within a queue running jobs go
before waiting ones, each in order of arrival. Queues are walked at every event and every `interval_s`; whoever fits
runs, the others are preempted. Thresholds as in the authors' simulator; promotion is off, as in it by default.
"""

from __future__ import annotations

from clusterd.core.estimates.attained_service import attained_s, executed_s
from clusterd.core.policies.simple import Stationary
from clusterd.core.state import Job
from clusterd.core.view import View

QUEUE_LIMITS_DEVICE_S = (3250.0, 7200.0)


class Tiresias(Stationary):
    """2D-LAS with discretised queues."""

    name = "tiresias"
    interval_s: float | None = 60.0

    def __init__(
        self,
        plans: bool = False,
        limits_device_s: tuple[float, ...] = QUEUE_LIMITS_DEVICE_S,
        promote: float | None = None,
        running_first: bool = True,
    ) -> None:
        """`promote`: back to the first queue after waiting so many times as long as executed; None: never.

        `running_first`: within a queue who runs comes before who waits, as published; otherwise arrival alone counts.
        """
        super().__init__(plans)
        self.limits_device_s, self.promote, self.running_first = limits_device_s, promote, running_first

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """By queue, running first, then by arrival."""
        return sorted(
            jobs,
            key=lambda j: (
                self._queue(j, view.now_s),
                self.running_first and j.attempt is None,
                j.submitted_s,
                len(j.id),
                j.id,
            ),
        )

    def _queue(self, job: Job, now_s: float) -> int:
        if self.promote is not None and job.attempt is None and job.attempts:
            executed = executed_s(job, now_s)
            if now_s - job.queued_s >= self.promote * executed:
                return 0
        service = attained_s(job, now_s)
        return sum(service >= limit for limit in self.limits_device_s)
