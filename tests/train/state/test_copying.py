"""Data that goes through a segment is unchanged, with the same checksums for any memory layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import StandIn

from clusterd.train.process import accelerator
from clusterd.train.state import copying, segments
from clusterd.train.state.copying import (
    BATCH_BYTES,
    SegmentPart,
    copies_from_device,
    copies_from_segment,
    copies_to_segment,
    sums_on_device,
)
from clusterd.train.state.segments import Segment

THREADS = pytest.mark.parametrize("threads", [1, 3])


def tensors() -> list[torch.Tensor]:
    """Tensors of many kinds: larger than a batch, odd rows, no rows, strided, bytes, and halves."""
    torch.manual_seed(0)
    return [
        torch.randn(3 * BATCH_BYTES // 4 + 5),
        torch.randn(700, 1031),
        torch.randn(40, 64)[:, ::2],
        torch.randn(33, 48)[:, 16:32],
        torch.randn(7, 3).bfloat16(),
        torch.randint(0, 255, (5, 11), dtype=torch.uint8),
        torch.tensor(3.5),
        torch.randint(-(2**62), 2**62, (9, 4)),
    ]


def laid_out(live: list[torch.Tensor]) -> list[SegmentPart]:
    """One part per tensor, but for the last two tensors, which share one."""
    pieces, offset = [], 0
    for some in [*([t] for t in live[:-2]), live[-2:]]:
        size = sum(t.nbytes for t in some)
        pieces.append(SegmentPart(offset, tuple(some), size))
        offset = -(-(offset + size) // 8) * 8
    return pieces


@pytest.fixture(name="segment")
def segment_(tmp_path: Path) -> Segment:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8 << 20))
    return Segment(str(path))


@THREADS
def test_everything_comes_back(segment: Segment, threads: int) -> None:
    live = tensors()
    sums = copies_to_segment(segment, laid_out(live)).run(threads)
    back = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in live]
    assert copies_from_segment(segment, laid_out(back)).run(4 - threads) == sums
    assert all(torch.equal(a, b) for a, b in zip(live, back, strict=True))


@THREADS
def test_every_byte_counts(segment: Segment, threads: int) -> None:
    live = tensors()
    pieces = laid_out(live)
    sums = copies_to_segment(segment, pieces).run()
    for number, piece in enumerate(pieces):
        byte = segment.view(torch.uint8, (1,), piece.offset + piece.bytes - 1)
        byte += 1
        back = laid_out([torch.zeros_like(t) for t in live])
        found = copies_from_segment(segment, back).run(threads)
        assert [i for i, (a, b) in enumerate(zip(sums, found, strict=True)) if a != b] == [number]
        byte -= 1


def test_slots_that_are_not_there_are_zeros(segment: Segment) -> None:
    segment.view(torch.uint8, (64,), 0).fill_(7)
    there = torch.arange(4, dtype=torch.float32)
    (written,) = copies_to_segment(segment, [SegmentPart(0, (None, there, None), 48)]).run()
    back = [torch.ones(4) for _ in range(3)]
    (read,) = copies_from_segment(segment, [SegmentPart(0, tuple(back), 48)]).run()
    assert read == written
    assert [t.tolist() for t in back] == [[0.0] * 4, there.tolist(), [0.0] * 4]
    assert segment.view(torch.uint8, (16,), 48).tolist() == [7] * 16


def test_partial_writes_are_summed_over_ranks(segment: Segment) -> None:
    whole = torch.randn(10, 6)
    sums = copies_to_segment(segment, [SegmentPart(0, (whole,), whole.nbytes)]).run()
    corner = torch.zeros(4, 3)
    assert copies_from_segment(segment, [SegmentPart(0, (corner,), whole.nbytes, ((10, 6), (5, 2)))]).run() == sums
    assert torch.equal(corner, whole[5:9, 2:5])


def test_every_copy_of_a_gpu_takes_the_same_stream(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new stream each time would eventually be one that training waits for."""
    gpu = StandIn()
    monkeypatch.setitem(accelerator.KINDS, "cpu", lambda device: gpu)
    tensor = torch.ones(4)
    batch = copies_to_segment(segment, [SegmentPart(0, (tensor,), tensor.nbytes)])
    batch.run()
    batch.run(after=gpu.record_event())
    assert list(gpu._streams) == ["copies"]


@pytest.mark.parametrize("offset", [0, 1, 4093])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(40, 33),
        lambda: torch.randn(3, 5, 700),
        lambda: torch.randn(9000).bfloat16(),
        lambda: torch.randn(70, 90).t(),  # rows of the live tensor are not contiguous
        lambda: torch.tensor(3.5, dtype=torch.float64),
    ],
)
def test_copies_of_pinned_memory_are_cut_at_its_borders(
    offset: int, make: Callable[[], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses a copy whose host memory lies in two registrations; a border may lie within a number."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(1 << 16))
    large = Segment(str(path))
    gpu, live = StandIn(), make()
    plain = copies_to_segment(large, [SegmentPart(offset, (live,), live.nbytes)]).run()
    stored = bytes(large.view(torch.uint8, (live.nbytes,), offset).tolist())
    large.view(torch.uint8, (1 << 16,), 0).zero_()
    monkeypatch.setitem(accelerator.KINDS, "cpu", lambda device: gpu)
    monkeypatch.setattr(segments, "PIN_BYTES", 4096)
    large.pin(gpu)
    assert len(gpu.registered) == 16
    copy = copying._copy

    def checked(pairs: Any) -> None:
        for pair in pairs:
            for tensor in pair:
                gpu.check_copy(tensor)
        copy(pairs)

    monkeypatch.setattr(copying, "_copy", checked)
    assert copies_to_segment(large, [SegmentPart(offset, (live,), live.nbytes)]).run() == plain
    assert bytes(large.view(torch.uint8, (live.nbytes,), offset).tolist()) == stored
    back = torch.zeros_like(live)
    assert copies_from_segment(large, [SegmentPart(offset, (back,), live.nbytes)]).run() == plain
    assert torch.equal(back, live)
    large.close()
    assert gpu.registered == {}


def test_memory_that_the_driver_pins_in_part_only_is_copied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(1 << 16))
    part, gpu, live = Segment(str(path)), StandIn(pins=3), torch.randn(1 << 14)
    monkeypatch.setitem(accelerator.KINDS, "cpu", lambda device: gpu)
    monkeypatch.setattr(segments, "PIN_BYTES", 4096)
    part.pin(gpu, 5000, 60000)
    assert list(gpu.registered.values()) == [4096] * 3
    copies_to_segment(part, [SegmentPart(0, (live,), live.nbytes)]).run()
    assert torch.equal(part.view(torch.float32, (1 << 14,), 0), live)
    part.close()
    assert gpu.registered == {}


@pytest.mark.parametrize("small_bytes", [0, 1 << 10, 1 << 30])
def test_sums_on_a_device_are_those_of_any_other_way(
    small_bytes: int, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tensors()
    through_host = copies_to_segment(segment, laid_out(live)).run()
    gpu = StandIn()
    monkeypatch.setitem(accelerator.KINDS, "cpu", lambda _: gpu)
    monkeypatch.setattr(copying, "SMALL_BYTES", small_bytes)
    assert sums_on_device(laid_out(live)).run() == through_host
    back = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in live]
    sources = [part.tensors for part in laid_out(live)]
    assert copies_from_device(laid_out(back), sources).run() == through_host
    assert all(torch.equal(a, b) for a, b in zip(live, back, strict=True))
    live[3][2, 7] += 1.0
    changed = [a != b for a, b in zip(sums_on_device(laid_out(live)).run(), through_host, strict=True)]
    assert changed == [i == 3 for i in range(len(through_host))]
