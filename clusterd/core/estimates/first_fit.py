"""Choice of a plan without a performance model: the user's own, or the simplest legal one that fits device memory."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from clusterd.core.host import Host
from clusterd.core.ledger import of_ranks
from clusterd.core.state import NO_BOUNDS, Attempt, Bounds, Job
from clusterd.plans.enumerate import legal_plans
from clusterd.plans.legality import check
from clusterd.plans.memory import MemoryEstimate, estimate
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId
from clusterd.units import counted

USABLE_SHARE = 0.92
"""Share of a device's memory that plans may use; fragmentation and the driver take the rest."""


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan that can run, and the reason for it."""

    plan: Plan
    memory: MemoryEstimate
    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """Reason why no plan can run."""

    reason: str


def fewer(devices: int) -> list[int]:
    """Numbers of devices that are tried where no plan is left on `devices`, which is the first."""
    return [devices >> n for n in range(devices.bit_length())]


@lru_cache(maxsize=4096)
def choose(
    shape: ModelShape,
    devices: int,
    kind: str,
    memory_bytes: int,
    requested: Plan | None = None,
    bounds: Bounds = NO_BOUNDS,
) -> ChosenPlan | Impossible:
    """Choose a plan for exactly `devices` devices of `kind` with `memory_bytes` each.

    Pure and cached: every pass asks it for every queued job.
    """
    usable_bytes = min(memory_bytes * USABLE_SHARE, bounds.memory_cap_bytes or memory_bytes)
    if requested is not None:
        if (why := dict(bounds.rejected).get(requested)) is not None:  # a user may try a plan that only resembles one
            return Impossible(f"its plan {requested} cannot be: {why}")
        return _check_requested(shape, kind, memory_bytes, usable_bytes, requested)
    legal = legal_plans(shape, devices, kind=kind)
    plans = [plan for plan in legal if bounds.why_not(plan) is None]
    none = f"no plan on {counted(devices, 'device')}"
    if not plans:
        why = bounds.why_not(legal[0]) if legal else None
        return Impossible(_why_none(shape, devices, kind) if why is None else f"{none}: {why}")
    least: tuple[int, Plan] | None = None
    for plan in plans:
        memory = estimate(plan, shape, kind=kind)
        if memory.device_bytes <= usable_bytes:
            reason = f"the simplest that fits, with {_gib(memory.device_bytes)} of {_gib(memory_bytes)} per device"
            return ChosenPlan(plan, memory, reason)
        if least is None or memory.device_bytes < least[0]:
            least = (memory.device_bytes, plan)
    assert least is not None
    return Impossible(
        f"{none} fits: the least memory is {_gib(least[0])} per device with {least[1]}, "
        f"they have {_gib(memory_bytes)}{_but(usable_bytes, memory_bytes)}: ask for more devices"
    )


def below(shape: ModelShape, plan: Plan, kind: str, bounds: Bounds = NO_BOUNDS) -> tuple[int, Plan] | None:
    """Choose a plan on as many devices that needs a tenth less device memory than `plan`, which ran out of it.

    A tenth because estimates are off by a twentieth and each try costs the job a start.

    Returns:
        The memory cap in bytes and the plan; None: no plan needs so little.
    """
    needed_bytes = estimate(plan, shape, kind=kind).device_bytes
    memory_cap_bytes = int(needed_bytes * 0.9)
    answer = choose(shape, plan.ranks, kind, needed_bytes, bounds=replace(bounds, memory_cap_bytes=memory_cap_bytes))
    return (memory_cap_bytes, answer.plan) if isinstance(answer, ChosenPlan) else None


def memory_conflict(
    hosts: Mapping[HostId, Host], job: Job, attempt: Attempt, plan: Plan, devices: Container[DeviceId | None]
) -> str | None:
    """Reason why target ranks of `plan` on these devices would lack memory beside the source ranks; None: they fit."""
    shared = [d for d in of_ranks(hosts, attempt) if d.id in devices]
    if not shared or attempt.plan is None or job.inspection.shape is None:
        return None
    if one := next((d.id for d in shared if d.exclusive), None):
        return f"{one} takes one process at a time (its compute mode: `nvidia-smi -c 0` as root lets in several)"
    if job.failures.needs_exclusive_memory:
        return "a rank of it ran out of memory before, while target ranks started beside it"
    tightest = min(shared, key=lambda d: d.memory_bytes)
    return _shared_memory(
        ModelShape.from_dict(job.inspection.shape), attempt.plan, plan, tightest.kind, tightest.memory_bytes
    )


@lru_cache(maxsize=4096)
def _shared_memory(shape: ModelShape, old: Plan, new: Plan, kind: str, memory_bytes: int) -> str | None:
    """Reason why ranks of both plans do not fit on one device; the rank that runs out may be the one that trains."""
    there, more = estimate(old, shape, kind=kind).device_bytes, estimate(new, shape, kind=kind).device_bytes
    if there + more <= memory_bytes * USABLE_SHARE:
        return None
    return (
        f"a rank of {new} needs {_gib(more)} beside the {_gib(there)} of {old}, which trains on the same device until "
        f"then, and that has {_gib(memory_bytes)}"
    )


def _check_requested(
    shape: ModelShape, kind: str, memory_bytes: int, usable_bytes: float, plan: Plan
) -> ChosenPlan | Impossible:
    reasons = check(plan, shape, kinds=[kind])
    if reasons:
        return Impossible(f"its plan {plan} cannot be: {'; '.join(reasons)}")
    memory = estimate(plan, shape, kind=kind)
    if memory.device_bytes > usable_bytes:
        return Impossible(
            f"its plan {plan} cannot fit: a rank needs {_gib(memory.device_bytes)}, a device has {_gib(memory_bytes)}"
            f"{_but(usable_bytes, memory_bytes)}: "
            "use more devices, zero=3, checkpointing or accumulation, or leave the plan to clusterd"
        )
    return ChosenPlan(plan, memory, f"as asked, with {_gib(memory.device_bytes)} of {_gib(memory_bytes)} per device")


def _why_none(shape: ModelShape, devices: int, kind: str) -> str:
    reasons = check(Plan(dp=devices), shape, kinds=[kind])
    return f"no plan uses exactly {counted(devices, 'device')}: {'; '.join(reasons) or 'none is legal'}"


def _but(usable_bytes: float, memory_bytes: int) -> str:
    if usable_bytes >= memory_bytes * USABLE_SHARE:
        return ""
    return f", and a plan estimated at more than {_gib(usable_bytes)} ran out of memory"


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
