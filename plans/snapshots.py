"""Segments of state snapshots: written by each rank every few steps, read if no source rank is left.

A state snapshot is written before its readers are known: each byte of the state once, by one of its holders, whole
boxes one after another. A host that needs any part of a box fetches all of it; after ranks have died, simplicity
matters more than the last byte.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property

import numpy as np

from clusterd.plans.layout import Layout
from clusterd.plans.packing import Fetch, Outbox, Packing, Part, Read


def state_snapshot_outbox(shared: Layout, rank: int) -> Outbox:
    """Segment that `rank` writes.

    Args:
        shared: `Layout.deduplicated` of the plan's layout.
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
    return Outbox(rank, offset, tuple(parts), {}, host_parts=len(parts), host_bytes=offset)


class StateSnapshotPacking(Packing):
    """Packing for state snapshots as sources: target ranks read only what their host fetched."""

    def reads(self, rank: int) -> list[Read]:
        """Reads of a target rank, source by source; several reads may be in one part."""
        transfers = self.transfers
        host = transfers.new_hosts[rank]
        fetched = {fetch.source: self._fetched_parts(fetch) for fetch in self.fetches(host)}
        found: list[Read] = []
        for row in np.flatnonzero(transfers.target == rank):
            source, tensor = int(transfers.source[row]), int(transfers.tensor[row])
            dims = len(transfers.new.tensors[tensor].shape)
            low, high = tuple(transfers.low[row, :dims].tolist()), tuple(transfers.high[row, :dims].tolist())
            part, offset = fetched[source][tensor]
            found.append(Read(tensor, low, high, source, False, offset, part.bytes, (part.low, part.high)))
        return sorted(found, key=lambda read: (read.source, read.offset, read.low))

    @cached_property
    def _senders(self) -> dict[str, set[int]]:
        senders: dict[str, set[int]] = defaultdict(set)
        for target, source in zip(self.transfers.target, self.transfers.source, strict=True):
            senders[self.transfers.new_hosts[target]].add(int(source))
        return senders

    def _outbox(self, rank: int) -> Outbox:
        whole = state_snapshot_outbox(self.transfers.old, rank)
        needed: dict[str, set[int]] = defaultdict(set)
        for row in np.flatnonzero(self.transfers.source == rank):
            needed[self.transfers.new_hosts[self.transfers.target[row]]].add(int(self.transfers.tensor[row]))
        ranges = {
            host: tuple((part.offset, part.bytes) for part in whole.parts if part.tensor in tensors)
            for host, tensors in needed.items()
        }
        return replace(whole, ranges=ranges)

    def _fetched_parts(self, fetch: Fetch) -> dict[int, tuple[Part, int]]:
        """A source's fetched parts, by tensor: the part, and its offset in the inbox."""
        by_offset = {part.offset: part for part in self.outbox(fetch.source).parts}
        found = {}
        at = fetch.offset
        for start, length in fetch.ranges:
            found[by_offset[start].tensor] = by_offset[start], at
            at += length
        return found
