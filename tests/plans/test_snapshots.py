"""State snapshots: the state once, distributed over its holders, and readable by any plan."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.plans.layout import layout
from clusterd.plans.model_shape import BufferShape, OddSlot
from clusterd.plans.plan import Plan
from clusterd.plans.reshard import plan_transfers
from clusterd.plans.snapshots import StateSnapshotPacking, state_snapshot_outbox
from tests.plans.test_reshard import PLANS, gpt, hosts


@given(plan=st.sampled_from(PLANS))
def test_every_byte_is_shared_out_once_and_evenly(plan: Plan) -> None:
    whole = layout(gpt(), Plan())
    shared = layout(gpt(), plan).deduplicated()
    for number in range(len(shared.tensors)):
        assert shared.row_bytes[shared.tensor == number].sum() == whole.row_bytes[number]
    has = [int(shared.row_bytes[shared.rank == rank].sum()) for rank in range(plan.ranks)]
    if plan.zero in (0, 2, 3) and plan.tp == plan.pp == 1:
        assert max(has) - min(has) <= shared.row_bytes.max()
    assert shared.digest == shared.deduplicated().digest


def test_buffers_count_as_the_first_replica_has_them() -> None:
    """Running statistics differ between replicas; state snapshots and migrations take them from one replica."""
    shape = gpt()
    changes = {
        "buffers": (BufferShape("head.mean", (4,), 4, 4), BufferShape("head.count", (), 8, 4)),
        "odd_slots": (OddSlot(0, "rows", (11, 1), 4),),
    }
    shape = type(shape).from_dict({**shape.to_dict(), **{k: [_row(v) for v in vs] for k, vs in changes.items()}})
    old, new = layout(shape, Plan(dp=2, pp=2, accumulation=2)), layout(shape, Plan(dp=4))
    buffers = [i for i, t in enumerate(old.tensors) if t.kind == "buffer"]
    assert len(buffers) == 2
    assert {t.kind for t in old.tensors} == {"parameter", "optimizer", "optimizer.rows", "buffer"}
    moves = plan_transfers(old, new, ["a", "b", "c", "d"], ["d"] * 4)
    rows = np.isin(moves.tensor, buffers)
    assert set(moves.source[rows]) == {2}  # the first rank of the last stage, although another is on the same host
    shared = old.deduplicated()
    assert set(shared.rank[np.isin(shared.tensor, buffers)]) == {2}


def _row(value: BufferShape | OddSlot) -> list[object]:
    if isinstance(value, BufferShape):
        return [value.name, value.shape, value.dtype_bytes, value.layer]
    return [value.parameter, value.name, value.shape, value.dtype_bytes]


@settings(deadline=None, max_examples=60)
@given(
    old=st.sampled_from(PLANS),
    new=st.sampled_from(PLANS),
    old_per_host=st.integers(1, 4),
    new_per_host=st.integers(1, 4),
)
def test_any_plan_reads_its_boxes_out_of_a_snapshot(old: Plan, new: Plan, old_per_host: int, new_per_host: int) -> None:
    shared = layout(gpt(), old).deduplicated()
    moves = plan_transfers(shared, layout(gpt(), new), hosts(old.ranks, old_per_host), hosts(new.ranks, new_per_host))
    packing = StateSnapshotPacking(moves)
    rng = np.random.default_rng(0)
    tensors = [rng.integers(0, 255, (*t.shape, t.element_bytes), dtype=np.uint8) for t in moves.new.tensors]
    segments = {}
    for rank in range(old.ranks):
        box = state_snapshot_outbox(shared, rank)
        segments[rank] = np.zeros(box.size_bytes, dtype=np.uint8)
        for part in box.parts:
            assert part.offset % 8 == 0
            segments[rank][part.offset : part.offset + part.bytes] = tensors[part.tensor][
                _at(part.low, part.high)
            ].ravel()
    for rank in range(new.ranks):
        host = moves.new_hosts[rank]
        inbox = np.zeros(packing.inbox_bytes(host), dtype=np.uint8)
        for fetch in packing.fetches(host):
            brought = np.concatenate([segments[fetch.source][o : o + n] for o, n in fetch.ranges])
            inbox[fetch.offset : fetch.offset + fetch.bytes] = brought
        found = 0
        for read in packing.reads(rank):
            assert read.within is not None
            low, high = read.within
            extent = [b - a for a, b in zip(low, high, strict=True)]
            part = inbox[read.offset : read.offset + read.bytes].reshape(*extent, -1)
            start = [a - b for a, b in zip(read.low, low, strict=True)]
            stop = [a - b for a, b in zip(read.high, low, strict=True)]
            assert (part[_at(start, stop)] == tensors[read.tensor][_at(read.low, read.high)]).all()
            found += part[_at(start, stop)].size
        assert found == int(moves.new.row_bytes[moves.new.rank == rank].sum())


def _at(low: tuple[int, ...] | list[int], high: tuple[int, ...] | list[int]) -> tuple[slice, ...]:
    return tuple(itertools.starmap(slice, zip(low, high, strict=True)))
