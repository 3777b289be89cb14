"""Rubick alone, as its paper describes it: any plan, slopes of sensitivity curves, guarantees, a limit on moves.

Guaranteed jobs have a least allocation that reaches what they asked for; best-effort jobs have none. Jobs are served
guaranteed first, then by descending slope (relative speed-up per device); who can be served takes devices from whoever
has the lowest slope above its least. A job is changed only while (T - N delta)/T > 0.97, with its age T, its N changes
and their cost delta. Devices are the resource (the published artifact allocates nothing else).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.candidate_plans import CandidatePlans, PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Target
from clusterd.core.policies.base import Baseline, Capacity, asked_size
from clusterd.core.policies.optimus import now_on
from clusterd.core.state import Job
from clusterd.core.view import View

SHARE = 0.97
DELTA_S = 78.0
"""The published average cost of a reconfiguration."""


class Rubick(Baseline):
    """Plans and sizes by slopes."""

    name = "rubick"
    published = PlanFreedom.ANY
    interval_s: float | None = 60.0

    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """Guaranteed first, then by the slope of the first device, in order of arrival among equals."""
        return sorted(
            jobs,
            key=lambda j: (not j.spec.guaranteed, j.attempt is None, -self._slope(j, view, 0)[0], j.submitted_s, j.id),
        )

    def wants(self, view: View, jobs: list[Job]) -> list[Target]:
        """Least allocations, then further devices by slope; nobody who may not be changed is."""
        capacity = Capacity(view, jobs)
        sizes: dict[str, int] = {}
        kinds: dict[str, str] = {}
        fixed: set[str] = set()
        for job in self.order(view, jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None
            now = now_on(job, view, candidates)
            if now is not None and not self._may_change(job, view):
                sizes[job.id], kinds[job.id] = now.devices, now.device_type
                capacity.left[now.device_type] = capacity.left.get(now.device_type, 0) - now.devices
                fixed.add(job.id)
        for job in self.order(view, jobs):
            if job.id in fixed:
                continue
            candidates = self.candidates(job, view)
            assert candidates is not None
            now = now_on(job, view, candidates)
            least = self._least(job, candidates)
            options = capacity.fits(candidates.by_speed[least])
            if options:
                capacity.take(options[0])
                sizes[job.id], kinds[job.id] = least, options[0].device_type
        by_id: dict[str, Job] = {job.id: job for job in jobs}
        heap: list[tuple[float, str, int]] = []

        def push(job_id: str) -> None:
            slope, to = self._slope(by_id[job_id], view, sizes[job_id], kinds[job_id])
            if slope > 0:
                heapq.heappush(heap, (-slope, job_id, to))

        for job_id in sizes:
            if job_id not in fixed:
                push(job_id)
        while heap:
            _, job_id, to = heapq.heappop(heap)
            more = to - sizes[job_id]
            if capacity.left.get(kinds[job_id], 0) >= more:
                capacity.left[kinds[job_id]] -= more
                sizes[job_id] = to
                push(job_id)
        wants: list[Target] = []
        for job in self.order(view, jobs):
            if job.id not in sizes:
                continue
            candidates = self.candidates(job, view)
            assert candidates is not None
            chosen: Sequence[Estimate] = candidates.sizes[kinds[job.id]][sizes[job.id]]
            wants.append(Target(job, chosen, self.name, keep=job.id in fixed))
        return wants

    def _may_change(self, job: Job, view: View) -> bool:
        age_s = executed_s(job, view.now_s)
        made = len(job.plan_changes) + max(len(job.attempts) - 1, 0) + 1
        return age_s > 0 and (age_s - made * DELTA_S) / age_s > SHARE

    def _least(self, job: Job, candidates: CandidatePlans) -> int:
        """Of a guaranteed job the fewest devices whose best plan reaches what it asked for; of others the fewest."""
        if not job.spec.guaranteed:
            return candidates.counts[0]
        asked = candidates.by_speed[asked_size(job, candidates)]
        requested = job.spec.resources.plan
        asked_s = min(
            (x.step_time_s for x in asked if requested is None or x.plan == requested), default=asked[0].step_time_s
        )
        return next((n for n, x in candidates.fastest.items() if x.step_time_s <= asked_s), asked_size(job, candidates))

    def _slope(self, job: Job, view: View, size: int, kind: str | None = None) -> tuple[float, int]:
        """Relative speed-up per device to the next size that is faster, and that size."""
        candidates = self.candidates(job, view)
        assert candidates is not None
        points = candidates.fastest if kind is None else {n: some[0] for n, some in candidates.sizes[kind].items()}
        asked_s = candidates.by_speed[asked_size(job, candidates)][0].step_time_s
        speed = asked_s / points[size].step_time_s if size else 0.0
        best = (0.0, size)
        for n, x in points.items():
            if n > size:
                best = max(best, ((asked_s / x.step_time_s - speed) / (n - size), n), key=lambda b: b[0])
        return best
