"""Segments: ranks read exactly the packed bytes, over any hosts."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings

from clusterd.plans.layout import layout
from clusterd.plans.packing import Packing
from clusterd.plans.plan import Plan
from clusterd.plans.reshard import plan_transfers
from tests.plans.test_reshard import a_move, gpt, hosts


@settings(deadline=None, max_examples=80)
@a_move
def test_every_new_rank_reads_its_boxes_out_of_the_segments(
    old: Plan, new: Plan, old_per_host: int, new_per_host: int, shift: int
) -> None:
    """A migration simulated with arrays: pack, fetch, read, compare with the global tensors."""
    shape = gpt()
    moves = plan_transfers(
        layout(shape, old), layout(shape, new), hosts(old.ranks, old_per_host), hosts(new.ranks, new_per_host, shift)
    )
    shared = frozenset(
        (rank, rank) for rank in range(min(old.ranks, new.ranks)) if moves.old_hosts[rank] == moves.new_hosts[rank]
    )
    packing = Packing(moves, shared, frozenset({"optimizer"} if shift else ()))
    rng = np.random.default_rng(0)
    tensors = [rng.integers(0, 255, (*t.shape, t.element_bytes), dtype=np.uint8) for t in moves.new.tensors]

    outboxes = {}
    for rank in range(old.ranks):
        box = packing.outbox(rank)
        assert box.host_bytes == max((part.offset + part.bytes for part in box.parts[: box.host_parts]), default=0)
        assert all(part.offset >= box.host_bytes for part in box.parts[box.host_parts :])
        assert all(offset + n <= box.host_bytes for ranges in box.ranges.values() for offset, n in ranges)
        assert box.device_readers <= {rank}
        assert bool(box.device_readers) == (box.host_parts < len(box.parts))
        outboxes[rank] = np.zeros(box.size_bytes, dtype=np.uint8)
        for part in box.parts:
            at = tuple(itertools.starmap(slice, zip(part.low, part.high, strict=True)))
            outboxes[rank][part.offset : part.offset + part.bytes] = tensors[part.tensor][at].reshape(-1)
            assert part.offset % min(moves.new.tensors[part.tensor].element_bytes, 8) == 0
    inboxes = {}
    fetched = 0
    for host in dict.fromkeys(moves.new_hosts):
        inboxes[host] = np.zeros(packing.inbox_bytes(host), dtype=np.uint8)
        for fetch in packing.fetches(host):
            assert fetch.source_host != host
            piece = np.concatenate([outboxes[fetch.source][o : o + n] for o, n in fetch.ranges])
            inboxes[host][fetch.offset : fetch.offset + len(piece)] = piece
            fetched += len(piece)
    assert fetched == moves.network_bytes, "nothing but what is lacking crosses"

    for rank in range(new.ranks):
        host = moves.new_hosts[rank]
        count = {}
        for read in packing.reads(rank):
            segment = outboxes[read.source] if read.local else inboxes[host]
            at = tuple(itertools.starmap(slice, zip(read.low, read.high, strict=True)))
            assert (segment[read.offset : read.offset + read.bytes] == tensors[read.tensor][at].reshape(-1)).all()
            count[read.tensor] = count.get(read.tensor, 0) + read.bytes
            if packing.on_device(read):
                assert (read.source, rank) in shared
                assert not shift or not moves.new.tensors[read.tensor].kind.startswith("optimizer")
        assert sum(count.values()) == int(moves.new.row_bytes[moves.new.rank == rank].sum())
