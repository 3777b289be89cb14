"""Who holds what: the boxes of every tensor of a job's state, by rank.

A layout follows from the model's shape and the plan alone, so everyone computes the same one and nothing but its digest
is exchanged. A rank compares its row with its live objects before it takes part in a move (`local_shards`).

A tensor is a parameter, the optimizer's state of one, or a buffer. All slots of the state that have the parameter's
shape move as one, with their bytes per element added up; a slot of another shape (Adafactor's means of rows and
columns) is a tensor of its own and goes where the state goes. Buffers are held by every rank that has their layer,
and may differ between replicas: the first holder's count. What is one number for all ranks (step counters) is no
tensor and travels with the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from plans.model_shape import ModelShape, ParameterShape
from plans.plan import Plan
from plans.stages import split_layers

Ints = npt.NDArray[np.int64]


class LayoutMismatch(ValueError):
    """Two layouts that should be of one collection are not: a tensor is missing, or differs in shape or size."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One global tensor of the collection."""

    name: str  # global: blocks.17.attn.qkv.weight
    kind: str  # "parameter", "optimizer", "optimizer.SLOT" for a slot of another shape, or "buffer"
    shape: tuple[int, ...]
    element_bytes: int  # of all slots together


@dataclass(frozen=True, eq=False)
class Layout:
    """Boxes by tensor and rank; one row per holding, replicas included.

    Attributes:
        tensors: the collection.
        ranks: how many there are.
        tensor, rank: (n,) index into `tensors`, and the rank that holds it.
        low, high: (n, d) the box, half-open; dimensions that a tensor does not have are [0, 1).
    """

    tensors: tuple[Tensor, ...]
    ranks: int
    tensor: Ints
    rank: Ints
    low: Ints
    high: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def digest(self) -> str:
        """The same for everyone who computed the same layout."""
        of = hashlib.sha256(repr(self.tensors).encode())
        for array in (self.tensor, self.rank, self.low, self.high):
            of.update(np.ascontiguousarray(array).tobytes())
        return of.hexdigest()

    @cached_property
    def row_bytes(self) -> Ints:
        """(n,) size of each holding."""
        sizes = np.array([t.element_bytes for t in self.tensors], dtype=np.int64)
        volume: Ints = np.prod(self.high - self.low, axis=1)
        return volume * sizes[self.tensor]

    def boxes_of(self, rank: int) -> dict[tuple[str, str], tuple[tuple[int, int], ...]]:
        """Of one rank: (name, kind) to its box, one (low, high) per dimension."""
        found = {}
        for row in np.flatnonzero(self.rank == rank):
            tensor = self.tensors[self.tensor[row]]
            dims = range(len(tensor.shape))
            found[tensor.name, tensor.kind] = tuple((int(self.low[row, d]), int(self.high[row, d])) for d in dims)
        return found

    def shared_out(self) -> Layout:
        """Each distinct box with one of its holders, so that holders have alike many bytes; buffers with the first.

        For what is to be written once: every byte of the collection is there exactly once.
        """
        columns = [self.rank, *self.high.T, *self.low.T, self.tensor]
        order = np.lexsort(columns)
        tensor, low, high = self.tensor[order], self.low[order], self.high[order]
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (
            (tensor[1:] != tensor[:-1]) | (low[1:] != low[:-1]).any(axis=1) | (high[1:] != high[:-1]).any(axis=1)
        )
        first = np.flatnonzero(begins)
        size = self.row_bytes[order][first]
        last = np.append(first[1:], len(order))
        has = np.zeros(self.ranks, dtype=np.int64)
        chosen = np.empty(len(first), dtype=np.int64)
        for box in np.argsort(-size, kind="stable"):
            holders = self.rank[order[first[box] : last[box]]]
            fixed = self.tensors[tensor[first[box]]].kind == "buffer"
            taker = holders[0] if fixed else holders[np.argmin(has[holders])]
            has[taker] += size[box]
            chosen[box] = taker
        return Layout(self.tensors, self.ranks, tensor[first], chosen, low[first], high[first])

    def without(self, lost: Sequence[int]) -> Layout:
        """The holdings that are left when these ranks are gone; their numbers stay as they are."""
        keep = ~np.isin(self.rank, np.asarray(lost, dtype=np.int64))
        return Layout(self.tensors, self.ranks, self.tensor[keep], self.rank[keep], self.low[keep], self.high[keep])


@dataclass(frozen=True, slots=True)
class _Part:
    tensor: Tensor
    parameter: int  # index; -1: a buffer
    layer: int
    whole: bool  # no plan cuts it


def _parts(shape: ModelShape) -> list[_Part]:
    parts = [
        _Part(Tensor(p.name, "parameter", p.shape, p.dtype_bytes), i, p.layer, False)
        for i, p in enumerate(shape.parameters)
    ]
    for i, p in enumerate(shape.parameters):
        if slots := shape.slots_of(i):
            parts.append(_Part(Tensor(p.name, "optimizer", p.shape, sum(b for _, b in slots)), i, p.layer, False))
    for odd in shape.odd_slots:
        p = shape.parameters[odd.parameter]
        tensor = Tensor(p.name, f"optimizer.{odd.name}", odd.shape, odd.dtype_bytes)
        parts.append(_Part(tensor, odd.parameter, p.layer, True))
    parts += [_Part(Tensor(b.name, "buffer", b.shape, b.dtype_bytes), -1, b.layer, True) for b in shape.buffers]
    return parts


def layout(shape: ModelShape, plan: Plan) -> Layout:
    """Who holds what under `plan`.

    Tensor parallelism cuts `tp_dim`, ZeRO-2 and 3 cut what is left along the first dimension, each as `torch.chunk`
    does; ZeRO-1 gives the whole state of a parameter to one replica (`zero1_owners`); stages hold their layers.
    """
    parts = _parts(shape)
    dims = max((len(part.tensor.shape) for part in parts), default=1) or 1
    stages = split_layers(shape.layer_weights(), plan.pp) if plan.pp > 1 else None
    owners = zero1_owners(shape, plan) if plan.zero == 1 else None
    shard, replica = (a.reshape(-1) for a in np.meshgrid(np.arange(plan.tp), np.arange(plan.dp)))
    rows: list[tuple[Ints, Ints, Ints, Ints]] = []
    for number, part in enumerate(parts):
        stage = next(i for i, s in enumerate(stages) if part.layer in s) if stages is not None else 0
        if part.whole:
            low, high = _whole(part.tensor.shape, len(shard), dims)
        else:
            low, high = _cut(shape.parameters[part.parameter], plan, shard, replica, dims)
        held = (high > low).all(axis=1)
        if part.tensor.kind.startswith("optimizer") and owners is not None:
            held &= replica == owners[part.parameter]
        ranks = (stage * plan.dp + replica) * plan.tp + shard
        count = int(held.sum())
        rows.append((np.full(count, number), ranks[held], low[held], high[held]))
    columns = [np.concatenate(column).astype(np.int64) for column in zip(*rows, strict=True)]
    return Layout(tuple(part.tensor for part in parts), plan.ranks, *columns)


def _whole(shape: tuple[int, ...], holders: int, dims: int) -> tuple[Ints, Ints]:
    low = np.zeros((holders, dims), dtype=np.int64)
    high = np.ones((holders, dims), dtype=np.int64)
    high[:, : len(shape)] = shape
    return low, high


def _cut(parameter: ParameterShape, plan: Plan, shard: Ints, replica: Ints, dims: int) -> tuple[Ints, Ints]:
    """Boxes of a parameter for every (replica, shard) of its stage."""
    low, high = _whole(parameter.shape, len(shard), dims)
    if plan.tp > 1 and parameter.tp_dim >= 0:
        low[:, parameter.tp_dim], high[:, parameter.tp_dim] = chunk(
            low[:, parameter.tp_dim], high[:, parameter.tp_dim], plan.tp, shard
        )
    if plan.zero >= 2 and parameter.shape:
        low[:, 0], high[:, 0] = chunk(low[:, 0], high[:, 0], plan.dp, replica)
    return low, high


def chunk(low: Ints, high: Ints, parts: int, part: Ints) -> tuple[Ints, Ints]:
    """The `part`-th of `parts` chunks of [low, high), as `torch.chunk` cuts: equal but for the last, maybe empty."""
    each = -(-(high - low) // parts)
    return np.minimum(low + part * each, high), np.minimum(low + (part + 1) * each, high)


def zero1_owners(shape: ModelShape, plan: Plan) -> dict[int, int]:
    """The replica that holds the optimizer's state of each trainable parameter (by index) under ZeRO-1.

    As torch's `ZeroRedundancyOptimizer` deals them out: by group, largest first, to the replica with least so far.
    """
    stages = split_layers(shape.layer_weights(), plan.pp) if plan.pp > 1 else [range(-1, len(shape.layers))]
    owners: dict[int, int] = {}
    groups = shape.parameter_groups or (tuple(i for i, p in enumerate(shape.parameters) if p.trainable),)
    for stage in stages:
        held = [0] * plan.dp
        for group in groups:
            mine = [i for i in group if shape.parameters[i].layer in stage]
            numel = {i: _numel(shape.parameters[i], plan) for i in mine}
            for index in sorted(mine, key=lambda i: -numel[i]):
                owner = held.index(min(held))
                owners[index] = owner
                held[owner] += numel[index]
    return owners


def _numel(parameter: ParameterShape, plan: Plan) -> int:
    return parameter.local_bytes(plan.tp) // parameter.dtype_bytes
