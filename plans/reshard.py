"""Transfers that turn one layout into another. Pure and vectorised; all processes compute the same.

Every byte of the new layout comes from exactly one holder in the old one: on the same device if possible, else on the
same host, else over the network, which each byte crosses once per host that lacks it (the lower bound), however many
ranks of that host need it. Replicas share the sending. After Tenplex's minimum-movement plans; unlike its code, sources
are spread over replicas and same-host bytes do not cross a socket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clusterd.plans.layout import Ints, Layout, LayoutMismatch


class IncompleteLayout(ValueError):
    """Some needed byte has no holder: its ranks are lost, and no replica is left."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box moving from one holder to another."""

    tensor: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    source: int  # source rank
    target: int  # target rank
    source_host: str
    target_host: str

    @property
    def crosses_network(self) -> bool:
        """True if source and target are on different hosts."""
        return self.source_host != self.target_host


@dataclass(frozen=True, eq=False)
class Transfers:
    """All transfers between two layouts, as columns; rows are sorted by (target, tensor, box).

    Attributes:
        tensor, source, target: (n,) index of the tensor, source rank, target rank.
        low, high: (n, d) the box in global coordinates.
        bytes: (n,) its size.
        old_hosts, new_hosts: host of each source and target rank.
    """

    old: Layout
    new: Layout
    tensor: Ints
    source: Ints
    target: Ints
    low: Ints
    high: Ints
    bytes: Ints
    old_hosts: tuple[str, ...]
    new_hosts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Transfer]:
        for i in range(len(self)):
            dims = len(self.new.tensors[self.tensor[i]].shape)
            source, target = int(self.source[i]), int(self.target[i])
            yield Transfer(
                int(self.tensor[i]),
                tuple(int(x) for x in self.low[i, :dims]),
                tuple(int(x) for x in self.high[i, :dims]),
                source,
                target,
                self.old_hosts[source],
                self.new_hosts[target],
            )

    @cached_property
    def crosses_network(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(n,) True if the source is on another host than the target."""
        hosts = {name: i for i, name in enumerate(dict.fromkeys((*self.old_hosts, *self.new_hosts)))}
        old = np.array([hosts[h] for h in self.old_hosts])
        new = np.array([hosts[h] for h in self.new_hosts])
        return np.asarray(old[self.source] != new[self.target])

    @property
    def network_bytes(self) -> int:
        """Bytes that cross the network: once per target host, however many ranks read them there."""
        rows = np.flatnonzero(self.crosses_network)
        if not len(rows):
            return 0
        host = {name: i for i, name in enumerate(dict.fromkeys(self.new_hosts))}
        target_host = np.array([host[h] for h in self.new_hosts])[self.target[rows]]
        key = np.column_stack([self.tensor[rows], self.source[rows], target_host, self.low[rows], self.high[rows]])
        _, first = np.unique(key, axis=0, return_index=True)
        return int(self.bytes[rows][first].sum())

    @property
    def local_bytes(self) -> int:
        """Bytes that stay on their host."""
        return int(self.bytes[~self.crosses_network].sum())

    @cached_property
    def digest(self) -> str:
        """Hash that is equal for equal transfers."""
        of = hashlib.sha256(f"{self.old.digest} {self.new.digest} {self.old_hosts} {self.new_hosts}".encode())
        for array in (self.tensor, self.source, self.target, self.low, self.high):
            of.update(np.ascontiguousarray(array).tobytes())
        return of.hexdigest()


def plan_transfers(
    old: Layout,
    new: Layout,
    old_hosts: Sequence[str],
    new_hosts: Sequence[str],
    old_devices: Sequence[str] = (),
    new_devices: Sequence[str] = (),
) -> Transfers:
    """Transfers that turn `old` into `new`: every byte of `new` exactly once.

    Cost grows with the number of transfers.

    Args:
        old, new: layouts of one collection.
        old_hosts, new_hosts: host of each rank; `old_devices`, `new_devices`: device of each, if known.
    Raises:
        LayoutMismatch: the layouts are of different collections.
        IncompleteLayout: some byte of `new` has no holder in `old`.
    """
    _check_same_collection(old, new)
    old_boxes, new_boxes = _Boxes.of(old), _Boxes.of(new)
    a, b = _overlaps(old_boxes, new_boxes)
    low = np.maximum(old_boxes.low[a], new_boxes.low[b])
    high = np.minimum(old_boxes.high[a], new_boxes.high[b])
    element = np.array([t.element_bytes for t in new.tensors], dtype=np.int64)
    size = np.prod(high - low, axis=1) * element[new_boxes.tensor[b]]
    _check_complete(new, new_boxes, b, size, element)

    # One row per (overlap, target rank that needs it).
    overlap, target = _expand(new_boxes.first[b], new_boxes.count[b], new_boxes.rank)
    ids = {name: i for i, name in enumerate(dict.fromkeys((*old_hosts, *new_hosts)))}
    old_host = np.array([ids[h] for h in old_hosts], dtype=np.int64)
    new_host = np.array([ids[h] for h in new_hosts], dtype=np.int64)
    first_holder_wins = np.array([t.kind == "buffer" for t in old.tensors], dtype=bool)
    source = _sources(
        overlap, target, a, size, old_boxes, first_holder_wins, old_host, new_host, old_devices, new_devices
    )
    columns = [new_boxes.tensor[b][overlap], source, target, low[overlap], high[overlap], size[overlap]]
    order = np.lexsort((*(columns[3][:, d] for d in reversed(range(low.shape[1]))), columns[0], target))
    tensor, source, target, low, high, size = (column[order] for column in columns)
    return Transfers(old, new, tensor, source, target, low, high, size, tuple(old_hosts), tuple(new_hosts))


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Distinct boxes of a layout, sorted so that boxes that differ only along the first dimension are neighbours."""

    tensor: Ints
    low: Ints
    high: Ints
    column: Ints  # equal for boxes of one tensor that agree in all dimensions but the first
    first: Ints  # of each box, into `rank`
    count: Ints
    rank: Ints  # of the holders, box by box

    @classmethod
    def of(cls, layout: Layout) -> _Boxes:
        dims = layout.low.shape[1]
        rest = [c for d in range(1, dims) for c in (layout.low[:, d], layout.high[:, d])]
        keys = [layout.rank, layout.high[:, 0], layout.low[:, 0], *reversed(rest), layout.tensor]
        order = np.lexsort(keys)
        tensor, low, high, rank = (x[order] for x in (layout.tensor, layout.low, layout.high, layout.rank))
        if not len(tensor):
            empty = np.zeros(0, dtype=np.int64)
            return cls(tensor, low, high, empty, empty, empty, rank)
        starts_column = np.ones(len(tensor), dtype=bool)
        starts_column[1:] = (
            (tensor[1:] != tensor[:-1])
            | (low[1:, 1:] != low[:-1, 1:]).any(axis=1)
            | (high[1:, 1:] != high[:-1, 1:]).any(axis=1)
        )
        starts_box = starts_column.copy()
        starts_box[1:] |= (low[1:, 0] != low[:-1, 0]) | (high[1:, 0] != high[:-1, 0])
        first = np.flatnonzero(starts_box)
        column = (np.cumsum(starts_column) - 1)[first]
        count = np.diff(np.append(first, len(tensor)))
        return cls(tensor[first], low[first], high[first], column, first, count, rank)


def _overlaps(old: _Boxes, new: _Boxes) -> tuple[Ints, Ints]:
    """Indices (into old, into new) of boxes that overlap.

    Within a column boxes are disjoint and sorted along the first dimension, so those that overlap a new one are a
    range: two binary searches each, over all tensors at once.
    """
    none = np.zeros(0, dtype=np.int64)
    if not len(old.tensor) or not len(new.tensor):
        return none, none
    column_first = np.flatnonzero(np.append(True, old.column[1:] != old.column[:-1]))
    column_tensor = old.tensor[column_first]
    begin = np.searchsorted(column_tensor, new.tensor, side="left")
    count = np.searchsorted(column_tensor, new.tensor, side="right") - begin
    b, column = _expand(begin, count, np.arange(len(column_tensor)))
    touches = np.ones(len(b), dtype=bool)
    for d in range(1, new.low.shape[1]):
        box = column_first[column]
        touches &= (old.low[box, d] < new.high[b, d]) & (old.high[box, d] > new.low[b, d])
    b, column = b[touches], column[touches]
    # Sort keys that separate columns; within a column, boxes ascend along the first dimension.
    span = int(max(old.high[:, 0].max(), new.high[:, 0].max())) + 1
    lows, highs = old.column * span + old.low[:, 0], old.column * span + old.high[:, 0]
    begin = np.searchsorted(highs, column * span + new.low[b, 0], side="right")
    end = np.searchsorted(lows, column * span + new.high[b, 0], side="left")
    row, a = _expand(begin, np.maximum(end - begin, 0), np.arange(len(old.tensor)))
    return a, b[row]


def _expand(first: Ints, count: Ints, values: Ints) -> tuple[Ints, Ints]:
    """For each i, the values[first[i] : first[i] + count[i]]: (index i repeated, those values)."""
    index = np.repeat(np.arange(len(count)), count)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    return index, values[first[index] + offset]


def _sources(
    overlap: Ints,
    target: Ints,
    box: Ints,
    size: Ints,
    old: _Boxes,
    first_holder_wins: np.ndarray[tuple[int], np.dtype[np.bool_]],
    old_host: Ints,
    new_host: Ints,
    old_devices: Sequence[str],
    new_devices: Sequence[str],
) -> Ints:
    """Source rank of each (overlap, target).

    Args:
        first_holder_wins: (tensors,) True if holders may differ and the first one counts, wherever it is.
    """
    row, holder = _expand(old.first[box[overlap]], old.count[box[overlap]], old.rank)
    proximity = (old_host[holder] == new_host[target[row]]).astype(np.int64)
    if old_devices and new_devices:
        ids = {name: i for i, name in enumerate(dict.fromkeys((*old_devices, *new_devices)))}
        old_device = np.array([ids[d] for d in old_devices])
        new_device = np.array([ids[d] for d in new_devices])
        proximity += proximity * (old_device[holder] == new_device[target[row]])
    proximity[first_holder_wins[old.tensor[box[overlap[row]]]]] = 1
    best = np.zeros(len(overlap), dtype=np.int64)
    np.maximum.at(best, row, proximity)
    # The first holder among the nearest; if all are remote, replicas share the load below.
    chosen = np.full(len(overlap), np.iinfo(np.int64).max)
    candidate = proximity == best[row]
    np.minimum.at(chosen, row[candidate], holder[candidate])
    remote = np.flatnonzero(best == 0)
    if len(remote):
        chosen[remote] = _balanced_senders(overlap[remote], new_host[target[remote]], box, size, old)
    return chosen


def _balanced_senders(overlap: Ints, host: Ints, box: Ints, size: Ints, old: _Boxes) -> Ints:
    """Senders of overlaps without a local holder: each set of replicas splits its bytes into equal consecutive parts.

    Ranks of one host that need the same overlap get it from the same sender, so that it crosses the network once.
    """
    _, first, back = np.unique(np.column_stack([overlap, host]), axis=0, return_index=True, return_inverse=True)
    back = back.reshape(-1)
    boxes = box[overlap[first]]
    replicas = _replica_sets(old)[boxes]
    bytes_each = size[overlap[first]]
    order = np.lexsort((first, replicas))
    sets, starts = np.unique(replicas[order], return_index=True)
    running = np.cumsum(bytes_each[order])
    before = np.append(0, running)[starts]
    totals = np.diff(np.append(before, running[-1]))
    group = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    middle = running - bytes_each[order] / 2 - before[group]
    count = old.count[boxes[order]]
    share_index = np.minimum((middle * count / np.maximum(totals[group], 1)).astype(np.int64), count - 1)
    sender = np.zeros(len(order), dtype=np.int64)
    sender[order] = old.rank[old.first[boxes[order]] + share_index]
    assert len(sets) == len(starts)
    return sender[back]


def _replica_sets(old: _Boxes) -> Ints:
    """(boxes,) number that is equal for boxes with the same holders."""
    # A sum of hashed ranks identifies a set of holders; collisions only cost balance.
    scrambled = (old.rank * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    sums = np.add.reduceat(scrambled, old.first) if len(old.first) else scrambled
    return np.asarray(sums * 1024 + old.count)


def _check_same_collection(old: Layout, new: Layout) -> None:
    if old.tensors == new.tensors:
        return
    there = {(t.name, t.kind): t for t in old.tensors}
    for tensor in new.tensors:
        before = there.get((tensor.name, tensor.kind))
        if before is None:
            raise LayoutMismatch(f"{tensor.name} ({tensor.kind}) is not in the old layout")
        if before != tensor:
            raise LayoutMismatch(
                f"{tensor.name} ({tensor.kind}) was {before.shape} of {before.element_bytes} bytes an element, "
                f"is {tensor.shape} of {tensor.element_bytes}"
            )
    raise LayoutMismatch("the layouts list their tensors differently")


def _check_complete(new: Layout, boxes: _Boxes, b: Ints, size: Ints, element: Ints) -> None:
    wanted = np.prod(boxes.high - boxes.low, axis=1) * element[boxes.tensor]
    found = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(found, b, size)
    missing = np.flatnonzero(found < wanted)
    if len(missing):
        tensor = new.tensors[boxes.tensor[missing[0]]]
        raise IncompleteLayout(
            f"{len(missing)} boxes are not held by any remaining rank, the first of {tensor.name} ({tensor.kind})"
        )
    # More than wanted means that old boxes overlap without being equal, so they are not a partition.
    assert (found == wanted).all(), "old boxes overlap"
