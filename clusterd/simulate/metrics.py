"""Metrics of one simulated run. A job that has not completed counts as completed at the horizon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from clusterd.simulate.runs import Result, TraceRun
from clusterd.simulate.workload import asked_step_s


def figures(result: Result) -> dict[str, Any]:
    """Metrics by name: seconds, shares, counts.

    Finish-time fairness is Shockwave's: the completion time divided by the time that the job would take alone with its
    requested devices, times the average number of jobs per device during its life (at least 1). The Jain index is
    computed on the inverse of these ratios without contention: the speed of each job relative to its request.
    """
    runs = result.runs
    ends = [r.end_s for r in runs if r.end_s is not None]
    # With rounds the last completion is observed after it happened.
    end_s = max(ends) if len(ends) == len(runs) else max([result.ended_s, *ends])
    completion = sorted(_completion_s(r, end_s) for r in runs)
    asked = [_asked_s(r) for r in runs]
    contention = _contention(runs, end_s, result.devices)
    rho = sorted(
        _completion_s(r, end_s) / (alone * factor) for r, alone, factor in zip(runs, asked, contention, strict=True)
    )
    speeds = [alone / _completion_s(r, end_s) for r, alone in zip(runs, asked, strict=True)]
    promised = [(r, alone) for r, alone in zip(runs, asked, strict=True) if r.arrival.guaranteed]
    met = [r for r, alone in promised if _met(r, alone)]
    makespan_s = end_s - result.started_s
    return {
        "jobs": len(runs),
        "finished": sum(r.end_s is not None for r in runs),
        "average_completion_s": statistics.fmean(completion),
        "median_completion_s": statistics.median(completion),
        "p99_completion_s": _quantile(completion, 0.99),
        "makespan_s": makespan_s,
        "queueing_s": statistics.fmean(r.waited_s for r in runs),
        "first_start_s": statistics.fmean(
            (r.first_start_s if r.first_start_s is not None else end_s) - r.arrival.at_s for r in runs
        ),
        "utilisation": result.device_s / (result.devices * makespan_s) if makespan_s > 0 else 0.0,
        "idle_while_waiting": result.idle_s / (result.devices * makespan_s) if makespan_s > 0 else 0.0,
        "gpu_hours": result.device_s / 3600.0,
        "moves_per_job": statistics.fmean(r.moves + r.restarts for r in runs),
        "guaranteed": len(promised),
        "guaranteed_met": len(met) / len(promised) if promised else None,
        "rho_max": rho[-1],
        "rho_p95": _quantile(rho, 0.95),
        "rho_over_1_1": sum(x > 1.1 for x in rho) / len(rho),
        "jain": sum(speeds) ** 2 / (len(speeds) * sum(x * x for x in speeds)),
        "pass_s": statistics.fmean(result.pass_s) if result.pass_s else 0.0,
        "pass_s_max": max(result.pass_s, default=0.0),
        "passes": result.passes,
        "failed": len(result.failed),
        "stuck": len(result.stuck),
    }


def _completion_s(run: TraceRun, end_s: float) -> float:
    return max((run.end_s if run.end_s is not None else end_s) - run.arrival.at_s, 1e-9)


def _asked_s(run: TraceRun) -> float:
    return run.arrival.steps * asked_step_s(run.model, run.arrival)


def _met(run: TraceRun, alone_s: float) -> bool:
    """True if the job ran, from its first start to its completion, at least as fast as its request would."""
    if run.end_s is None or run.first_start_s is None:
        return False
    return run.end_s - run.first_start_s <= alone_s * (1.0 + 1e-6) + 1e-6


def _contention(runs: Sequence[TraceRun], end_s: float, devices: int) -> list[float]:
    """Jobs per device averaged over each job's life, at least 1."""
    changes: list[tuple[float, int]] = []
    for run in runs:
        changes += [(run.arrival.at_s, 1), (run.arrival.at_s + _completion_s(run, end_s), -1)]
    changes.sort()
    times, areas, active, area, last = [0.0], [0.0], 0, 0.0, changes[0][0] if changes else 0.0
    steps: list[int] = [0]
    for at_s, more in changes:
        area += active * (at_s - last)
        active, last = active + more, at_s
        times.append(at_s)
        areas.append(area)
        steps.append(active)

    def area_at(at_s: float) -> float:
        from bisect import bisect_right

        index = bisect_right(times, at_s) - 1
        return areas[index] + steps[index] * (at_s - times[index]) if index > 0 else 0.0

    found: list[float] = []
    for run in runs:
        begin, stop = run.arrival.at_s, run.arrival.at_s + _completion_s(run, end_s)
        mean = (area_at(stop) - area_at(begin)) / (stop - begin) if stop > begin else 0.0
        found.append(max(1.0, mean / devices))
    return found


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(math.floor(share * len(ordered)), len(ordered) - 1)]
