"""Gathering of samples that replicas have, for losses that compare the samples of a whole batch.

Each replica computes the same loss from the rows of all replicas. A step adds up what replicas computed, weighted by
their shares of the batch: the sum is that loss, and the gradient of a row is the sum of what all replicas have for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.process.exits import PlanRefused, Refused


@dataclass
class Gathering:
    """Replicas of a step, among which `gather` gathers.

    Attributes:
        shares: samples of each replica; one: nothing is gathered.
        replica: this one.
        group: of the replicas.
        micro_batches: of a step.
        used: `gather` was called.
    """

    shares: Sequence[int] = (1,)
    replica: int = 0
    group: Any = None
    micro_batches: int = 1
    used: bool = False


_current: Gathering | None = None  # of the process: the backward pass runs on threads of its own


@contextmanager
def gathering(how: Gathering) -> Iterator[Gathering]:
    """Context in which `gather` does that; outside of any, it returns what it is given."""
    global _current
    before, _current = _current, how
    try:
        yield how
    finally:
        _current = before


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch is not followed
def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of `tensor` on all replicas, in the order of samples; see `clusterd.train.gather`.

    Raises:
        PlanRefused: the plan cuts a replica's samples into micro-batches.
        Refused: `tensor` has no rows for each sample.
    """
    if _current is None:
        return tensor
    _current.used = True
    if _current.micro_batches > 1:
        raise PlanRefused(
            f"train.gather needs all samples of a step at once, and the plan cuts them into {_current.micro_batches} "
            "micro-batches"
        )
    if len(_current.shares) == 1:
        return tensor
    share = _current.shares[_current.replica]
    if not tensor.dim() or len(tensor) % share:
        raise Refused(
            f"train.gather was given a tensor of {tuple(tensor.shape)} for {share} samples: its first dimension must "
            "be that of samples"
        )
    rows = [len(tensor) // share * samples for samples in _current.shares]
    gathered: torch.Tensor = _Gather.apply(tensor, rows, _current.replica, _current.group)
    return gathered


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: list[int], replica: int, group: Any) -> torch.Tensor:
        ctx.group, ctx.dtype = group, tensor.dtype
        ctx.own = slice(sum(rows[:replica]), sum(rows[: replica + 1]))
        sent = tensor.new_zeros(max(rows), *tensor.shape[1:])  # a collective takes equal parts
        sent[: len(tensor)] = tensor
        parts = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(parts, sent, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # A sum of few numbers in half precision would lose digits that one process has.
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        if total is gradient:
            total = total.clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own].to(ctx.dtype), None, None, None
