"""Snapshots as segments: what each rank writes every few steps, and how new ranks read it when nothing else is left.

A snapshot is written before anyone knows who will read it: each byte of the state once, by one of its holders, whole
boxes one after another. A host that needs any of a box fetches all of it; when ranks have died, simplicity is worth
more than the last byte.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np

from plans.layout import Layout
from plans.packing import Fetch, Outbox, Packing, Part, Read


def snapshot_of(shared: Layout, rank: int) -> Outbox:
    """The segment that `rank` writes.

    Args:
        shared: `Layout.shared_out` of the plan's layout.
    """
    parts: list[Part] = []
    offset = 0
    rows = np.flatnonzero(shared.rank == rank)
    sizes = shared.row_bytes
    for row in rows[np.argsort(shared.tensor[rows], kind="stable")]:
        number = int(shared.tensor[row])
        dims = len(shared.tensors[number].shape)
        offset = -(-offset // 8) * 8
        low, high = tuple(shared.low[row, :dims].tolist()), tuple(shared.high[row, :dims].tolist())
        parts.append(Part(number, low, high, offset, int(sizes[row])))
        offset += parts[-1].bytes
    return Outbox(rank, offset, tuple(parts), {})


class SnapshotPacking(Packing):
    """Where new ranks read from, when the old ones are snapshots: always from what their host fetched."""

    def reads(self, rank: int) -> list[Read]:
        """Of a new rank, source by source; several reads may lie in one part."""
        moves = self.moves
        host = moves.new_hosts[rank]
        placed = {fetch.source: self._placed(fetch) for fetch in self.fetches(host)}
        found: list[Read] = []
        for row in np.flatnonzero(moves.target == rank):
            source, tensor = int(moves.source[row]), int(moves.tensor[row])
            dims = len(moves.new.tensors[tensor].shape)
            low, high = tuple(moves.low[row, :dims].tolist()), tuple(moves.high[row, :dims].tolist())
            part, offset = placed[source][tensor]
            found.append(Read(tensor, low, high, source, False, offset, part.bytes, (part.low, part.high)))
        return sorted(found, key=lambda read: (read.source, read.offset, read.low))

    @cached_property
    def _senders(self) -> dict[str, set[int]]:
        senders: dict[str, set[int]] = defaultdict(set)
        for target, source in zip(self.moves.target, self.moves.source, strict=True):
            senders[self.moves.new_hosts[target]].add(int(source))
        return senders

    def _outbox(self, rank: int) -> Outbox:
        whole = snapshot_of(self.moves.old, rank)
        needed: dict[str, set[int]] = defaultdict(set)
        for row in np.flatnonzero(self.moves.source == rank):
            needed[self.moves.new_hosts[self.moves.target[row]]].add(int(self.moves.tensor[row]))
        ranges = {
            host: tuple((part.offset, part.bytes) for part in whole.parts if part.tensor in tensors)
            for host, tensors in needed.items()
        }
        return Outbox(rank, whole.size_bytes, whole.parts, ranges)

    def _placed(self, fetch: Fetch) -> dict[int, tuple[Part, int]]:
        """Of a source's parts that were fetched, by tensor: the part, and where it lies in the inbox."""
        by_offset = {part.offset: part for part in self.outbox(fetch.source).parts}
        found = {}
        at = fetch.offset
        for start, length in fetch.ranges:
            found[by_offset[start].tensor] = by_offset[start], at
            at += length
        return found
