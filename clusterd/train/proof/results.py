"""Results of a proof: what the runs of both sides gave, their differences, and the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from clusterd.train.proof.cuts import BATCH, MODEL, PASSES, Cut, Sides
from clusterd.train.state.next_steps import relative_difference

ROUNDING, ROUNDING_MAX = 1e-5, 2e-4
"""Relative difference that rounding in float32 makes at least, and at most: where it is measured, by summing in other
orders, it lies between. Equal parts of 100 scripts differed by less than 1e-6. Both grow with the square root of the
rounding error of other types."""

NOISE_TIMES = 20.0
"""Differences count from this multiple of those between two runs of the whole batch on."""

DRAWS_TIMES = 4.0
"""The same for two runs with other random numbers of those that cannot be fixed for each sample: Python's, NumPy's."""


@dataclass(frozen=True)
class Verdict:
    """Result of a proof.

    Attributes:
        difference: that the cuts of the batch make, in words, with numbers; empty: parts train as the whole.
        of_model: the same of the cuts of the model.
        unclear: why no difference could be shown or ruled out.
        too_large: the whole model is, for one device.
        metrics: which further value of the loss depends on the plan, with numbers.
        left: what passes leave that depends on the plan, with numbers.
        repeats: it is unclear because two runs in one process differ.
        draws: random numbers are drawn in a step, and others than in one process.
        counts: passes count something up.
        hooks: there are hooks on gradients.
    """

    difference: str = ""
    of_model: str = ""
    unclear: str = ""
    too_large: bool = False
    metrics: str = ""
    left: str = ""
    repeats: bool = False
    draws: bool = False
    counts: bool = False
    hooks: bool = False


def differs(verdict: Verdict) -> bool:
    """True if a plan trains something else than one process."""
    return bool(verdict.difference or verdict.of_model)


def judge(whole: Run, again: Sequence[Run], parts: Run, cut: Cut, sides: Sides) -> Verdict:
    """Verdict from measurements of a process each, of the first side several times, by the norms of gradients."""
    difference = parts.by_norms(whole).difference(whole)
    noise = max(run.by_norms(whole).difference(whole).size for run in again)
    if difference.size <= whole.limit:
        return whole.verdict(parts, cut, sides)
    if difference.size <= NOISE_TIMES * noise:
        return Verdict(unclear=f"two runs of the same samples differ by {noise:.0e}", draws=whole.draws)
    return difference.verdict(cut, sides, draws=whole.draws)


@dataclass(frozen=True)
class Difference:
    """Difference between two runs."""

    size: float
    what: str  # differs
    whole: float
    parts: float
    later: bool  # only once a forward pass has left something for the next

    def verdict(self, cut: Cut, sides: Sides, *, draws: bool) -> Verdict:
        """Verdict that the plan trains something else."""
        of_updates = self.what.startswith("the norm of the update of ")  # a parameter may be called update_gate
        after = "after an earlier forward pass, " if self.later else ""
        if sides == MODEL:
            numbers = f"{self.whole:.6g} in one process, {self.parts:.6g} of the cut model"
            also = f": {OF_UPDATES}" * of_updates
            return Verdict(of_model=f"{after}{self.what} is {numbers}{also}", draws=draws)
        numbers = f"{self.whole:.6g} of {cut.samples} samples, {self.parts:.6g} of their {cut.parts} parts"
        text = f"{after}{self.what} is {numbers}"
        if of_updates:
            text += f", by the same gradients: {OF_UPDATES}"
        if relative_difference(self.parts * cut.parts, self.whole) < ROUNDING_MAX and self.what == "the loss":
            text += ": it is their sum, not their mean"
        return Verdict(text, draws=draws)


@dataclass(frozen=True)
class Run:
    """Results of the passes of one run, the same on all ranks.

    Attributes:
        losses: by pass and loss of the job.
        metrics: further values of the losses in the first pass.
        norms: of each gradient in the last pass, by loss and parameter.
        apart: norm of the difference of each from the reference.
        rounding: of the type with the largest rounding error in the model.
        draws, draws_by_sample: random numbers are drawn (other ones than in the reference, of the same samples), by any
            library, or by one whose numbers cannot be fixed.
        counts: passes count something up.
        hooks: there are hooks on gradients.
        left: what passes have left that differs most from the reference: by how much, its name, and its norm in both.
    """

    losses: dict[tuple[int, str], float]
    metrics: dict[str, float]
    norms: dict[tuple[str, str], float]
    apart: dict[tuple[str, str], float]
    rounding: float = 0.0
    draws: bool = False
    draws_by_sample: bool = False
    counts: bool = False
    hooks: bool = False
    left: tuple[float, str, float, float] | None = None

    @property
    def limit(self) -> float:
        """Relative difference that rounding explains."""
        scale = math.sqrt(self.rounding / torch.finfo(torch.float32).eps)
        return max(scale * min(ROUNDING_MAX, max(ROUNDING, NOISE_TIMES * self.spread)), self.rounding)

    def verdict(self, parts: Run, cut: Cut, sides: Sides) -> Verdict:
        """Verdict where the other side agrees with this one."""
        metrics = _metric_difference(self, parts, self.limit, cut, sides)
        left = ""
        if parts.left is not None and parts.leaves_other(self):
            _, name, whole, own = parts.left
            numbers = f"{whole:.6g} after {PASSES} passes over {cut.samples} samples, {own:.6g} after their parts"
            left = f"{name} is {numbers}"
        draws = self.draws and (parts.draws or sides == BATCH)
        return Verdict(metrics=metrics, left=left, draws=draws, counts=self.counts, hooks=self.hooks)

    def leaves_other(self, whole: Run) -> bool:
        """True if passes have left something else than those of the whole."""
        return self.left is not None and not self.draws_by_sample and self.left[0] > whole.limit

    def by_norms(self, reference: Run) -> Run:
        """The same with the differences of norms in place of the norms of differences."""
        keys = self.norms.keys() | reference.norms.keys()
        return replace(self, apart={k: abs(self.norms.get(k, 0.0) - reference.norms.get(k, 0.0)) for k in keys})

    @property
    def spread(self) -> float:
        """Largest difference between passes over the same samples in another order."""
        first = {part: loss for (number, part), loss in self.losses.items() if number == 0}
        return max(relative_difference(loss, first[part]) for (_, part), loss in self.losses.items())

    def difference(self, whole: Run) -> Difference:
        """The largest difference."""
        found = [
            Difference(
                relative_difference(self.losses[key], one), _loss_name(key[1]), one, self.losses[key], key[0] > 0
            )
            for key, one in whole.losses.items()
        ]
        first = [each for each in found if not each.later and each.size > ROUNDING_MAX]
        for key, apart in self.apart.items():
            what = f"the norm of the {'update' if key[0] == UPDATE else 'gradient'} of {key[1]}"
            alike = (norm for other, norm in whole.norms.items() if (other[0] == UPDATE) == (key[0] == UPDATE))
            size = apart / (max(alike, default=0.0) or 1.0) if math.isfinite(apart) else math.inf
            found.append(Difference(size, what, whole.norms.get(key, 0.0), self.norms.get(key, 0.0), False))
        return max(first or found, key=lambda each: each.size)


def _metric_difference(whole: Run, parts: Run, limit: float, cut: Cut, sides: Sides) -> str:
    for name, value in whole.metrics.items():
        if relative_difference(other := parts.metrics.get(name, math.nan), value) > limit:
            if sides == MODEL:
                return f"{name} is {value:.6g} in one process, {other:.6g} of the cut model"
            numbers = f"{value:.6g} of {cut.samples} samples as a whole, {other:.6g} as the mean of their {cut.parts}"
            return f"{name} is {numbers} parts: it depends on the plan, and is no mean over samples"
    return ""


OF_UPDATES = "the optimizer also reads what passes leave beside gradients, in attributes or buffers"

OF_WRITES = (
    "passes change trainable parameters, as an optimizer does that steps in hooks of gradients, before those of all "
    "parts are summed: leave the step to the optimizer that `optimizer` returns"
)

EVALUATION, UPDATE = "(evaluation)", "(update)"
"""In place of the part of a loss: the output in evaluation mode, and the optimizer's updates."""


def _loss_name(part: str) -> str:
    if part == EVALUATION:
        return "the norm of the output in evaluation mode"
    return f"the loss of {part}" if part else "the loss"
