"""Lower bounds that no policy can beat, even with full knowledge and free migrations.

Time is cut into intervals. In each, a job spends shares of the time under its ways to run, and all jobs together use
at most the devices there are: a linear programme, for which nothing has to be whole, on one host or in one piece. Of
a job whose progress lies on average `m` after its arrival, and that would take `p` at its fastest, no schedule
completes sooner than ``m + p / 2`` (the mean busy time, as in Goemans et al., Single machine scheduling with release
dates, 2002); the programme makes the sum of these least, with every interval's progress counted at its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from clusterd.simulate.cluster import Cluster
from clusterd.simulate.truth import ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload

INTERVALS = 250
"""Intervals of the horizon; more of them tighten the bound by half an interval at most."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in seconds, valid for every schedule."""

    average_completion_s: float
    makespan_s: float


@dataclass(frozen=True, slots=True)
class _Way:
    """One mode of execution: devices of a type, and steps per second."""

    device_type: str
    devices: int
    rate: float


def bounds(cluster: Cluster, workload: Workload, truth: Truth) -> Bounds:
    """Lower bounds of this workload on this cluster, under any plans of the truth."""
    there = _devices(cluster)
    ways = {name: _ways(model, there) for name, model in truth.models.items()}
    arrivals = workload.arrivals
    alone_s = [a.steps / max(w.rate for w in ways[a.model]) for a in arrivals]
    first_s = arrivals[0].at_s
    makespan_s = max(a.at_s - first_s + p for a, p in zip(arrivals, alone_s, strict=True))
    # Of the whole cluster, were it of one type: what arrives from here on cannot be done before it arrives.
    needed_s = 0.0
    for a in reversed(arrivals):
        needed_s += a.steps * min(w.devices / there[w.device_type] / w.rate for w in ways[a.model]) / len(there)
        makespan_s = max(makespan_s, a.at_s - first_s + needed_s)
    sum_s = max(_least_sum_s(arrivals, alone_s, ways, there, makespan_s), sum(alone_s))
    return Bounds(sum_s / len(arrivals), makespan_s)


def _devices(cluster: Cluster) -> dict[str, int]:
    found: dict[str, int] = {}
    for facts in cluster.facts().values():
        for device in facts.devices:
            found[device.name] = found.get(device.name, 0) + 1
    return found


def _ways(model: ModelTruth, there: Mapping[str, int]) -> tuple[_Way, ...]:
    """The fastest mode for each type and number of devices.

    A job on mixed types is as fast as a combination of the same shape on each type, in proportion to its devices, so it
    needs no mode of its own; shapes that no single type could hold count here.
    """
    best: dict[tuple[str, int], float] = {}
    for (_, device_type, shape), time in [*model.step_times_s.items(), *model.beyond.items()]:
        key = (device_type, sum(shape))
        if device_type in there:
            best[key] = min(best.get(key, float("inf")), time)
    return tuple(_Way(kind, count, 1.0 / time) for (kind, count), time in sorted(best.items()))


def _least_sum_s(
    arrivals: Sequence[Arrival],
    alone_s: Sequence[float],
    ways: Mapping[str, Sequence[_Way]],
    there: Mapping[str, int],
    makespan_s: float,
) -> float:
    """Least sum of completion times; a job shorter than an interval counts as if alone and without devices."""
    first_s, types = arrivals[0].at_s, {name: i for i, name in enumerate(there)}
    edges = np.linspace(0.0, 1.2 * makespan_s, INTERVALS + 1)
    width_s = float(edges[1])
    total_s = 0.0
    costs: list[float] = []
    capacity: list[tuple[int, int, float]] = []  # row, column, devices
    share: list[tuple[int, int, float]] = []
    progress: list[tuple[int, int, float]] = []
    spans: list[float] = []  # seconds that a job has in an interval
    jobs = 0
    for a, p in zip(arrivals, alone_s, strict=True):
        if p < width_s:
            total_s += p
            continue
        total_s += p / 2.0
        at_s = a.at_s - first_s
        for interval in range(int(at_s // width_s), INTERVALS):
            begin_s = max(at_s, float(edges[interval]))
            for way in ways[a.model]:
                column = len(costs)
                done = way.rate / a.steps  # of the job, per second
                costs.append((begin_s - at_s) * done)
                capacity.append((interval * len(types) + types[way.device_type], column, way.devices))
                share.append((len(spans), column, 1.0))
                progress.append((jobs, column, done))
            spans.append(float(edges[interval + 1]) - begin_s)
        # Work that does not fit is done at the end on extra devices, so the programme always has a solution.
        progress.append((jobs, len(costs), 1.0))
        costs.append(float(edges[-1]) - at_s)
        jobs += 1
    if not jobs:
        return total_s
    rows = INTERVALS * len(types)
    limits = np.concatenate([np.tile([float(there[name]) * width_s for name in types], INTERVALS), spans])
    above = _matrix([*capacity, *((rows + r, c, v) for r, c, v in share)], (rows + len(spans), len(costs)))
    exactly = _matrix(progress, (jobs, len(costs)))
    found = linprog(costs, A_ub=above, b_ub=limits, A_eq=exactly, b_eq=np.ones(jobs), method="highs-ipm")
    if not found.success:
        raise ArithmeticError(f"no bound was found: {found.message}")
    return total_s + float(found.fun)


def _matrix(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int]) -> coo_matrix:
    rows, columns, values = zip(*entries, strict=True)
    return coo_matrix((values, (rows, columns)), shape=shape)
