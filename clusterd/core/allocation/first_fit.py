"""Which plan on so many devices of a kind: the user's wish, or the simplest that fits their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from plans.enumerate import legal_plans
from plans.legality import check
from plans.memory import MemoryEstimate, estimate
from plans.model_shape import ModelShape
from plans.plan import Plan

USABLE_SHARE = 0.92
"""Of a device's memory: fragmentation and the driver take the rest."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that can run, and why this one."""

    plan: Plan
    memory: MemoryEstimate
    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """No plan can run there; the reason names what is in the way."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What has turned out to be impossible for a job.

    Attributes:
        at_most_bytes: that a plan may be thought to need, for one that was thought to need more did not fit.
        refused: plans under which its ranks cannot train, and why.
    """

    at_most_bytes: int | None = None
    refused: tuple[tuple[Plan, str], ...] = ()

    def why_not(self, plan: Plan) -> str | None:
        """Why the job cannot train under `plan`, as far as is known: it does all that a refused one does."""
        return next(
            (f"under {other}: {why}" for other, why in self.refused if other.techniques <= plan.techniques), None
        )

    def admits(self, plan: Plan, device_bytes: int) -> bool:
        """Whether nothing rules out a plan that is thought to need so much."""
        fits = self.at_most_bytes is None or device_bytes <= self.at_most_bytes
        return fits and self.why_not(plan) is None


NO_BOUNDS = Bounds()


@lru_cache(maxsize=4096)
def choose(
    shape: ModelShape,
    devices: int,
    kind: str,
    memory_bytes: int,
    wish: Plan | None = None,
    bounds: Bounds = NO_BOUNDS,
) -> Choice | Impossible:
    """A plan for exactly `devices` devices of `kind` with `memory_bytes` each.

    Pure and remembered: a queued job is asked about in every pass.
    """
    usable_bytes = min(memory_bytes * USABLE_SHARE, bounds.at_most_bytes or memory_bytes)
    if wish is not None:
        if (why := dict(bounds.refused).get(wish)) is not None:  # what is only like a refused one is theirs to try
            return Impossible(f"its plan {wish} cannot be: {why}")
        return _wish(shape, kind, memory_bytes, usable_bytes, wish)
    legal = legal_plans(shape, devices, kind=kind)
    plans = [plan for plan in legal if bounds.why_not(plan) is None]
    if not plans:
        why = bounds.why_not(legal[0]) if legal else None
        return Impossible(_why_none(shape, devices, kind) if why is None else f"no plan on {devices} devices: {why}")
    least: tuple[int, Plan] | None = None
    for plan in plans:
        memory = estimate(plan, shape, kind=kind)
        if memory.device_bytes <= usable_bytes:
            said = f"the simplest that fits, with {_gib(memory.device_bytes)} of {_gib(memory_bytes)} per device"
            return Choice(plan, memory, said)
        if least is None or memory.device_bytes < least[0]:
            least = (memory.device_bytes, plan)
    assert least is not None
    return Impossible(
        f"no plan on {devices} devices fits: the least memory is {_gib(least[0])} per device with {least[1]}, "
        f"they have {_gib(memory_bytes)}{_but(usable_bytes, memory_bytes)}: ask for more devices"
    )


def below(shape: ModelShape, plan: Plan, kind: str, bounds: Bounds = NO_BOUNDS) -> tuple[int, Plan] | None:
    """After `plan` ran out of device memory: what another may be thought to need, and the simplest such on as many.

    None: none needs so much less. A tenth, for estimates are off by a twentieth, and each try costs the job a start.
    """
    needed_bytes = estimate(plan, shape, kind=kind).device_bytes
    at_most_bytes = int(needed_bytes * 0.9)
    answer = choose(shape, plan.ranks, kind, needed_bytes, bounds=replace(bounds, at_most_bytes=at_most_bytes))
    return (at_most_bytes, answer.plan) if isinstance(answer, Choice) else None


@lru_cache(maxsize=4096)
def crowding(shape: ModelShape, old: Plan, new: Plan, kind: str, memory_bytes: int) -> str | None:
    """Why a rank of `new` cannot be made ready on a device where one of `old` still trains; None: both fit.

    A rank that finds no memory there may be the one that trains.
    """
    there, more = estimate(old, shape, kind=kind).device_bytes, estimate(new, shape, kind=kind).device_bytes
    if there + more <= memory_bytes * USABLE_SHARE:
        return None
    return (
        f"a rank of {new} needs {_gib(more)} beside the {_gib(there)} of {old}, which trains on the same device until "
        f"then, and that has {_gib(memory_bytes)}"
    )


def _wish(shape: ModelShape, kind: str, memory_bytes: int, usable_bytes: float, wish: Plan) -> Choice | Impossible:
    reasons = check(wish, shape, kinds=[kind])
    if reasons:
        return Impossible(f"its plan {wish} cannot be: {'; '.join(reasons)}")
    memory = estimate(wish, shape, kind=kind)
    if memory.device_bytes > usable_bytes:
        return Impossible(
            f"its plan {wish} cannot fit: a rank needs {_gib(memory.device_bytes)}, a device has {_gib(memory_bytes)}"
            f"{_but(usable_bytes, memory_bytes)}: "
            "use more devices, zero=3, checkpointing or accumulation, or leave the plan to clusterd"
        )
    return Choice(wish, memory, f"as asked, with {_gib(memory.device_bytes)} of {_gib(memory_bytes)} per device")


def _why_none(shape: ModelShape, devices: int, kind: str) -> str:
    reasons = check(Plan(dp=devices), shape, kinds=[kind])
    said = "; ".join(reasons) or "none is legal"
    return f"no plan uses exactly {devices} devices: {said}"


def _but(usable_bytes: float, memory_bytes: int) -> str:
    if usable_bytes >= memory_bytes * USABLE_SHARE:
        return ""
    return f", and a plan that was thought to need more than {_gib(usable_bytes)} ran out of memory"


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
