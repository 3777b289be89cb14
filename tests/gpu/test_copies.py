"""Copies between GPUs and shared memory: speed, order against kernels, and what other threads notice of them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from figures import Figures

from clusterd.train.migration.device_memory import OpenedMemory
from clusterd.train.state import segments
from clusterd.train.state.copying import SegmentPart, copies_from_device, copies_from_segment, copies_to_segment
from clusterd.train.state.segments import Segment

pytestmark = [pytest.mark.gpu, pytest.mark.own_process, pytest.mark.time_limit(60)]

Gpu = Callable[[], Any]

LAUNCHES = 2000
RACES = 20
SLEEP_CYCLES = 20_000_000
"""Ten milliseconds and more, so that a copy which does not wait for a kernel overtakes it."""


OWNER = """
import json, sys, time
sys.path[:0] = {path}
import torch
from stand_in import use_stand_in
from test_copies import parts, state
from clusterd.train.migration.device_memory import describe
from clusterd.train.process import accelerator
from clusterd.train.state.copying import sums_on_device
device = torch.device("cpu") if {stand_in} else accelerator.select(0)
gpu = use_stand_in() if {stand_in} else accelerator.of(device)
own = parts(state(device))
sums = sums_on_device(own).run()
began_s = time.perf_counter()
description = describe(gpu, own)
print(json.dumps([description.hex(), time.perf_counter() - began_s, sums]), flush=True)
sys.stdin.read()
"""
"""A process that has state on the device, and describes it."""


def state(device: torch.device) -> list[torch.Tensor]:
    """Parameters and optimizer state of a GPT of 300M parameters, or of a small one on a CPU."""
    width, depth = (1024, 24) if device.type == "cuda" else (16, 2)
    shapes = [(4 * width, width), (width, 4 * width), (3 * width, width), (width, width), *[(width,)] * 8]
    return [torch.randn(shape, device=device) for shape in shapes * depth for _ in range(3)]


@pytest.fixture
def size_bytes() -> int:
    return 1 << 30 if torch.cuda.device_count() else 1 << 22


@pytest.fixture
def segment(size_bytes: int) -> Iterator[Segment]:
    """In shared memory, as an agent's: a driver may refuse to pin a file on disk."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="clusterd-test-") as file:
        file.truncate(size_bytes)
        made = Segment(file.name)
        made.populate_for_writing()
        yield made
        made.close()


def test_what_goes_through_pinned_memory_comes_back_with_the_same_sum(gpu: Gpu, segment: Segment, kind: str) -> None:
    accelerator = gpu()
    segment.pin(accelerator)
    assert segment.view(torch.uint8, (1 << 16,), 0).is_pinned() or kind == "cpu"
    there = [torch.randn(64, 33, device=kind), torch.randn(7, device=kind).bfloat16()]
    back = [torch.empty_like(tensor) for tensor in there]
    assert copies_to_segment(segment, parts(there)).run() == copies_from_segment(segment, parts(back)).run()
    assert all(torch.equal(a, b) for a, b in zip(there, back, strict=True))
    assert (
        copies_to_segment(segment, parts([t.cpu() for t in there])).run()
        == copies_to_segment(segment, parts(there)).run()
    ), "a rank on a CPU and one on a GPU have other checksums for equal tensors"


def test_state_is_copied_out_of_the_memory_of_another_process(gpu: Gpu, kind: str, figures: Figures) -> None:
    """Also after that was killed: a target rank may still copy when its source rank dies."""
    owner_code = OWNER.format(path=sys.path, stand_in=kind == "cpu")
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        accelerator = gpu()
        assert owner.stdout is not None
        description, describe_s, sums = json.loads(owner.stdout.readline())
        opened = OpenedMemory(accelerator)
        began_s = time.perf_counter()
        there = opened.tensors(bytes.fromhex(description))
        open_s = time.perf_counter() - began_s
        here = [torch.empty(tensor.shape, device=kind) for (tensor,) in there]
        copies = copies_from_device(parts(here), there)
        assert copies.run() == sums
        began_s = time.perf_counter()
        copies.run()
        copy_s = time.perf_counter() - began_s
        if kind == "cuda":
            owner.kill()
            owner.wait()
            for tensor in here:
                tensor.zero_()
            assert copies.run() == sums, "the memory has gone with its owner"
        opened.close()
    finally:
        owner.kill()
        owner.communicate()
    figures.record("state of a GPT of 300M parameters in another process: described", describe_s * 1e3, "ms")
    figures.record("state of a GPT of 300M parameters in another process: opened", open_s * 1e3, "ms")
    figures.record("state of a GPT of 300M parameters in another process: copied and summed", copy_s * 1e3, "ms")


def test_memory_that_cannot_be_pinned_disturbs_no_kernel(gpu: Gpu, segment: Segment, kind: str) -> None:
    accelerator = gpu()
    segment.pin(accelerator)
    if kind == "cuda":
        segment.pin(accelerator)  # pinning twice is refused
    assert torch.ones(4, device=kind).sum().item() == 4
    torch.full((4,), 2, device=kind).add_(1)
    accelerator.synchronize()


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_copies_leave_the_threads_that_launch_kernels_alone(
    pinned: bool, gpu: Gpu, segment: Segment, kind: str, figures: Figures
) -> None:
    """The largest launch is a figure and no limit: a busy machine delays one by itself."""
    accelerator = gpu()
    memory = "pinned" if pinned else "pageable"
    launches = Launches(accelerator, kind)
    launches.record(figures, "launch with nothing beside it")
    if pinned:
        seconds = launches.beside(lambda: segment.pin(accelerator))
        figures.record("pinning of shared memory", segment.size_bytes / seconds / 1e9, "GB/s")
        launches.record(figures, f"launch while {segments.PIN_BYTES >> 20} MiB at a time are pinned")
    live = torch.randint(1 << 30, (segment.size_bytes // 8,), device=kind)
    for direction, copies in (("to", copies_to_segment), ("from", copies_from_segment)):
        batch = copies(segment, parts([live]))
        batch.run()
        seconds = launches.beside(batch.run)
        figures.record(f"copy {direction} {memory} memory", segment.size_bytes / seconds / 1e9, "GB/s")
        launches.record(figures, f"launch during a copy {direction} {memory} memory")
    assert torch.equal(segment.view(live.dtype, live.shape, 0), live.cpu())


def test_a_copy_waits_for_kernels_before_it_and_kernels_after_it_wait_for_the_copy(
    gpu: Gpu, segment: Segment, kind: str
) -> None:
    """Kernels that last long enough for a copy in the wrong order to see other values."""
    accelerator = gpu()
    segment.pin(accelerator)
    live = torch.zeros(segment.size_bytes // 16, dtype=torch.int64, device=kind)
    stored = segment.view(live.dtype, live.shape, 0)
    to_segment, from_segment = copies_to_segment(segment, parts([live])), copies_from_segment(segment, parts([live]))
    for number in range(1, RACES + 1):
        sleep(kind)
        live.fill_(number)  # queued behind the sleep, so not done when the copy is queued
        to_segment.run()
        live.fill_(-1)  # the copy must have read by now
        assert (int(stored.min()), int(stored.max())) == (number, number)
        stored.fill_(2 * number)
        sleep(kind)
        live.fill_(-2)  # must not run after the copy
        from_segment.run()
        read = live + 1  # the copy must have written by now
        accelerator.synchronize()
        assert (int(read.min()), int(read.max())) == (2 * number + 1, 2 * number + 1)


def test_a_state_snapshot_copies_beside_a_step_and_before_its_update(gpu: Gpu, segment: Segment, kind: str) -> None:
    """A thread copies as of an event, while this one queues a forward pass, and waits before it changes parameters."""
    accelerator = gpu()
    segment.pin(accelerator)
    live = torch.zeros(segment.size_bytes // 16, dtype=torch.int64, device=kind)
    stored = segment.view(live.dtype, live.shape, 0)
    batch = copies_to_segment(segment, parts([live]))
    for number in range(1, RACES + 1):
        live.fill_(number)
        copier = threading.Thread(target=batch.run, kwargs={"after": accelerator.record_event()})
        copier.start()
        sleep(kind)
        read = live * 2
        copier.join()
        live.fill_(-1)
        assert (int(stored.min()), int(stored.max())) == (number, number)
        assert int(read[0]) == 2 * number


def parts(tensors: list[torch.Tensor]) -> list[SegmentPart]:
    offset, made = 0, []
    for tensor in tensors:
        made.append(SegmentPart(offset, (tensor,), tensor.nbytes))
        offset += tensor.nbytes
    return made


def sleep(kind: str) -> None:
    if kind == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


class Launches:
    """Times of launching a small kernel from this thread, in microseconds."""

    def __init__(self, accelerator: Any, kind: str) -> None:
        self._accelerator, self._value = accelerator, torch.zeros(16, device=kind)
        self._times_us: list[float] = []

    def record(self, figures: Figures, name: str) -> None:
        """Record the times since the last record, or of some launches."""
        if not self._times_us:
            self._launch(LAUNCHES)
        ordered = sorted(self._times_us)
        figures.record(f"{name}: median", statistics.median(ordered), "us")
        figures.record(f"{name}: one in a hundred", ordered[len(ordered) * 99 // 100], "us")
        figures.record(f"{name}: longest", ordered[-1], "us")
        self._times_us = []

    def beside(self, work: Callable[[], object]) -> float:
        """Launch while another thread works; return its seconds."""
        spans: list[float] = []

        def timed() -> None:
            began_s = time.perf_counter()
            work()
            spans.append(time.perf_counter() - began_s)

        worker = threading.Thread(target=timed)
        worker.start()
        self._launch(10)
        while worker.is_alive():
            self._launch(10)
        worker.join()
        [seconds] = spans  # missing if the work raised, which pytest reports as well
        return seconds

    def _launch(self, count: int) -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            self._value.add_(1)
            self._times_us.append((time.perf_counter() - began_s) * 1e6)
        # A full queue would make launches wait for the device. Not `synchronize`, which waits for the copies as well.
        self._accelerator.record_event().synchronize()
