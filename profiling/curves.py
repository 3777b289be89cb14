"""Throughput curves of a job over each resource, for allocation decisions and display.

A point is the best plan on one allocation. Envelopes are monotone, because a job need not use all it is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import INDEX
from clusterd.profiling.fit import Fit
from clusterd.profiling.model import Row, Rows
from clusterd.profiling.placement import Allocation, HostShare
from clusterd.profiling.workload import Workload

Fits = Callable[[Plan, Allocation], bool]
"""True if a plan is legal and fits the memory of an allocation; the caller knows devices and hosts."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on one allocation."""

    amount: float  # of the curve's resource, in its unit
    allocation: Allocation
    plan: Plan
    step_time_s: float
    lower_s: float  # of the 90% interval
    upper_s: float
    throughput: float  # samples/s


@dataclass(frozen=True, slots=True)
class Curve:
    """Best points over increasing amounts of one resource, without amounts on which no plan can run."""

    resource: str
    points: tuple[Point, ...]

    def at(self, amount: float) -> Point | None:
        """Best point within an amount of the resource; None if no plan can run."""
        return max((p for p in self.points if p.amount <= amount), key=lambda p: p.amount, default=None)

    def gain(self, amount: float) -> float:
        """Gain in samples/s per additional unit, to the best later point; 0 if more does not help."""
        here = self.at(amount)
        now = here.throughput if here is not None else 0.0
        slopes = [(p.throughput - now) / (p.amount - amount) for p in self.points if p.amount > amount]
        return max(0.0, *slopes) if slopes else 0.0


def best_points(
    fit: Fit, workload: Workload, choices: Sequence[tuple[float, Allocation, Iterable[Plan]]], fits: Fits | None = None
) -> tuple[Point, ...]:
    """Best plan for each (amount, allocation, plans), predicted in one call; choices without a usable plan are omitted.

    Args:
        fits: whether a plan fits in the memory of an allocation; default: every plan does.
    """
    rows: list[Row] = []
    owners: list[int] = []
    for index, (_, allocation, plans) in enumerate(choices):
        for plan in plans:
            if plan.ranks == allocation.devices and (fits is None or fits(plan, allocation)):
                rows.append(Row(workload, plan, allocation))
                owners.append(index)
    if not rows:
        return ()
    prediction = fit.predict(Rows.of(rows))
    low, high = prediction.interval(0.9)
    times = prediction.median_s
    owned = np.array(owners)
    # The fastest row of each choice; the first of equals.
    order = np.lexsort((np.arange(len(rows)), times, owned))
    first = order[np.unique(owned[order], return_index=True)[1]]
    return tuple(
        Point(
            amount=choices[owners[i]][0],
            allocation=rows[i].allocation,
            plan=rows[i].plan,
            step_time_s=float(times[i]),
            lower_s=float(low[i]),
            upper_s=float(high[i]),
            throughput=workload.global_batch / float(times[i]),
        )
        for i in first.tolist()
    )


def envelope(resource: str, points: Iterable[Point]) -> Curve:
    """Points that are faster than every point with less of the resource, in order of the amount."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.amount, -p.throughput)):
        if not best or point.throughput > best[-1].throughput:
            if best and best[-1].amount == point.amount:
                continue
            best.append(point)
    return Curve(resource, tuple(best))


def packed(
    devices: int, per_host: int, *, cores_per_device: int = 0, device_type: str = "", speed: float = 1.0
) -> Allocation:
    """Allocation of `devices` devices on the fewest hosts, which curves assume because placement comes later."""
    counts = [per_host] * (devices // per_host) + ([devices % per_host] if devices % per_host else [])
    return Allocation(tuple(HostShare(n, n * cores_per_device, device_type, speed) for n in counts))


def over_cores(
    fit: Fit,
    workload: Workload,
    plans: Sequence[Plan],
    allocation: Allocation,
    cores: Iterable[int],
) -> Curve:
    """Throughput over the total number of CPU cores, on the devices of `allocation`; `cores`: cores per host."""
    choices = [
        (
            float(n * len(allocation.hosts)),
            Allocation(tuple(HostShare(h.devices, n, h.device_type, h.speed) for h in allocation.hosts)),
            plans,
        )
        for n in cores
        if n > 0
    ]
    return envelope("cores", best_points(fit, workload, choices))


def over_host_memory(
    fit: Fit,
    workload: Workload,
    plans: Sequence[Plan],
    allocation: Allocation,
    amounts_bytes: Iterable[int],
    needs_bytes: Callable[[Plan], int],
) -> Curve:
    """Throughput over the memory of each host; `needs_bytes`: host memory that a plan needs, for example to offload."""
    needs = {plan: needs_bytes(plan) for plan in plans}
    choices = [(float(amount), allocation, [p for p in plans if needs[p] <= amount]) for amount in amounts_bytes]
    return envelope("host memory", best_points(fit, workload, choices))


def over_bandwidth(
    fit: Fit, workload: Workload, plans: Sequence[Plan], allocation: Allocation, factors: Iterable[float]
) -> Curve:
    """Throughput over the network's bandwidth, as multiples of the fitted one."""
    points: list[Point] = []
    for factor in factors:
        points += best_points(with_bandwidth(fit, factor), workload, [(factor, allocation, plans)])
    return envelope("network bandwidth", points)


def with_bandwidth(fit: Fit, factor: float) -> Fit:
    """The fit with the network's bandwidth multiplied by `factor`.

    Raises:
        ValueError: the factor is not positive.
    """
    if not factor > 0:
        raise ValueError(f"the bandwidth factor is {factor}; give a factor above 0")
    shift = np.zeros(len(fit.best.logs))
    shift[INDEX["network_rate"]] = np.log(factor)
    return replace(fit, posteriors=tuple(replace(p, logs=p.logs + shift) for p in fit.posteriors))
