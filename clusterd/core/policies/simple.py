"""First come first served, and shortest remaining time first: fixed sizes, one order."""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.core.estimates.attained_service import likely_steps_left
from clusterd.core.estimates.candidate_plans import CandidatePlans
from clusterd.core.performance_table import Estimate
from clusterd.core.policies.base import Baseline, Capacity, asked_size, step_s
from clusterd.core.policies.optimus import staying
from clusterd.core.state import Job
from clusterd.core.view import View


class Stationary(Baseline):
    """Knows no device types: a job starts where it is fastest of what is free, and stays on that type."""

    def options(self, job: Job, view: View, candidates: CandidatePlans, capacity: Capacity) -> Sequence[Estimate]:
        """As it runs, else as it would run."""
        return capacity.fits(staying(job, view, candidates)) or super().options(job, view, candidates, capacity)


class Fifo(Stationary):
    """In order of arrival; who does not fit holds up those behind. Nobody is stopped."""

    name = "fifo"
    strict = True

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """Running jobs first, then in order of arrival."""
        return sorted(jobs, key=lambda j: (j.attempt is None, j.submitted_s, len(j.id), j.id))


class Srtf(Stationary):
    """Least remaining time first, preemptively, on what each asks for."""

    name = "srtf"

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """By believed remaining time."""

        def left_s(job: Job) -> float:
            candidates = self.candidates(job, view)
            assert candidates is not None, "only managed jobs are ordered"
            return likely_steps_left(job) * step_s(job, candidates, asked_size(job, candidates))

        return sorted(jobs, key=lambda j: (left_s(j), j.submitted_s, j.id))
