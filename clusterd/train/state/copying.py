"""Copies between live tensors and segments, with a sum for each part.

The sum of a part is over its words, as wide as its rows allow (8, 4, 2 or 1 bytes), modulo 2**64. It is taken over the
live tensor on either side, so equal sums tell that everything between them was sound: copies, segment and network.

Copies are made many at a time, in one call that is outside of Python for as long as it lasts: one by one, a model's
hundreds of small tensors take longer, and several threads take longer than one, as each waits for the others between
two calls.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from clusterd.train.state.segments import Segment

BATCH_BYTES = 1 << 20
"""Summed while the cache still holds what was copied."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One part of a segment and the live tensors it is of, slot by slot; None: there is no such slot.

    Attributes:
        within: (shape of the part, where the live tensors begin in it), where the part is larger than they.
    """

    offset: int
    tensors: tuple[torch.Tensor | None, ...]
    bytes: int
    within: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class _Copy(NamedTuple):
    part: int
    target: torch.Tensor
    source: torch.Tensor
    summed: torch.Tensor
    width: int


class CopyBatch:
    """What is to be copied between live tensors and a segment."""

    def __init__(self, parts: int, copies: Sequence[_Copy], zeroed: Sequence[torch.Tensor] = ()) -> None:
        self._count, self._copies, self._zeroed = parts, copies, zeroed

    def run(self, threads: int = 1, after: Any = None) -> list[int]:
        """Copies; returns the sum of each piece.

        Args:
            after: an event on the device to begin after; None: all that is queued there.
        """
        for tensor in self._zeroed:
            tensor.zero_()
        copies = self._copies
        device = next((t.device for copy in copies for t in (copy.target, copy.source) if t.is_cuda), None)
        if device is not None:
            with _on_stream(device, after):
                _copy(copies)
                return self._totals(list(map(_word_sum, copies)))
        if threads == 1:
            return self._totals(_copy_and_sum(copies))
        share = -(-sum(copy.target.nbytes for copy in copies) // threads)
        with ThreadPoolExecutor(threads) as pool:
            return self._totals([value for some in pool.map(_copy_and_sum, _batches(copies, share)) for value in some])

    def _totals(self, sums: Sequence[torch.Tensor]) -> list[int]:
        """Over chunks modulo their words' width, over slots modulo 2**64."""
        # Under offload some of a rank's tensors are in host memory and some on its device.
        groups: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
        for i, (copy, value) in enumerate(zip(self._copies, sums, strict=True)):
            groups[copy.width, value.device].append(i)
        chunks: dict[tuple[int, int], int] = defaultdict(int)  # by piece and width
        for (width, _), indices in groups.items():
            for i, value in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
                chunks[self._copies[i].part, width] += value
        totals = [0] * self._count
        for (part, width), chunk in chunks.items():
            totals[part] = (totals[part] + chunk % (1 << 8 * width)) % (1 << 64)
        return totals


def copies_to_segment(segment: Segment, parts: Sequence[SegmentPart]) -> CopyBatch:
    """From live tensors into the segment; the sums are of the former. Missing slots are written as zeros."""
    copies: list[_Copy] = []
    zeroed: list[torch.Tensor] = []
    for number, part in enumerate(parts):
        missing = sum(t is None for t in part.tensors)
        present = sum(t.nbytes for t in part.tensors if t is not None)
        offset = part.offset
        for tensor in part.tensors:
            if tensor is None:
                size = (part.bytes - present) // missing
                zeroed.append(segment.view(torch.uint8, (size,), offset))
                offset += size
                continue
            width = _word_bytes(tensor)
            for live, stored in _chunks(tensor, segment.view(tensor.dtype, tensor.shape, offset)):
                copies.append(_Copy(number, stored, live, live, width))
            offset += tensor.nbytes
    return CopyBatch(len(parts), copies, zeroed)


def copies_from_segment(segment: Segment, parts: Sequence[SegmentPart]) -> CopyBatch:
    """From the segment into live tensors; the sums are of what they are then, or of the larger parts."""
    copies: list[_Copy] = []
    for number, part in enumerate(parts):
        offset = part.offset
        for tensor in part.tensors:
            assert tensor is not None
            if part.within is not None:
                whole = segment.view(tensor.dtype, part.within[0], offset)
                start = part.within[1]
                stop = [a + n for a, n in zip(start, tensor.shape, strict=True)]
                stored = narrow_to_box(whole, start, stop, [0] * len(start))
                copies.append(_Copy(number, tensor, stored, whole, _word_bytes(whole)))
                offset += whole.nbytes
                continue
            width = _word_bytes(tensor)
            for live, stored in _chunks(tensor, segment.view(tensor.dtype, tensor.shape, offset)):
                copies.append(_Copy(number, live, stored, live, width))
            offset += tensor.nbytes
    return CopyBatch(len(parts), copies)


def narrow_to_box(tensor: torch.Tensor, low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> torch.Tensor:
    """The box [low, high), in global coordinates, of a tensor that begins at `origin`."""
    for dim, (a, b, o) in enumerate(zip(low, high, origin, strict=True)):
        if b - a < tensor.shape[dim]:
            tensor = tensor.narrow(dim, a - o, b - a)
    return tensor


def _copy_and_sum(copies: Sequence[_Copy]) -> list[torch.Tensor]:
    sums: list[torch.Tensor] = []
    for batch in _batches(copies, BATCH_BYTES):
        _copy(batch)
        sums += map(_word_sum, batch)
    return sums


@contextmanager
def _on_stream(device: torch.device, after: Any) -> Iterator[None]:
    """On a side stream, waited for at the end, whatever happens: what is copied may be unpinned then.

    Sums are read there too: on the main stream, that would be behind the next step.
    """
    stream = _side_stream(device)
    if after is not None:
        stream.wait_event(after)
    else:
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream), torch.no_grad():
            yield
    finally:
        stream.synchronize()


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """One for all copies: torch has 32 in turn, so that a new one may be another's, and keeps memory for each apart."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _copy(copies: Sequence[_Copy]) -> None:
    targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _batches(copies: Sequence[_Copy], size_bytes: int) -> Iterator[Sequence[_Copy]]:
    start = total = 0
    for i, copy in enumerate(copies):
        total += copy.target.nbytes
        if total >= size_bytes:
            yield copies[start : i + 1]
            start, total = i + 1, 0
    if start < len(copies):
        yield copies[start:]


def _chunks(live: torch.Tensor, stored: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if live.nbytes <= 2 * BATCH_BYTES or live.dim() == 0 or live.is_cuda:
        yield live, stored
        return
    rows = max(1, BATCH_BYTES * live.shape[0] // live.nbytes)
    yield from zip(live.split(rows), stored.split(rows), strict=True)


def _word_bytes(tensor: torch.Tensor) -> int:
    return _width((tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size())


@functools.cache
def _width(row_bytes: int) -> int:
    """Of the words that a tensor with such rows is summed in."""
    return next(width for width in _WORDS if row_bytes % width == 0)


def _word_sum(copy: _Copy) -> torch.Tensor:
    """The sum over the words of what is summed, as a scalar where that is; wraps around at their width."""
    tensor, words = copy.summed, _WORDS[copy.width]
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    try:
        return tensor.view(words).sum(dtype=words)
    except RuntimeError:  # where it lies does not allow wider words; the sum must not depend on that
        return tensor.clone(memory_format=torch.contiguous_format).view(words).sum(dtype=words)
