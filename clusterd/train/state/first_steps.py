"""The first steps of a job, repeated under another plan: losses and gradients may not depend on the plan.

The ranks that begin a job record its first steps. Ranks that stand by for a migration make these steps too, from the
same initial weights and on the same samples, and compare when the state arrives. Nothing waits for the comparison.
Jobs whose plans differ in a way that their log tells of (dropout, batch normalisation, means over words) are not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterd.train.process.exits import PlanRefused
from plans.plan import Plan

STEPS = 2
"""The loss of the second step shows a wrong update in the first, and state that differs between processes."""

TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 5e-2)}
"""Relative differences of loss and gradient norm that rounding explains, by precision.

Plans round the same inputs alike, and differ in the order of sums only, so that TF32 on a GPU is within fp32's."""

NOISE = 0.1
"""Gradients of a parameter that are nearly zero consist of rounding errors: only differences above this share of the
tolerance count, relative to the norm over all parameters."""


@dataclass(frozen=True)
class FirstSteps:
    """Loss of each of the first steps under a plan, and norm of each parameter's gradient in the first of them."""

    plan: Plan
    weights: int | None  # fingerprint of the initial ones; None: they came from files
    normalised_parts: int = 1  # parts of each batch that batch normalisation sees; 1: all, or there is none
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()  # empty: unknown

    def with_step(self, loss: float, norms: Sequence[float]) -> FirstSteps:
        """The same with one more step; `norms`: of the first step."""
        return replace(self, losses=(*self.losses, loss), norms=tuple(norms))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan.to_dict(),
            "weights": self.weights,
            "normalised_parts": self.normalised_parts,
            "losses": list(self.losses),
            "norms": list(self.norms),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FirstSteps:
        """Parse the result of `to_dict`."""
        losses, norms = tuple(values["losses"]), tuple(values["norms"])
        return cls(Plan.from_dict(values["plan"]), values["weights"], values["normalised_parts"], losses, norms)


def check_same(recorded: FirstSteps, repeated: FirstSteps, precision: str, names: Sequence[str]) -> None:
    """Compare the first steps under two plans, as far as both have them.

    Args:
        names: of the parameters whose gradients were measured.
    Raises:
        PlanRefused: they differ by more than rounding; with the difference.
    """
    if recorded.weights != repeated.weights:  # the model draws other initial weights each time
        return
    if recorded.normalised_parts != repeated.normalised_parts:  # another loss, as the log has said
        return
    loss_tolerance, norm_tolerance = TOLERANCES[precision]
    for number, (expected, found) in enumerate(zip(recorded.losses, repeated.losses, strict=False), start=1):
        if (off := relative_difference(expected, found)) > loss_tolerance:
            raise _refusal(f"the loss of step {number}", recorded, repeated, expected, found, off)
    if not recorded.norms or len(recorded.norms) != len(repeated.norms):
        return
    noise = norm_tolerance * NOISE * math.hypot(*recorded.norms)
    pairs = [
        (name, expected, found, relative_difference(expected, found))
        for name, expected, found in zip(names, recorded.norms, repeated.norms, strict=True)
        if not abs(expected - found) <= noise
    ]
    name, expected, found, off = max(pairs, key=lambda pair: pair[-1], default=("", 0.0, 0.0, 0.0))
    if off > norm_tolerance:
        what = f"in step 1, the gradient of {name} has a norm that"
        raise _refusal(what, recorded, repeated, expected, found, off)


def _refusal(
    what: str, recorded: FirstSteps, repeated: FirstSteps, expected: float, found: float, off: float
) -> PlanRefused:
    return PlanRefused(
        f"{what} is {found:.6g} under {repeated.plan}, but {expected:.6g} under {recorded.plan} from the same weights "
        f"and samples ({off:.1e}, more than rounding). Does the loss or the model compare samples, divide by a count "
        "in them, or keep state in each process? A loss that returns (sum, weight), or compares samples by "
        "train.gather, is exact"
    )


def relative_difference(one: float, other: float) -> float:
    """Difference of two numbers relative to the larger one; two that are not finite are alike."""
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    size = max(abs(one), abs(other))
    return abs(one - other) / size if size else 0.0
