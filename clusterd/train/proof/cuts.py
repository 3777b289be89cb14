"""Cuts of a small batch, and the sides of a comparison that computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten_with_path

from clusterd.plans.plan import Plan

SAMPLES = 8
"""Of the batch, or two for each part."""

PARTS_MAX = 8

PASSES = 4
"""Of the same samples in other orders, so that other ones are in a part together: half of the ways to cut eight samples
in two put as many of the hardest four into each part."""


@dataclass(frozen=True)
class Cut:
    """Parts of the batch that a proof compares: contiguous, in the order of replicas and their micro-batches.

    Several micro-batches compute the same part where the plan has more of them. Where replicas take unequal shares of a
    batch, those with more get one sample more in each part.

    Attributes:
        sizes: samples of each part.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, global_batch: int, *, gathers: bool = False, small: bool = False, most: int = 0) -> Cut:
        """Cut of `plan`.

        Args:
            gathers: replicas see each other's samples, so that no two may have the same.
            small: no micro-batch has more samples than in training.
            most: number of samples that there are; 0: enough.
        """
        pieces = plan.dp * plan.accumulation
        parts = pieces
        least = min(plan.shares, default=0)
        more = [int(share > least) for share in plan.shares for _ in range(plan.accumulation)]
        if pieces > PARTS_MAX and not (gathers or any(more)):
            divisors = [n for n in range(2, pieces) if pieces % n == 0]
            parts = max((n for n in divisors if n <= PARTS_MAX), default=min(divisors, default=pieces))
        in_training = max((least // plan.accumulation) if least else global_batch // pieces, 1)
        each = max(in_training // parts, 1) if small else min(max(2, SAMPLES // parts), in_training)
        if most:
            each = max(min(each, (most - sum(more)) // parts), 1)
        return cls(tuple(each + extra for extra in more) if any(more) else (each,) * parts)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Samples of the whole batch."""
        return sum(self.sizes)

    def of_replica(self, plan: Plan, replica: int) -> list[int]:
        """Numbers of the parts that a replica's micro-batches compute."""
        first = replica * plan.accumulation
        return [number % self.parts for number in range(first, first + plan.accumulation)]


class Side(Enum):
    """Side of a comparison: how a batch is computed."""

    ALONE = "by each rank alone, with the whole model"
    WHOLE = "under the plan, the whole by each replica"
    PARTS = "under the plan, in its parts"


Sides = tuple[Side, Side]
MODEL: Sides = (Side.ALONE, Side.WHOLE)
BATCH: Sides = (Side.WHOLE, Side.PARTS)


def comparisons(plan: Plan) -> list[Sides]:
    """Comparisons that show that a plan trains as one process, in this order."""
    return [MODEL] * (plan.tp * plan.pp > 1 or plan.zero > 1) + [BATCH] * (plan.dp * plan.accumulation > 1)


def choose_samples(batches: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """Samples of one of the batches, in its order, that show most of what samples have: shapes, labels, gaps in them.

    What few samples have (labels that do not count, another task) may be what depends on how a batch is cut.
    """
    traits = [[set(_traits(sample)) for sample in batch] for batch in batches]
    kinds: dict[Any, set[Hashable]] = defaultdict(set)
    for kind, value in set().union(*(some for batch in traits for some in batch)):
        kinds[kind].add(value)
    best: tuple[float, list[Any]] = -1.0, []
    for batch, of_batch in zip(batches, traits, strict=True):
        shown: set[Any] = set()
        chosen: list[int] = []
        gains = 0.0
        while len(chosen) < min(count, len(batch)):
            rest = [n for n in range(len(batch)) if n not in chosen]
            gain, number = max((sum(1 / len(kinds[k]) for k, _ in of_batch[n] - shown), -n) for n in rest)
            chosen.append(-number)
            shown |= of_batch[-number]
            gains += gain
        if gains > best[0] + 1e-9:
            best = gains, [batch[n] for n in sorted(chosen)]
    return best[1]


def _traits(sample: Any) -> Iterator[tuple[Any, Hashable]]:
    """Kinds of what a sample has, and which of them."""
    for path, leaf in tree_flatten_with_path(sample)[0]:
        at = str(path)
        if isinstance(leaf, (bool, int, str)) or leaf is None:
            yield at, leaf
        elif isinstance(leaf, (torch.Tensor, np.ndarray)):
            yield (at, "shape"), tuple(leaf.shape)
            values = torch.as_tensor(leaf)
            if values.numel() == 1:
                yield at, values.item()
            elif values.numel():
                least = (values == 0).all() if values.is_floating_point() else values.min().sign()
                yield (at, "least"), int(least)
                yield (at, "zeros"), bool((values == 0).any())
