"""Placement of several jobs on mixed workers: against exact optima, and against a mixed-integer solver.

python tests/benchmarks/placement.py [--json] [--instances N] [--solver-s SECONDS]

Exact optima by enumeration over types: 4 jobs, 15 workers of 3 types, speed-ups of each job its own. The solver is
HiGHS through scipy at growing sizes, workers all different, the convex objective by tangents; it may stop as near the
optimum as ours is meant to be. `speedup_vs_solver` is at the largest size that it finishes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from clusterd.core.placement.matching import match, total_s
from tests.benchmarks.report import Report, arguments

TYPES = 3
SIZES = (
    (3, 6), (4, 9), (5, 12), (6, 18), (8, 24), (10, 40), (12, 48), (16, 64), (24, 96), (32, 128), (48, 192), (64, 256),
)  # fmt: skip
"""Jobs and workers, until the solver does not finish."""
GAP = 0.006
"""To the optimum: the aim for ours on average, and what the solver is asked for."""


def instance(jobs: int, workers: int, seed: int, alike: bool) -> tuple[Any, Any]:
    """Work and rates; workers of three types, all alike within a type or each a little different."""
    random = np.random.default_rng(seed)
    base = random.uniform(50, 200, jobs)
    steps = np.concatenate([np.ones((jobs, 1)), random.uniform(1.2, 2.5, (jobs, TYPES - 1))], axis=1)
    factors = np.cumprod(steps, axis=1)
    kinds = np.arange(workers) % TYPES
    rates = base[:, None] * factors[:, kinds]
    if not alike:
        rates *= random.uniform(0.9, 1.1, (1, workers))
    return base * random.lognormal(6.0, 1.0, jobs), rates


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to share `total` among so many."""
    if parts == 1:
        return [(total,)]
    return [(n, *rest) for n in range(total + 1) for rest in compositions(total - n, parts - 1)]


def optimum(work: Any, rates: Any) -> float:
    """By enumeration: how many workers of each type each job has."""
    jobs, workers = rates.shape
    kinds = [np.flatnonzero(np.arange(workers) % TYPES == t) for t in range(TYPES)]
    shares = [np.array(compositions(len(k), jobs)) @ np.diag(rates[:, k[0]]) for k in kinds]
    best = float("inf")
    for first, second in product(shares[0], shares[1]):
        speed = first + second + shares[2]
        with np.errstate(divide="ignore"):
            best = min(best, float((work / speed).sum(axis=1).min()))
    return best


def solve(work: Any, rates: Any, limit_s: float) -> tuple[float | None, float]:
    """HiGHS: sum of completion times of what it found (None: not finished), and its seconds."""
    jobs, workers = rates.shape
    least = rates.min(axis=1)
    points = [np.geomspace(least[i], rates[i].sum(), 30) for i in range(jobs)]
    count = jobs * workers + jobs
    rows = sum(len(p) for p in points)
    matrix = lil_matrix((rows + workers, count))
    low = np.full(rows + workers, -np.inf)
    high = np.full(rows + workers, np.inf)
    row = 0
    for i in range(jobs):
        for s in points[i]:  # t_i >= W (2/s - S/s^2)
            matrix[row, jobs * workers + i] = 1.0
            matrix[row, i * workers : (i + 1) * workers] = work[i] * rates[i] / s**2
            low[row] = 2.0 * work[i] / s
            row += 1
    for k in range(workers):
        for i in range(jobs):
            matrix[row, i * workers + k] = 1.0
        low[row] = high[row] = 1.0
        row += 1
    cost = np.concatenate([np.zeros(jobs * workers), np.ones(jobs)])
    integral = np.concatenate([np.ones(jobs * workers), np.zeros(jobs)])
    upper = np.concatenate([np.ones(jobs * workers), np.full(jobs, np.inf)])
    began_s = time.perf_counter()
    with quiet():
        answer = milp(
            cost,
            constraints=LinearConstraint(matrix.tocsr(), low, high),
            integrality=integral,
            bounds=Bounds(0, upper),
            options={"time_limit": limit_s, "mip_rel_gap": GAP},
        )
    took_s = time.perf_counter() - began_s
    if answer.status != 0 or answer.x is None:
        return None, took_s
    whose = answer.x[: jobs * workers].reshape(jobs, workers).argmax(axis=0)
    return total_s(work, rates, whose), took_s


@contextmanager
def quiet() -> Iterator[None]:
    """The solver's library writes to standard output, which is ours."""
    sys.stdout.flush()
    stored = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(stored, 1)
        os.close(stored)
        os.close(nowhere)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--solver-s", type=float, default=60.0)
    given = parser.parse_args()
    gaps: list[float] = []
    fairness: list[float] = []
    for seed in range(given.instances):
        work, rates = instance(4, 15, seed, alike=True)
        whose = match(work, rates, seed=seed)
        gaps.append(total_s(work, rates, whose) / optimum(work, rates) - 1.0)
        speed = np.bincount(whose, rates[whose, np.arange(15)], 4)
        # Of completion times relative to those of an equal split.
        equal = rates.sum(axis=1) / 4
        x = equal / speed
        fairness.append(float(x.sum() ** 2 / (len(x) * (x * x).sum())))
    sizes: dict[str, Any] = {}
    speedup: float | None = None
    for jobs, workers in SIZES:
        work, rates = instance(jobs, workers, 1000 + jobs, alike=False)
        theirs, solver_s = solve(work, rates, given.solver_s)
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            whose = match(work, rates)
            times.append(time.perf_counter() - began_s)
        ours_s = statistics.median(times)
        ours = total_s(work, rates, whose)
        sizes[f"{jobs}x{workers}"] = {
            "solver_s": solver_s,
            "ours_s": ours_s,
            "finished": theirs is not None,
            "ours_over_solver": ours / theirs if theirs is not None else None,
        }
        if theirs is None:
            break
        speedup = solver_s / ours_s
    report = Report("placement")
    report.add("gap_mean", statistics.fmean(gaps), at_most=GAP)
    report.add("gap_max", max(gaps), at_most=0.0204)
    report.add("speedup_vs_solver", speedup, at_least=100)
    report.add("jain", statistics.fmean(fairness))
    report.details["sizes"] = sizes
    report.show(given.json)


if __name__ == "__main__":
    main()
