"""Performance table of a model: predicted step time and memory by plan and shape of allocation.

Whoever makes it (the daemon out of trial runs, the simulator out of measured tables) hands it over by an event; the
core looks things up and never fits anything. An entry is a plan on a *shape* of allocation: so many devices of one type
on each of so many hosts, most first. What is believed of hosts of different types follows from entries of each type
(`clusterd.core.estimates.heterogeneous_speed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from clusterd.plans.plan import Plan

Shape = tuple[int, ...]
"""Number of devices on each host, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted step time and memory of one plan on one shape of allocation, with its uncertainty."""

    plan: Plan
    device_type: str  # `Device.name`
    shape: Shape
    step_time_s: float  # median
    lower_s: float  # of the 90% interval
    upper_s: float
    cores_per_device: int = 0  # that it takes beside each to be so fast; 0: any number
    device_bytes: int = 0  # of a rank, at its peak; 0: not known
    host_bytes: int = 0  # of a rank in host memory (offload)
    core_times: tuple[tuple[int, float], ...] = ()  # step time by cores beside each device, ascending; empty: all alike
    device_types: tuple[str, ...] = ()  # of each host of the shape, where they differ; empty: all `device_type`

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return sum(self.shape)

    @property
    def types(self) -> tuple[str, ...]:
        """Device type on each host of the shape."""
        return self.device_types or (self.device_type,) * len(self.shape)

    @property
    def by_type(self) -> dict[str, int]:
        """Devices of each type."""
        found: dict[str, int] = {}
        for name, count in zip(self.types, self.shape, strict=True):
            found[name] = found.get(name, 0) + count
        return found


@dataclass(frozen=True)
class PerformanceTable:
    """All estimates of one model. Immutable: new measurements make a new table."""

    estimates: tuple[Estimate, ...]
    global_batch: int = 1
    measured: int = 0  # plans that were run; 0: nothing but beliefs about the hardware
    beyond: tuple[Estimate, ...] = ()  # on shapes for which no type has hosts: nothing to run on, part of mixed beliefs
    is_whole: bool = False  # the model runs in these ways only: nothing else is to be tried

    @cached_property
    def by_shape(self) -> dict[tuple[str, Shape], tuple[Estimate, ...]]:
        """Estimates by device type and shape, fastest first."""
        found: dict[tuple[str, Shape], list[Estimate]] = {}
        for estimate in self.estimates:
            found.setdefault((estimate.device_type, estimate.shape), []).append(estimate)
        return {key: tuple(sorted(some, key=lambda x: x.step_time_s)) for key, some in found.items()}

    @cached_property
    def by_count(self) -> dict[str, dict[int, Estimate]]:
        """The fastest estimate for each number of devices, by type; a shape on fewer hosts comes first among equals."""
        found: dict[str, dict[int, Estimate]] = {}
        for (device_type, shape), some in self.by_shape.items():
            counts = found.setdefault(device_type, {})
            best = counts.get(sum(shape))
            if best is None or (some[0].step_time_s, len(shape)) < (best.step_time_s, len(best.shape)):
                counts[sum(shape)] = some[0]
        return {device_type: dict(sorted(counts.items())) for device_type, counts in found.items()}

    @cached_property
    def cores_matter(self) -> bool:
        """True where some plan is faster with more CPU cores."""
        return any(estimate.core_times for estimate in self.estimates)

    @cached_property
    def alone(self) -> dict[Shape, dict[Plan, dict[str, Estimate]]]:
        """By shape, plan without shares and device type: what hosts of several types are judged by.

        Plans without pipeline only: stages wait for each other whatever their shares.
        """
        found: dict[Shape, dict[Plan, dict[str, Estimate]]] = {}
        for estimate in (*self.estimates, *self.beyond):
            if estimate.plan.pp == 1:
                types = found.setdefault(estimate.shape, {}).setdefault(evenly(estimate.plan), {})
                known = types.get(estimate.device_type)
                if known is None or estimate.step_time_s < known.step_time_s:
                    types[estimate.device_type] = estimate
        return found

    @cached_property
    def mixable(self) -> dict[Shape, dict[Plan, dict[str, Estimate]]]:
        """The part of `alone` that is known on several types, most devices first."""
        several = {
            shape: some
            for shape, plans in self.alone.items()
            if (some := {plan: types for plan, types in plans.items() if len(types) > 1})
        }
        return dict(sorted(several.items(), key=lambda item: (-sum(item[0]), len(item[0]))))

    def best(self, device_type: str, shape: Iterable[int]) -> Estimate | None:
        """Fastest estimate on a shape; None: no plan is known to run there."""
        some = self.by_shape.get((device_type, tuple(sorted(shape, reverse=True))))
        return some[0] if some else None

    def of(self, plan: Plan, device_type: str, shape: Iterable[int]) -> Estimate | None:
        """Estimate of one plan on a shape; None: unknown."""
        some = self.by_shape.get((device_type, tuple(sorted(shape, reverse=True))), ())
        return next((estimate for estimate in some if estimate.plan == plan), None)


def evenly(plan: Plan) -> Plan:
    """The plan without explicit batch shares."""
    return replace(plan, shares=()) if plan.shares else plan
