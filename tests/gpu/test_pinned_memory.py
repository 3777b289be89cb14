"""Segments in shared memory, pinned for copies to and from GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from clusterd.train.process import accelerator
from clusterd.train.state.copying import SegmentPart, copies_from_segment, copies_to_segment
from clusterd.train.state.segments import Segment


def gpu() -> Any:
    return accelerator.of(torch.device("cuda", 0))


pytestmark = pytest.mark.gpu


@pytest.fixture
def segment(up_to_cuda: Callable[[str], None]) -> Iterator[Segment]:
    """In shared memory, as an agent's: a driver may refuse to pin a file on disk."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="clusterd-test-") as file:
        file.write(bytes(1 << 16))
        file.flush()
        made = Segment(file.name)
        up_to_cuda("a segment in shared memory is mapped")
        yield made
        made.close()


def test_what_goes_through_pinned_memory_comes_back_with_the_same_sum(segment: Segment) -> None:
    segment.pin(gpu())
    assert segment.view(torch.uint8, (1 << 16,), 0).is_pinned()
    there = [torch.randn(64, 33, device="cuda"), torch.randn(7, device="cuda").bfloat16()]
    back = [torch.empty_like(tensor) for tensor in there]
    offsets = [0, there[0].nbytes]

    def pieces(tensors: list[torch.Tensor]) -> list[SegmentPart]:
        return [SegmentPart(offset, (tensor,), tensor.nbytes) for offset, tensor in zip(offsets, tensors, strict=True)]

    assert copies_to_segment(segment, pieces(there)).run() == copies_from_segment(segment, pieces(back)).run()
    assert all(torch.equal(a, b) for a, b in zip(there, back, strict=True))


def test_memory_that_cannot_be_pinned_disturbs_no_kernel(segment: Segment) -> None:
    segment.pin(gpu())
    segment.pin(gpu())  # pinning twice is refused
    assert torch.ones(4, device="cuda").sum().item() == 4
