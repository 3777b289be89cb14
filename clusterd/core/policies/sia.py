"""Sia (Jayaram Subramanya et al., SOSP 2023): one integer programme every 60 s over jobs and configurations.

A configuration is a number of devices of one type. Its value is the goodput relative to the job's least, times a
restart factor for those that would change, to the power p = -0.5; waiting costs lambda_n = 1.1, changing lambda_a =
0.01 (parameters of the authors' simulator). Batch and learning rate are fixed here, so goodput is throughput. The
user's plan is kept, with more or fewer replicas; a size at most twice what the job has run on, as bootstrapped there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import scipy

from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.candidate_plans import PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.policies.base import Capacity
from clusterd.core.policies.optimus import Rounds, now_on
from clusterd.core.state import Job
from clusterd.core.view import View

POWER = -0.5
WAITING = 1.1
CHANGING = 0.01
SOLVER_S = 10.0


class Sia(Rounds):
    """The integer programme."""

    name = "sia"
    published = PlanFreedom.REPLICAS
    interval_s: float | None = 60.0

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """One configuration for each job, or none."""
        values: list[float] = []
        cells: list[tuple[int, str, int]] = []  # job, type, devices
        kinds = sorted(capacity.left)
        for number, job in enumerate(jobs):
            candidates = self.candidates(job, view)
            assert candidates is not None
            now = now_on(job, view, candidates)
            least = max(x.step_time_s for x in candidates.fastest.values())
            had = max((len(a.ranks) for a in job.attempts), default=0)
            had = max(had, candidates.counts[0])
            factor = self._restart_factor(job, view)
            for kind, sizes in candidates.sizes.items():
                for size, some in sizes.items():
                    if size > max(2 * had, candidates.counts[0]) or size > capacity.left.get(kind, 0):
                        continue
                    same = now is not None and now.device_type == kind and now.devices == size
                    gain = least / some[0].step_time_s * (1.0 if same or now is None else factor)
                    worth = gain**POWER + (0.0 if same else CHANGING)
                    cells.append((number, kind, size))
                    values.append(worth - WAITING)
        if not cells:
            return []
        chosen = best_one(values, cells, capacity.left) if len(kinds) == 1 else best(values, cells, capacity.left)
        found: list[tuple[Job, Sequence[Estimate]]] = []
        for index in chosen:
            number, kind, size = cells[index]
            candidates = self.candidates(jobs[number], view)
            assert candidates is not None
            found.append((jobs[number], candidates.sizes[kind][size]))
        return found

    def _restart_factor(self, job: Job, view: View) -> float:
        """Restart factor: age less restarts, over age plus one restart (as in Pollux and Sia)."""
        cost_s = view.move_costs_s.get(job.inspection.model, max(view.move_costs_s.values(), default=30.0))
        age_s = executed_s(job, view.now_s)
        made = len(job.plan_changes) + max(len(job.attempts) - 1, 0)
        if age_s + cost_s <= 0:
            return 1.0  # it has just come, and moves cost nothing
        return max((age_s - made * cost_s) / (age_s + cost_s), 1e-2)


Cell = tuple[int, str, int]


def best_one(values: Sequence[float], cells: Sequence[Cell], left: Mapping[str, int]) -> list[int]:
    """Of each job at most one cell, least sum of values, one device type: exactly, by dynamic programming."""
    capacity = next(iter(left.values()))
    by_job: dict[int, list[int]] = {}
    for index, (number, _, _) in enumerate(cells):
        by_job.setdefault(number, []).append(index)
    total = np.zeros(capacity + 1)
    picks: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for indices in by_job.values():
        pick = np.full(capacity + 1, -1, dtype=np.int64)
        better = total.copy()
        for index in indices:
            size = cells[index][2]
            if size > capacity:
                continue
            with_it = np.full(capacity + 1, np.inf)
            with_it[size:] = total[: capacity + 1 - size] + values[index]
            won = with_it < better - 1e-12
            better[won], pick[won] = with_it[won], index
        total = better
        picks.append(pick)
    chosen: list[int] = []
    ledger = capacity
    for pick in reversed(picks):
        index = int(pick[ledger])
        if index >= 0:
            chosen.append(index)
            ledger -= cells[index][2]
    return chosen


def best(values: Sequence[float], cells: Sequence[Cell], left: Mapping[str, int]) -> list[int]:
    """The same over several types, by HiGHS; what it has found when its time is over."""
    kinds = sorted(left)
    jobs = sorted({number for number, _, _ in cells})
    row_of = {number: row for row, number in enumerate(jobs)}
    column = np.arange(len(cells))
    rows = np.concatenate([[row_of[c[0]] for c in cells], [len(jobs) + kinds.index(c[1]) for c in cells]])
    data = np.concatenate([np.ones(len(cells)), [float(c[2]) for c in cells]])
    matrix = scipy.sparse.coo_matrix(
        (data, (rows, np.concatenate([column, column]))), (len(jobs) + len(kinds), len(cells))
    )
    limits = np.concatenate([np.ones(len(jobs)), [float(left[k]) for k in kinds]])
    answer = scipy.optimize.milp(
        np.array(values),
        constraints=scipy.optimize.LinearConstraint(matrix.tocsr(), -np.inf, limits),
        integrality=np.ones(len(cells)),
        bounds=scipy.optimize.Bounds(0, 1),
        options={"time_limit": SOLVER_S, "mip_rel_gap": 1e-3, "presolve": True},
    )
    if answer.x is None:
        raise ArithmeticError(f"the solver gave no answer in {SOLVER_S:g} s: {answer.message}")
    return [index for index, x in enumerate(answer.x) if x > 0.5]
