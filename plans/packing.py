"""Where each moved box lies on its way: the segments of a move, byte by byte, the same for everyone who computes them.

A rank that leaves puts every box that somebody reads from it into one segment, its outbox, each box once.
Boxes that the same hosts lack lie together, so that what a host has to fetch is a few long ranges; what it fetched
lies in one segment there, its inbox. Ranks read from the outboxes of their own host and from its inbox.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plans.reshard import Moves

Box = tuple[tuple[int, ...], tuple[int, ...]]  # low, high, in as many dimensions as the tensor has
Range = tuple[int, int]  # offset, length


@dataclass(frozen=True, slots=True)
class Part:
    """One box in an outbox."""

    tensor: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Outbox:
    """What one old rank gives."""

    rank: int
    size_bytes: int
    parts: tuple[Part, ...]
    ranges: dict[str, tuple[Range, ...]]  # by host that fetches them


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one host fetches from one outbox, and where it puts it."""

    source: int
    source_host: str
    ranges: tuple[Range, ...]
    offset: int  # in the inbox; the ranges lie there one after another

    @property
    def bytes(self) -> int:
        """Over all ranges."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True, slots=True)
class Read:
    """One box that a new rank reads."""

    tensor: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    source: int  # old rank it is from
    local: bool  # in the source's outbox on this host; else in this host's inbox
    offset: int
    bytes: int  # of the part in which it lies
    within: Box | None = None  # the box of that part, where it is larger


@dataclass(eq=False)
class Packing:
    """Segments of one move."""

    moves: Moves
    _outboxes: dict[int, Outbox] = field(default_factory=dict)

    def outbox(self, rank: int) -> Outbox:
        """Of an old rank; empty when nobody reads from it."""
        if rank not in self._outboxes:
            self._outboxes[rank] = self._outbox(rank)
        return self._outboxes[rank]

    def fetches(self, host: str) -> list[Fetch]:
        """What a host brings over the network, by source; the inbox is as long as all of them together."""
        found: list[Fetch] = []
        offset = 0
        for source in sorted(self._senders.get(host, ())):
            ranges = self.outbox(source).ranges[host]
            # Every fetch begins where any kind of element may begin.
            offset = -(-offset // 8) * 8
            found.append(Fetch(source, self.moves.old_hosts[source], ranges, offset))
            offset += found[-1].bytes
        return found

    def inbox_bytes(self, host: str) -> int:
        """Size of a host's inbox."""
        fetches = self.fetches(host)
        return fetches[-1].offset + fetches[-1].bytes if fetches else 0

    def reads(self, rank: int) -> list[Read]:
        """Of a new rank, source by source."""
        moves = self.moves
        host = moves.new_hosts[rank]
        fetches = {fetch.source: fetch for fetch in self.fetches(host)}
        found: list[Read] = []
        for row in np.flatnonzero(moves.target == rank):
            source = int(moves.source[row])
            low, high = self._box(row)
            part = self._parts(source)[int(moves.tensor[row]), low, high]
            local = moves.old_hosts[source] == host
            offset = part.offset if local else _placed(fetches[source], part.offset)
            found.append(Read(part.tensor, low, high, source, local, offset, part.bytes))
        return sorted(found, key=lambda read: (not read.local, read.source, read.offset))

    @cached_property
    def _senders(self) -> dict[str, set[int]]:
        senders: dict[str, set[int]] = defaultdict(set)
        for row in np.flatnonzero(self.moves.crosses_network):
            senders[self.moves.new_hosts[self.moves.target[row]]].add(int(self.moves.source[row]))
        return senders

    def _outbox(self, rank: int) -> Outbox:
        moves = self.moves
        lacking: dict[tuple[int, Box], set[str]] = defaultdict(set)
        sizes: dict[tuple[int, Box], int] = {}
        for row in np.flatnonzero(moves.source == rank):
            key = (int(moves.tensor[row]), self._box(row))
            sizes[key] = int(moves.bytes[row])
            host = moves.new_hosts[moves.target[row]]
            if host != moves.old_hosts[rank]:
                lacking[key].add(host)
        # Within a group the widest elements come first, so that each box begins aligned without gaps.
        order = sorted(sizes, key=lambda key: (sorted(lacking[key]), -self._alignment(key[0]), key))
        parts: list[Part] = []
        ranges: dict[str, list[Range]] = defaultdict(list)
        offset, group = 0, None
        for key in order:
            hosts = sorted(lacking[key])
            if hosts != group:
                offset, group = -(-offset // 8) * 8, hosts
            tensor, (low, high) = key
            parts.append(Part(tensor, low, high, offset, sizes[key]))
            for host in hosts:
                _extend(ranges[host], offset, sizes[key])
            offset += sizes[key]
        return Outbox(rank, offset, tuple(parts), {host: tuple(r) for host, r in ranges.items()})

    def _parts(self, rank: int) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], Part]:
        index = self._by_box.get(rank)
        if index is None:
            index = {(part.tensor, part.low, part.high): part for part in self.outbox(rank).parts}
            self._by_box[rank] = index
        return index

    @cached_property
    def _by_box(self) -> dict[int, dict[tuple[int, tuple[int, ...], tuple[int, ...]], Part]]:
        return {}

    def _box(self, row: np.int64) -> Box:
        dims = len(self.moves.new.tensors[self.moves.tensor[row]].shape)
        low, high = self.moves.low[row, :dims].tolist(), self.moves.high[row, :dims].tolist()
        return tuple(low), tuple(high)

    def _alignment(self, tensor: int) -> int:
        size = self.moves.new.tensors[tensor].element_bytes
        return min(size & -size, 8)


def _extend(ranges: list[Range], offset: int, length: int) -> None:
    if ranges and sum(ranges[-1]) == offset:
        ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
    else:
        ranges.append((offset, length))


def _placed(fetch: Fetch, offset: int) -> int:
    """Where a byte of the outbox lies in the inbox."""
    before = fetch.offset
    for start, length in fetch.ranges:
        if start <= offset < start + length:
            return before + offset - start
        before += length
    raise AssertionError(f"offset {offset} of outbox {fetch.source} was not fetched")
