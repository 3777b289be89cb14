"""Carry proof: the step that follows a state is known, for the ranks that had the state have made it.

Before a switch, the target ranks restore the state of some step under the new plan and make the steps after it, while
the source ranks train on and make the same ones. Losses, the gradient of each parameter and learning rates must agree.
This is the whole chain, capture, re-sharding, restore, order of data and random numbers, on the state of this job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 2
"""The loss of the second shows whether the first one's update was right."""

TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 5e-2)}
"""Relative differences of loss and gradient norm that rounding explains, by precision.

Plans round the same inputs alike, and differ in the order of sums only, so that TF32 on a GPU is within fp32's."""

NEARLY_ZERO = 0.1
"""Gradients of a parameter that are nearly zero consist of rounding errors: only differences above this share of the
tolerance count, relative to the norm over all parameters."""

NOISE_TIMES = 4.0
"""Differences count from this multiple of those between two runs with other random numbers on."""


@dataclass
class NextSteps:
    """The steps after a state, as one side has made them.

    Attributes:
        losses: over the global batch, by step.
        norms: of each parameter's gradient in the first of them.
        rates: learning rates of parameters in the second of them, by name.
        drew: this rank drew random numbers in them.
        autocast: type of the autocast context around them, see `precision.around`.
    """

    losses: list[float] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    drew: bool = False
    autocast: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"losses": self.losses, "norms": self.norms, "rates": self.rates, "autocast": self.autocast}

    @classmethod
    def of_all(cls, received: Sequence[Mapping[str, Any]]) -> NextSteps:
        """Parse what several ranks of one side have made of the same steps."""
        rates = {name: rate for each in received for name, rate in each["rates"].items()}
        first = received[0]
        return cls(list(first["losses"]), dict(first["norms"]), rates, autocast=first.get("autocast", ""))


@dataclass(frozen=True)
class Difference:
    """The largest difference between two sides, relative to its tolerance.

    Attributes:
        excess: multiple of the tolerance; up to 1 they agree.
        random: random numbers may explain it.
    """

    excess: float = 0.0
    what: str = ""
    there: float = 0.0
    here: float = 0.0
    random: bool = True

    def __str__(self) -> str:
        return f"{self.what} was {self.there:.6g} there and is {self.here:.6g} here"


def difference(there: NextSteps, here: NextSteps, precision: str) -> Difference:
    """Compare the steps of the source ranks with those of the target ranks, as far as both have them."""
    loss_tolerance, norm_tolerance = TOLERANCES[precision]
    found = [Difference()]
    for name, rate in here.rates.items():
        off = relative_difference(there.rates.get(name, rate), rate)
        found.append(Difference(off / 1e-6, f"the learning rate of {name}", there.rates.get(name, rate), rate, False))
    for number, (one, other) in enumerate(zip(there.losses, here.losses, strict=False), start=1):
        off = relative_difference(one, other)
        found.append(Difference(off / loss_tolerance, f"the loss {number} step{'s' * (number > 1)} later", one, other))
    noise = norm_tolerance * NEARLY_ZERO * math.hypot(*there.norms.values())
    for name, norm in here.norms.items():
        if name in there.norms and not abs(there.norms[name] - norm) <= noise:
            off = relative_difference(there.norms[name], norm)
            what = f"the norm of the gradient of {name}"
            found.append(Difference(off / norm_tolerance, what, there.norms[name], norm))
    certain = [each for each in found if not each.random and each.excess > 1]
    return max(certain or found, key=lambda each: each.excess)


def relative_difference(one: float, other: float) -> float:
    """Difference of two numbers relative to the larger one; two that are not finite are alike."""
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    size = max(abs(one), abs(other))
    return abs(one - other) / size if size else 0.0
