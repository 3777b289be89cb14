"""Sampling-based multi-job placement alone (TPDS 35(6), 2024): mixed workers, sampled categories and a market.

A category says how many devices each job has. Categories are drawn around what each job's work would give it, devices
are matched to jobs on a market, the best by the mean of remaining times is kept (beta = 1). A job's devices may be of
several types; its batch is then split in proportion to their speed. When there are more jobs than devices, the first to
arrive come first. The user's plan is kept, with more or fewer replicas.

The market's time grows with the square of the devices: beyond `MOST_DEVICES` of them, or with one type, categories are
drawn the same way and each job takes what serves it best in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from clusterd.core.estimates.attained_service import likely_steps_left
from clusterd.core.estimates.candidate_plans import PlanFreedom, is_alike
from clusterd.core.estimates.heterogeneous_speed import believed
from clusterd.core.estimates.job_forecast import take_inventory
from clusterd.core.ledger import of_ranks
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.assign import MOST_DEVICES
from clusterd.core.placement.heterogeneous_search import HeterogeneousEstimates, HeterogeneousSearch
from clusterd.core.placement.matching import match
from clusterd.core.policies.base import Capacity
from clusterd.core.policies.equal import largest_within
from clusterd.core.policies.optimus import Rounds
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.plans.plan import Plan

CATEGORIES = 40
"""Categories sampled in a round (N of the third-party code that cites the paper)."""

BETTER = 0.05
"""By so much the best category must be better than what is, for jobs to be moved."""

Division = list[tuple[Job, Sequence[Estimate]]]


class Sampling(Rounds):
    """Policy that samples categories and assigns mixed devices on a market."""

    name = "sampling"
    published = PlanFreedom.REPLICAS
    interval_s: float | None = 60.0

    def __init__(self, plans: bool = False) -> None:
        super().__init__(plans)
        self._estimates = HeterogeneousEstimates()

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> Division:
        """The best of the sampled categories."""
        ordered = self.order(view, jobs)
        search = self._mixing(view, jobs)
        before = dict(capacity.left)
        best = self._matched(view, ordered, search, capacity) or self._in_turn(view, ordered, search, capacity)
        after = dict(capacity.left)
        capacity.left = dict(before)
        stay = self._as_it_is(view, ordered, capacity)
        if stay is not None and stay[0] <= (1.0 + BETTER) * best[0]:
            return stay[1]
        capacity.left = after
        return best[1]

    def _mixing(self, view: View, jobs: Sequence[Job]) -> HeterogeneousSearch:
        """Over all devices that the round may give."""
        ledger = view.free.copy()
        for job in jobs:
            if job.attempt is not None:
                ledger.put(of_ranks(view.hosts, job.attempt), job.attempt.booked)
        return HeterogeneousSearch(self._estimates, view, ledger, take_inventory(view))

    def _matched(
        self, view: View, jobs: Sequence[Job], search: HeterogeneousSearch, capacity: Capacity
    ) -> tuple[float, Division] | None:
        """By the market; None: it is no case for it."""
        names = [name for name, count in sorted(capacity.left.items()) for _ in range(count)]
        served = jobs[: len(names)]
        if not served or len(names) > MOST_DEVICES or not search.groups:
            return None
        speeds = [self._speeds(job, view) for job in served]
        rates = np.array([[speed.get(name, 0.0) for name in names] for speed in speeds])
        if np.any(rates.max(axis=1) <= 0):
            return None
        work = np.array(
            [likely_steps_left(j) * view.performance_tables[j.inspection.model].global_batch for j in served]
        )
        owners = match(work, rates, samples=CATEGORIES, seed=int(view.now_s))
        score = 0.0
        found: Division = []
        for number, job in enumerate(jobs):
            limits: dict[str, int] = {}
            for name, owner in zip(names, owners, strict=True):
                if owner == number:
                    limits[name] = limits.get(name, 0) + 1
            score += self._give(job, view, search, capacity, limits, sum(limits.values()), found)
        return score, found

    def _in_turn(
        self, view: View, jobs: Sequence[Job], search: HeterogeneousSearch, capacity: Capacity
    ) -> tuple[float, Division]:
        """By sampled sizes, each job taking what serves it best of what the jobs before it left."""
        random_ = random.Random(int(view.now_s))
        roots = [self._root_of_work(job, view) for job in jobs]
        before = dict(capacity.left)
        best: tuple[float, list[int]] | None = None
        for sample in range(CATEGORIES):
            weights = [root * random_.lognormvariate(0.0, 0.6 if sample else 0.0) for root in roots]
            scale = sum(before.values()) / sum(weights) if weights else 0.0
            sizes = [max(int(weight * scale), 1) for weight in weights]
            # Categories are compared by what one type gives: mixes are looked for in the best of them.
            score, _ = self._given(view, jobs, sizes, None, capacity)
            capacity.left = dict(before)
            if best is None or score < best[0]:
                best = (score, sizes)
        assert best is not None
        return self._given(view, jobs, best[1], search, capacity)

    def _given(
        self,
        view: View,
        jobs: Sequence[Job],
        sizes: Sequence[int],
        search: HeterogeneousSearch | None,
        capacity: Capacity,
    ) -> tuple[float, Division]:
        score = 0.0
        found: Division = []
        for job, size in zip(jobs, sizes, strict=True):
            score += self._give(job, view, search, capacity, capacity.left, size, found)
        return score, found

    def _give(
        self,
        job: Job,
        view: View,
        search: HeterogeneousSearch | None,
        capacity: Capacity,
        limits: Mapping[str, int],
        share: int,
        found: Division,
    ) -> float:
        """Its best within so many devices, taken and noted; the seconds that it would need."""
        candidates = self.candidates(job, view)
        assert candidates is not None, "only managed jobs are asked"
        within = Capacity.of(limits)
        options: list[Estimate] = largest_within(candidates, share, within)
        if search is not None:
            under_s = options[0].step_time_s if options else float("inf")
            options = [*self._mixed(job, view, search, limits, share, under_s), *options]
        options = options or capacity.fits(candidates.by_speed[candidates.counts[0]])
        if not options:
            return likely_steps_left(job) * candidates.by_speed[candidates.counts[0]][0].step_time_s * 2.0
        capacity.take(options[0])
        found.append((job, options))
        return likely_steps_left(job) * options[0].step_time_s

    def _mixed(
        self,
        job: Job,
        view: View,
        search: HeterogeneousSearch,
        limits: Mapping[str, int],
        share: int,
        under_s: float,
    ) -> list[Estimate]:
        """The fastest over several types, if it is faster than this."""
        best: list[Estimate] = []
        allowed = self._allowed(job)
        for types in search.groups.values():
            free = search.free(job, types)
            for known in self._estimates.shapes(
                job.inspection.model, view.performance_tables[job.inspection.model], types
            ):
                if known.devices <= share and known.fastest_s < under_s:
                    offer = search.lay(job, known, free, limits, lambda x: allowed(x.plan))
                    if offer is not None and offer.step_time_s < under_s:
                        best, under_s = [offer], offer.step_time_s
        return best

    def _allowed(self, job: Job) -> Callable[[Plan], bool]:
        requested = job.spec.resources.plan
        if requested is None or self.choice is not PlanFreedom.REPLICAS:
            return lambda plan: True
        return lambda plan: is_alike(plan, requested)

    def _speeds(self, job: Job, view: View) -> dict[str, float]:
        """Samples per second of one device of each type, among as few as the job runs on there."""
        candidates = self.candidates(job, view)
        assert candidates is not None, "only managed jobs are asked"
        batch = view.performance_tables[job.inspection.model].global_batch
        return {
            name: batch / (sizes[least][0].step_time_s * least)
            for name, sizes in candidates.sizes.items()
            for least in (min(sizes),)
        }

    def _as_it_is(self, view: View, jobs: Sequence[Job], capacity: Capacity) -> tuple[float, Division] | None:
        """The current division; None: a job waits, or runs in a way that is not among its candidates."""
        score = 0.0
        found: Division = []
        for job in jobs:
            if job.attempt is None or job.attempt.plan is None:
                return None
            now = believed(
                view.performance_tables[job.inspection.model], job.attempt.plan, of_ranks(view.hosts, job.attempt)
            )
            if now is None or any(capacity.left.get(name, 0) < count for name, count in now.by_type.items()):
                return None
            capacity.take(now)
            found.append((job, [now]))
            score += likely_steps_left(job) * now.step_time_s
        return score, found

    def _root_of_work(self, job: Job, view: View) -> float:
        """Devices in proportion to it divide a cluster best between jobs that scale alike."""
        candidates = self.candidates(job, view)
        assert candidates is not None, "only managed jobs are asked"
        work_s = likely_steps_left(job) * min(n * x.step_time_s for n, x in candidates.fastest.items())
        return float(max(work_s, 1e-3) ** 0.5)
