"""Layout of a job's state: the box of every tensor that each rank holds.

A layout follows from the model's shape and the plan alone, so every process computes the same one and only its digest
is exchanged. A rank compares its row with its live objects before a migration (`clusterd.train.state.local_shards`).

A tensor is a parameter, the optimizer state of one, or a buffer. All state slots of the parameter's shape move
together, with their bytes per element added; a slot of another shape (Adafactor's row and column means) is a tensor of
its own that goes with the state. Buffers are held by every rank that has their layer, and may differ between replicas:
the first holder wins. Values that are equal on all ranks (step counters) are not tensors and travel in the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from clusterd.plans.model_shape import ModelShape, ParameterShape
from clusterd.plans.plan import Plan
from clusterd.plans.stages import split_layers

Ints = npt.NDArray[np.int64]


class LayoutMismatch(ValueError):
    """Two layouts are not of one collection: a tensor is missing, or differs in shape or size."""


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
        ranks: number of ranks.
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
        """Hash that is equal for equal layouts."""
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
        """Boxes of one rank: (name, kind) to one (low, high) per dimension."""
        found = {}
        for row in np.flatnonzero(self.rank == rank):
            tensor = self.tensors[self.tensor[row]]
            dims = range(len(tensor.shape))
            found[tensor.name, tensor.kind] = tuple((int(self.low[row, d]), int(self.high[row, d])) for d in dims)
        return found

    def deduplicated(self) -> Layout:
        """Each distinct box with one of its holders, balanced by bytes; buffers with the first holder.

        For state that is written once: every byte of the collection occurs exactly once.
        """
        columns = [self.rank, *self.high.T, *self.low.T, self.tensor]
        order = np.lexsort(columns)
        tensor, low, high = self.tensor[order], self.low[order], self.high[order]
        starts = np.ones(len(order), dtype=bool)
        starts[1:] = (
            (tensor[1:] != tensor[:-1]) | (low[1:] != low[:-1]).any(axis=1) | (high[1:] != high[:-1]).any(axis=1)
        )
        first = np.flatnonzero(starts)
        size = self.row_bytes[order][first]
        last = np.append(first[1:], len(order))
        assigned = np.zeros(self.ranks, dtype=np.int64)
        chosen = np.empty(len(first), dtype=np.int64)
        for box in np.argsort(-size, kind="stable"):
            holders = self.rank[order[first[box] : last[box]]]
            fixed = self.tensors[tensor[first[box]]].kind == "buffer"
            holder = holders[0] if fixed else holders[np.argmin(assigned[holders])]
            assigned[holder] += size[box]
            chosen[box] = holder
        return Layout(self.tensors, self.ranks, tensor[first], chosen, low[first], high[first])

    def without(self, lost: Sequence[int]) -> Layout:
        """The remaining holdings after these ranks are lost; rank numbers stay."""
        keep = ~np.isin(self.rank, np.asarray(lost, dtype=np.int64))
        return Layout(self.tensors, self.ranks, self.tensor[keep], self.rank[keep], self.low[keep], self.high[keep])


@dataclass(frozen=True, slots=True)
class _TensorRule:
    tensor: Tensor
    parameter: int  # index; -1: a buffer
    layer: int
    whole: bool  # no plan cuts it


def _tensor_rules(shape: ModelShape) -> list[_TensorRule]:
    rules = [
        _TensorRule(Tensor(p.name, "parameter", p.shape, p.dtype_bytes), i, p.layer, False)
        for i, p in enumerate(shape.parameters)
    ]
    for i, p in enumerate(shape.parameters):
        if slots := shape.slots_of(i):
            rules.append(_TensorRule(Tensor(p.name, "optimizer", p.shape, sum(b for _, b in slots)), i, p.layer, False))
    for odd in shape.odd_slots:
        p = shape.parameters[odd.parameter]
        tensor = Tensor(p.name, f"optimizer.{odd.name}", odd.shape, odd.dtype_bytes)
        rules.append(_TensorRule(tensor, odd.parameter, p.layer, True))
    rules += [_TensorRule(Tensor(b.name, "buffer", b.shape, b.dtype_bytes), -1, b.layer, True) for b in shape.buffers]
    return rules


def layout(shape: ModelShape, plan: Plan) -> Layout:
    """Layout of the model's state under `plan`.

    Tensor parallelism cuts `tp_dim`; ZeRO-2 and 3 cut the rest along the first dimension, each as `torch.chunk` does;
    ZeRO-1 assigns the whole state of a parameter to one replica (`zero1_owners`); stages hold their layers.
    """
    rules = _tensor_rules(shape)
    dims = max((len(rule.tensor.shape) for rule in rules), default=1) or 1
    stages = split_layers(shape.layer_weights(), plan.pp) if plan.pp > 1 else None
    owners = zero1_owners(shape, plan) if plan.zero == 1 else None
    shard, replica = (a.reshape(-1) for a in np.meshgrid(np.arange(plan.tp), np.arange(plan.dp)))
    rows: list[tuple[Ints, Ints, Ints, Ints]] = []
    for number, rule in enumerate(rules):
        stage = next(i for i, s in enumerate(stages) if rule.layer in s) if stages is not None else 0
        if rule.whole:
            low, high = _whole(rule.tensor.shape, len(shard), dims)
        else:
            low, high = _cut(shape.parameters[rule.parameter], plan, shard, replica, dims)
        held = (high > low).all(axis=1)
        if rule.tensor.kind.startswith("optimizer") and owners is not None:
            held &= replica == owners[rule.parameter]
        ranks = (stage * plan.dp + replica) * plan.tp + shard
        count = int(held.sum())
        rows.append((np.full(count, number), ranks[held], low[held], high[held]))
    columns = [np.concatenate(column).astype(np.int64) for column in zip(*rows, strict=True)]
    return Layout(tuple(rule.tensor for rule in rules), plan.ranks, *columns)


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


def chunk(low: Ints, high: Ints, count: int, index: Ints) -> tuple[Ints, Ints]:
    """Chunk `index` of `count` of [low, high), as in `torch.chunk`: equal but for the last, which may be empty."""
    each = -(-(high - low) // count)
    return np.minimum(low + index * each, high), np.minimum(low + (index + 1) * each, high)


def zero1_owners(shape: ModelShape, plan: Plan) -> dict[int, int]:
    """Replica that holds the optimizer state of each trainable parameter (by index) under ZeRO-1.

    As in torch's `ZeroRedundancyOptimizer`: by group, largest first, to the replica with the fewest elements so far.
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
