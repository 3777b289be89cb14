"""Kind of a loss: plans that cut the batch need the mean over the samples, which a trial evaluation verifies.

A loss that sums over samples, or divides by a token count, gives another result on a cut batch without any error. The
outputs do not matter for the test, so they are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from clusterd.train.data.loader import check_sliceable, slice_batch

SAMPLES = (4, 2)
"""Batch sizes to try, as outputs allow."""
FIRST_PART = 1
"""Size of the first part of the batch."""

ELEMENTS_MAX = 1 << 26
"""Limit for the outputs; a loss needs several times their memory, and is not tried above it."""

TOLERANCE = 1e-5

PARAMETERS_MAX = 1 << 26
"""Limit for a model that computes its loss itself: a trial needs its values, and runs on one core."""

MEAN, SUM, OTHER, UNKNOWN = "mean", "sum", "other", "unknown"


def classify_loss(loss: Callable[[Any, Any], Any], outputs: Any, target: Any, samples: int) -> str:
    """Classify the loss: `MEAN`, `SUM` over samples, or `OTHER`; `MEAN` if unknown (a loss that draws, or counts).

    Args:
        outputs: of the model for a batch of `samples`; only types and shapes matter.
        target: of that batch.
    Raises:
        Exception: any error of the loss in the trial; `Refused`: the batch cannot be cut.
    """
    check_sliceable(target, samples)
    random_outputs = tree_map(_random_like, outputs)

    def of(start: int, stop: int) -> float:
        some = tree_map(lambda part: _slice_output(part, start, stop, samples), random_outputs)
        return float(loss(some, slice_batch(target, start, stop)))

    return _classify(of, samples)


def classify_computed_loss(compute: Callable[[Any, Any], Any], inputs: Any, target: Any, samples: int) -> str:
    """Classify a loss that the model computes, as CLIP's over pairs of samples, or a mean over words that count.

    Args:
        compute: the loss from inputs and targets.
        inputs, target: a batch of `samples`.
    Raises:
        Exception: as `classify_loss`.
    """
    check_sliceable(inputs, samples)
    check_sliceable(target, samples)
    return _classify(
        lambda start, stop: float(compute(slice_batch(inputs, start, stop), slice_batch(target, start, stop))), samples
    )


def has_scalar(outputs: Any) -> bool:
    """True if a number without dimensions is among the outputs: the model may compute the loss itself."""
    return any(
        isinstance(part, torch.Tensor) and part.is_floating_point() and not part.dim() for part in tree_leaves(outputs)
    )


def _classify(of: Callable[[int, int], float], samples: int) -> str:
    """Kind of a loss from its values for [start, stop) of the samples."""
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
    """True if a backward pass of `loss` reaches any of `parameters`."""
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
    """True if the loss may be tried with outputs of this size."""
    elements: int = sum(part.numel() for part in tree_leaves(outputs) if isinstance(part, torch.Tensor))
    return elements <= ELEMENTS_MAX


def _random_like(part: Any) -> Any:
    """Random outputs between 0 and 1: losses of probabilities accept nothing else."""
    if not isinstance(part, torch.Tensor):
        return part
    if not part.is_floating_point():
        return torch.zeros(part.shape, dtype=part.dtype)
    # float32, whatever the dtype: low precision could not tell a mean from a near-mean.
    return torch.rand(part.shape, generator=torch.Generator().manual_seed(1))


def _slice_output(part: Any, start: int, stop: int, samples: int) -> Any:
    """Samples [start, stop) of an output; one without dimensions is shared by all samples."""
    if not isinstance(part, torch.Tensor) or not part.dim():
        return part
    check_sliceable(part, samples)
    return part[start:stop]


def _close(one: float, other: float) -> bool:
    return not abs(one - other) > TOLERANCE * max(abs(one), abs(other))  # NaN proves nothing
