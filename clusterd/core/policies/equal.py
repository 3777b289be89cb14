"""Equal share."""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.core.estimates.candidate_plans import CandidatePlans, PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.policies.base import Capacity
from clusterd.core.policies.optimus import Rounds
from clusterd.core.state import Job
from clusterd.core.view import View


class Equal(Rounds):
    """Every job the same number of devices, as near as it can run; the user's plan with more or fewer replicas."""

    name = "equal"
    published = PlanFreedom.REPLICAS
    interval_s: float | None = 60.0

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """In order of arrival, the largest size within the share of those that are left."""
        found: list[tuple[Job, Sequence[Estimate]]] = []
        ordered = self.order(view, jobs)
        for number, job in enumerate(ordered):
            candidates = self.candidates(job, view)
            assert candidates is not None
            share = max(capacity.total // (len(ordered) - number), 1)
            options = largest_within(candidates, share, capacity) or capacity.fits(
                candidates.by_speed[candidates.counts[0]]
            )
            if options:
                capacity.take(options[0])
                found.append((job, options))
        return found


def largest_within(candidates: CandidatePlans, share: int, capacity: Capacity) -> list[Estimate]:
    """The fastest of the sizes up to this that there is capacity for, if it is faster than smaller ones."""
    best: list[Estimate] = []
    for count in candidates.counts:
        options = capacity.fits(candidates.by_speed[count]) if count <= share else []
        if options and (not best or options[0].step_time_s < best[0].step_time_s):
            best = options
    return best
