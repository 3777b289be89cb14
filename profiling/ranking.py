"""Display of a model's speed: its plans as rows, and its curves over each resource."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.profiling import curves, fleet
from clusterd.profiling.curves import Curve, Point, envelope
from clusterd.profiling.knowledge import USABLE_SHARE, Knowledge, Ranked

LISTED = 30
"""Most plans of one answer; slower ones are omitted."""

RESOURCES = ("devices", "cores", "memory", "bandwidth")
"""Resources of curves: devices, CPU cores, bytes of host memory, multiples of the network's bandwidth."""


def plan_rows(
    known: Knowledge, count: int, shape: tuple[int, ...] | None, current: Plan | None
) -> list[dict[str, Any]]:
    """Plans on `count` devices, those that can run first and fastest first.

    Args:
        shape: devices on each host; default: the fewest hosts.
        current: plan of the running job, which is marked and always listed.
    """
    shapes = [s for s in fleet.shapes(known.devices) if sum(s) == count] or [(count,)]
    chosen = shape if shape is not None and sum(shape) == count else shapes[0]
    ranked = known.ranked([chosen], keep=LISTED, always=[current] if current is not None else ())
    rows = [_row(known, one, current) for one in sorted(ranked, key=lambda r: r.step_time_s)]
    if count > known.devices.devices:
        for row in rows:
            row["fits"], row["why"] = False, f"the cluster has {known.devices.devices} such devices"
    return rows + _out(known, count, current)


def _row(known: Knowledge, one: Ranked, current: Plan | None) -> dict[str, Any]:
    return {
        "plan": str(one.plan),
        "devices": one.plan.ranks,
        "shape": "+".join(map(str, one.shape)),
        "step_time_s": one.step_time_s,
        "lower_s": one.lower_s,
        "upper_s": one.upper_s,
        "device_bytes": one.memory.device_bytes,
        "host_bytes": one.memory.host_bytes,
        "measured_s": _newest(known, one.plan, one.shape),
        "fits": True,
        "why": "",
        "current": one.plan == current,
    }


def _out(known: Knowledge, count: int, current: Plan | None) -> list[dict[str, Any]]:
    """Plans that cannot run, one of each family and those that failed in a trial, with the reason."""
    rows: list[dict[str, Any]] = []
    families = (Plan(dp=count), Plan(tp=count), Plan(pp=count), Plan(dp=count, zero=1), Plan(dp=count, zero=3))
    tried = sorted((plan for plan in known.refused if plan.ranks == count), key=str)
    for plan in dict.fromkeys((*families, *tried)):
        reasons = check(plan, known.model, kinds=[known.devices.kind])
        if not reasons and plan in known.refused:
            reasons = ["it was tried, and ran out of memory or failed"]
        if not reasons and not known.fits(plan):
            need, have = known.memory(plan).device_bytes, known.devices.memory_bytes
            reasons = [f"a rank needs {need / 2**30:.1f} GiB, a device has {have * USABLE_SHARE / 2**30:.1f} to use"]
        if reasons and all(row["plan"] != str(plan) for row in rows):
            rows.append(
                {
                    "plan": str(plan), "devices": count, "shape": "", "step_time_s": None, "lower_s": None,
                    "upper_s": None, "device_bytes": None, "host_bytes": None, "measured_s": None, "fits": False,
                    "why": reasons[0], "current": plan == current,
                }
            )  # fmt: skip
    return rows


def device_curve(known: Knowledge) -> Curve:
    """Samples per second over the number of devices, with the best plan for each."""
    ranked = known.ranked(fleet.shapes(known.devices), keep=1)
    return envelope("devices", [_point(known, one) for one in ranked])


def _point(known: Knowledge, one: Ranked) -> Point:
    return Point(
        amount=float(sum(one.shape)),
        allocation=known.devices.allocation(one.shape),
        plan=one.plan,
        step_time_s=one.step_time_s,
        lower_s=one.lower_s,
        upper_s=one.upper_s,
        throughput=known.workload.global_batch / one.step_time_s,
    )


def on_types(on_each: Iterable[Knowledge], count: int) -> tuple[Point, ...]:
    """Best plan for `count` devices of each type on the fewest hosts, fastest type first."""
    found: list[Point] = []
    for known in on_each:
        shapes = [shape for shape in fleet.shapes(known.devices) if sum(shape) == count]
        found += [_point(known, one) for one in known.ranked(shapes[:1], keep=1)]
    return tuple(sorted(found, key=lambda p: -p.throughput))


def resource_curve(known: Knowledge, over: str, count: int) -> Curve:
    """Samples per second over one resource; the others are those of `count` devices on the fewest hosts."""
    if over == "devices":
        return device_curve(known)
    shape = next((s for s in fleet.shapes(known.devices) if sum(s) == count), (count,))
    allocation = known.devices.allocation(shape)
    fit, load = known.online.fit, known.workload
    plans = [
        plan for plan in known.plans(count) if known.fits(plan) and (over == "memory" or not known.is_needless(plan))
    ]
    if over == "cores":
        most = max(known.devices.cores_per_device, 1) * max(shape)
        return curves.over_cores(fit, load, plans, allocation, range(1, most + 1))
    if over == "memory":
        needs = {plan: known.memory(plan).host_bytes * max(shape) for plan in plans}
        amounts = sorted(set(needs.values()))[:64]
        return curves.over_host_memory(fit, load, plans, allocation, amounts, needs.__getitem__)
    return curves.over_bandwidth(fit, load, plans, allocation, (0.25, 0.5, 1.0, 2.0, 4.0))


def _newest(known: Knowledge, plan: Plan, shape: tuple[int, ...]) -> float | None:
    """Newest measured step time of a plan on a shape, with any number of cores; None if there is none."""
    newest = reversed(known.online.observations)
    return next((o.step_time_s for o in newest if (o.row.plan, o.row.allocation.counts) == (plan, shape)), None)
