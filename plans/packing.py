"""Byte positions of transferred boxes in the segments of a migration; all processes compute the same.

A source rank puts every box that a target reads from it into one segment, its outbox, each box once. Boxes that the
same hosts fetch are adjacent, so that a host fetches few long ranges; fetched ranges form one segment on the target
host, its inbox. Ranks read from the outboxes of their own host and from its inbox. Boxes that only ranks on the source
rank's own device read come last, as these can read them from its memory: then the segment ends before them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from clusterd.plans.reshard import Transfers

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
    """Segment of one source rank.

    Attributes:
        host_parts, host_bytes: number and size of the first parts, which ranks on other devices or hosts read too.
        device_readers: target ranks that read the other parts, all on the source rank's device.
    """

    rank: int
    size_bytes: int
    parts: tuple[Part, ...]
    ranges: dict[str, tuple[Range, ...]]  # by fetching host
    host_parts: int
    host_bytes: int
    device_readers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ranges that one host fetches from one outbox, and their position in its inbox."""

    source: int
    source_host: str
    ranges: tuple[Range, ...]
    offset: int  # in the inbox, where the ranges are consecutive

    @property
    def bytes(self) -> int:
        """Total length of the ranges."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True, slots=True)
class Read:
    """One box that a target rank reads."""

    tensor: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    source: int  # source rank
    local: bool  # in the source's outbox on this host; else in the host's inbox
    offset: int
    bytes: int  # of the containing part
    within: Box | None = None  # box of that part, if larger


@dataclass(eq=False)
class Packing:
    """Segments of one migration.

    Attributes:
        on_one_device: pairs of source and target rank that share a device, whose memory both can read.
        in_host_memory: kinds of tensors that one of the plans keeps there.
    """

    transfers: Transfers
    on_one_device: frozenset[tuple[int, int]] = frozenset()
    in_host_memory: frozenset[str] = frozenset()
    _outboxes: dict[int, Outbox] = field(default_factory=dict)

    def outbox(self, rank: int) -> Outbox:
        """Outbox of a source rank; empty if no rank reads from it."""
        if rank not in self._outboxes:
            self._outboxes[rank] = self._outbox(rank)
        return self._outboxes[rank]

    def fetches(self, host: str) -> list[Fetch]:
        """Fetches of a host over the network, by source; together they fill its inbox."""
        found: list[Fetch] = []
        offset = 0
        for source in sorted(self._senders.get(host, ())):
            ranges = self.outbox(source).ranges[host]
            # Every fetch is aligned for any dtype.
            offset = -(-offset // 8) * 8
            found.append(Fetch(source, self.transfers.old_hosts[source], ranges, offset))
            offset += found[-1].bytes
        return found

    def inbox_bytes(self, host: str) -> int:
        """Size of a host's inbox."""
        fetches = self.fetches(host)
        return fetches[-1].offset + fetches[-1].bytes if fetches else 0

    def on_device(self, read: Read) -> bool:
        """True if the box need not go through host memory."""
        return read.local and read.offset >= self.outbox(read.source).host_bytes

    def reads(self, rank: int) -> list[Read]:
        """Reads of a target rank, source by source."""
        transfers = self.transfers
        host = transfers.new_hosts[rank]
        fetches = {fetch.source: fetch for fetch in self.fetches(host)}
        found: list[Read] = []
        for row in np.flatnonzero(transfers.target == rank):
            source = int(transfers.source[row])
            low, high = self._box(row)
            part = self._parts(source)[int(transfers.tensor[row]), low, high]
            local = transfers.old_hosts[source] == host
            offset = part.offset if local else _inbox_offset(fetches[source], part.offset)
            found.append(Read(part.tensor, low, high, source, local, offset, part.bytes))
        return sorted(found, key=lambda read: (not read.local, read.source, read.offset))

    @cached_property
    def _senders(self) -> dict[str, set[int]]:
        senders: dict[str, set[int]] = defaultdict(set)
        for row in np.flatnonzero(self.transfers.crosses_network):
            senders[self.transfers.new_hosts[self.transfers.target[row]]].add(int(self.transfers.source[row]))
        return senders

    def _outbox(self, rank: int) -> Outbox:
        transfers = self.transfers
        fetching_hosts: dict[tuple[int, Box], set[str]] = defaultdict(set)
        through_host: set[tuple[int, Box]] = set()
        readers: dict[tuple[int, Box], set[int]] = defaultdict(set)
        sizes: dict[tuple[int, Box], int] = {}
        for row in np.flatnonzero(transfers.source == rank):
            key = (int(transfers.tensor[row]), self._box(row))
            sizes[key] = int(transfers.bytes[row])
            target = int(transfers.target[row])
            readers[key].add(target)
            host = transfers.new_hosts[target]
            if host != transfers.old_hosts[rank]:
                fetching_hosts[key].add(host)
            if (rank, target) not in self.on_one_device or self._kind(key[0]) in self.in_host_memory:
                through_host.add(key)
        # Within a group the widest elements come first, so that each box is aligned without gaps.
        order = sorted(
            sizes,
            key=lambda key: (key not in through_host, sorted(fetching_hosts[key]), -self._alignment(key[0]), key),
        )
        parts: list[Part] = []
        ranges: dict[str, list[Range]] = defaultdict(list)
        offset, group = 0, None
        host_bytes = 0
        for key in order:
            hosts = sorted(fetching_hosts[key])
            if (key in through_host, hosts) != group:
                offset, group = -(-offset // 8) * 8, (key in through_host, hosts)
            tensor, (low, high) = key
            parts.append(Part(tensor, low, high, offset, sizes[key]))
            for host in hosts:
                _extend(ranges[host], offset, sizes[key])
            offset += sizes[key]
            if key in through_host:
                host_bytes = offset
        return Outbox(
            rank,
            offset,
            tuple(parts),
            {host: tuple(r) for host, r in ranges.items()},
            host_parts=len(through_host),
            host_bytes=host_bytes,
            device_readers=frozenset(target for key in sizes.keys() - through_host for target in readers[key]),
        )

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
        dims = len(self.transfers.new.tensors[self.transfers.tensor[row]].shape)
        low, high = self.transfers.low[row, :dims].tolist(), self.transfers.high[row, :dims].tolist()
        return tuple(low), tuple(high)

    def _kind(self, tensor: int) -> str:
        return self.transfers.new.tensors[tensor].kind.partition(".")[0]

    def _alignment(self, tensor: int) -> int:
        size = self.transfers.new.tensors[tensor].element_bytes
        return min(size & -size, 8)


def _extend(ranges: list[Range], offset: int, length: int) -> None:
    if ranges and sum(ranges[-1]) == offset:
        ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
    else:
        ranges.append((offset, length))


def _inbox_offset(fetch: Fetch, offset: int) -> int:
    """Position in the inbox of a byte of the outbox."""
    before = fetch.offset
    for start, length in fetch.ranges:
        if start <= offset < start + length:
            return before + offset - start
        before += length
    raise AssertionError(f"offset {offset} of outbox {fetch.source} was not fetched")
