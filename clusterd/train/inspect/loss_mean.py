"""Whether a loss is the mean over the samples it is given, as plans that cut the batch need it: found by trying it.

One that adds samples up, or that divides by how many words count, makes something else of a cut batch, and nothing
would say so. Which outputs it is given does not matter for that: they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from clusterd.train.data.loader import check_sliceable, slice_batch

SAMPLES = (4, 2)
"""As many as outputs allow."""
FIRST_PART = 1
"""Of them, apart from the others."""

ELEMENTS_MAX = 1 << 26
"""Of outputs; a loss needs some times the memory of these, and is not tried with more."""

TOLERANCE = 1e-5

MEAN, SUM, OTHER = "mean", "sum", "other"


def classify_loss(loss: Callable[[Any, Any], Any], outputs: Any, target: Any, samples: int) -> str:
    """`MEAN`, `SUM` over samples, or `OTHER`; `MEAN` too where it cannot be told: a loss that draws, or counts.

    Args:
        outputs: of the model for a batch of `samples`, of which types and shapes are wanted.
        target: of that batch.
    Raises:
        Exception: whatever the loss does not like about being tried; `Refused`: the batch cannot be cut.
    """
    check_sliceable(target, samples)
    random_outputs = tree_map(_random_like, outputs)

    def of(start: int, stop: int) -> float:
        some = tree_map(lambda part: _slice_output(part, start, stop, samples), random_outputs)
        return float(loss(some, slice_batch(target, start, stop)))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole, again, first, others = (
            of(*part) for part in ((0, samples),) * 2 + ((0, FIRST_PART), (FIRST_PART, samples))
        )
    if not _close(whole, again):
        return MEAN
    if _close(whole, (FIRST_PART * first + (samples - FIRST_PART) * others) / samples):
        return MEAN
    return SUM if _close(whole, first + others) else OTHER


def depends_on_parameters(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass of `loss` comes to any of `parameters`."""
    sought = {id(parameter) for parameter in parameters}
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            if id(getattr(node, "variable", None)) in sought:
                return True
            nodes += [before for before, _ in node.next_functions]
    return False


def small_enough(outputs: Any) -> bool:
    """Whether the loss may be tried with outputs of such shapes."""
    elements: int = sum(part.numel() for part in tree_leaves(outputs) if isinstance(part, torch.Tensor))
    return elements <= ELEMENTS_MAX


def _random_like(part: Any) -> Any:
    """Between 0 and 1: losses of probabilities take nothing else."""
    if not isinstance(part, torch.Tensor):
        return part
    if not part.is_floating_point():
        return torch.zeros(part.shape, dtype=part.dtype)
    # Losses of wrong precision would not tell a mean from what is nearly one.
    return torch.rand(part.shape, generator=torch.Generator().manual_seed(1))


def _slice_output(part: Any, start: int, stop: int, samples: int) -> Any:
    """What has no dimension of samples is one number for all."""
    if not isinstance(part, torch.Tensor) or not part.dim():
        return part
    check_sliceable(part, samples)
    return part[start:stop]


def _close(one: float, other: float) -> bool:
    return not abs(one - other) > TOLERANCE * max(abs(one), abs(other))  # what is no number tells nothing
