"""Gavel (Narayanan et al., OSDI 2020): time shares of device types by a linear programme, realised in rounds of 360 s.

The objective is max_sum_throughput_perf, the default of Sia's simulator for Gavel: the sum of throughputs, each
relative to the job's own on an equal share of the cluster. Sizes and plans are the user's. A round serves jobs by
share over time received on a type, then by shortfall, then by share, wide ones placed first; between rounds new jobs
start on what is free. The programme is solved again when jobs come or go, at least 1920 s after the last time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

from clusterd.core.estimates.candidate_plans import CandidatePlans, PlanFreedom
from clusterd.core.ledger import of_ranks
from clusterd.core.performance_table import Estimate
from clusterd.core.policies.base import Capacity, asked_size
from clusterd.core.policies.optimus import Rounds
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import JobId

RESET_S = 1920.0


class Gavel(Rounds):
    """Time shares of types, one type per job at a time."""

    name = "gavel"
    published = PlanFreedom.ASKED
    interval_s: float | None = 360.0

    def __init__(self, plans: bool = False) -> None:
        super().__init__(plans)
        self._shares: dict[str, dict[str, float]] = {}
        self._received: dict[str, dict[str, float]] = {}
        self._since_s = float("-inf")
        self._jobs: frozenset[str] = frozenset()
        self._last_s: float | None = None
        self._began_s: dict[tuple[JobId, int], float] = {}  # by attempt: moves with the clock when that is set

    def first(self, job: Job, candidates: CandidatePlans, capacity: Capacity) -> Sequence[Estimate]:
        """Requested size of a new job, on the type where that is fastest."""
        return capacity.fits(candidates.by_speed[asked_size(job, candidates)])

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """One round: highest priorities first."""
        self._credit(view, jobs)
        names = frozenset(job.id for job in jobs)
        if names != self._jobs and (view.now_s - self._since_s >= RESET_S or names - set(self._shares)):
            self._shares = self._solve(view, jobs, dict(capacity.left))
            self._jobs, self._since_s = names, view.now_s
        entries: list[tuple[float, float, float, str, Job, str]] = []
        for job in jobs:
            candidates = self.candidates(job, view)
            assert candidates is not None
            received = self._received.get(job.id, {})
            total = sum(received.values())
            for kind in candidates.sizes:
                share = self._shares.get(job.id, {}).get(kind, 0.0)
                fraction = received.get(kind, 0.0) / total if total else 0.0
                priority = share / fraction if fraction else share * 1e9
                deficit = share * total - received.get(kind, 0.0)
                entries.append((-priority, -deficit, -share, job.id, job, kind))
        found: list[tuple[Job, Sequence[Estimate]]] = []
        served: set[str] = set()
        for _, _, less, _, job, kind in sorted(entries, key=lambda e: (*e[:3], e[4].submitted_s, e[3])):
            if job.id in served or less == 0.0:
                continue
            candidates = self.candidates(job, view)
            assert candidates is not None
            some = candidates.sizes[kind].get(asked_size(job, candidates), ())
            options = capacity.fits(some)
            if options:
                capacity.take(options[0])
                served.add(job.id)
                found.append((job, options))
        return found

    def _credit(self, view: View, jobs: list[Job]) -> None:
        """Time received since the last round, by type."""
        began_s = {(job.id, job.attempt.number): job.attempt.started_s for job in jobs if job.attempt is not None}
        set_by_s = next((at_s - self._began_s[key] for key, at_s in began_s.items() if key in self._began_s), 0.0)
        passed_s = max(view.now_s - self._last_s - set_by_s, 0.0) if self._last_s is not None else 0.0
        self._last_s, self._began_s = view.now_s, began_s
        alive = {job.id for job in jobs}
        self._received = {job: some for job, some in self._received.items() if job in alive}
        for job in jobs:
            if job.attempt is None:
                continue
            devices = of_ranks(view.hosts, job.attempt)
            if devices:
                some = self._received.setdefault(job.id, {})
                some[devices[0].name] = some.get(devices[0].name, 0.0) + passed_s

    def _solve(self, view: View, jobs: list[Job], there: dict[str, int]) -> dict[str, dict[str, float]]:
        """X, job by type: at most all of a job's time, at most all devices of a type."""
        kinds = sorted(there)
        gains: list[float] = []
        cells: list[tuple[int, int, int]] = []  # job, type, devices
        total = max(sum(there.values()), 1)
        for number, job in enumerate(jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None
            size = asked_size(job, candidates)
            speeds = {
                k: 1.0 / candidates.sizes[k][size][0].step_time_s
                for k in candidates.sizes
                if size in candidates.sizes[k]
            }
            equal = sum(speeds.get(k, 0.0) * there[k] for k in kinds) / total or 1.0
            for k, speed in speeds.items():
                if k in there:
                    cells.append((number, kinds.index(k), size))
                    gains.append(speed / equal)
        if not cells:
            return {}
        column = np.arange(len(cells))
        rows = np.concatenate([[c[0] for c in cells], [len(jobs) + c[1] for c in cells]])
        values = np.concatenate([np.ones(len(cells)), [float(c[2]) for c in cells]])
        matrix = scipy.sparse.coo_matrix(
            (values, (rows, np.concatenate([column, column]))), (len(jobs) + len(kinds), len(cells))
        )
        limits = np.concatenate([np.ones(len(jobs)), [float(there[k]) for k in kinds]])
        answer = scipy.optimize.linprog(
            -np.array(gains), A_ub=matrix.tocsr(), b_ub=limits, bounds=(0, 1), method="highs"
        )
        shares: dict[str, dict[str, float]] = {job.id: {} for job in jobs}
        for (number, kind, _), x in zip(cells, answer.x, strict=True):
            shares[jobs[number].id][kinds[kind]] = max(float(x), 1e-4)
        return shares
