"""Copies between live tensors and segments, with a checksum of each part.

The checksum of a part is the sum of its words, as wide as its rows allow (8, 4, 2 or 1 bytes), modulo 2**64. Both sides
compute it over the live tensor, so equal sums verify copies, segment and network.

Copies run in batches, in one call that releases the GIL: one by one, a model's hundreds of small tensors take longer,
and several threads take longer than one, as they contend for the GIL between calls.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from clusterd.train.process import accelerator
from clusterd.train.state.segments import Segment

SMALL_BYTES = 256 << 10
"""A tensor up to this size is summed with others in one kernel: to launch one takes longer."""

BATCH_BYTES = 1 << 20
"""Batch size: checksums are computed while the cache still holds the copied data."""

_WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One part of a segment and its live tensors, slot by slot; None: the slot is missing.

    Attributes:
        within: (shape of the part, offset of the live tensors in it), if the part is larger than they are.
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


_Sums = tuple[Sequence[int], torch.Tensor]
"""Numbers of copies, and their word sums."""


class CopyBatch:
    """Copies between live tensors and a segment, or device memory.

    Args:
        queued: target and source of the copies that a device is given, where one takes part.
    """

    def __init__(
        self,
        parts: int,
        copies: Sequence[_Copy],
        queued: Iterable[tuple[torch.Tensor, torch.Tensor]],
        zeroed: Sequence[torch.Tensor] = (),
    ) -> None:
        self._count, self._copies, self._zeroed = parts, copies, zeroed
        devices = (t.device for copy in copies for t in (copy.target, copy.source))
        self._gpu = next((gpu for device in devices if (gpu := accelerator.of(device)) is not None), None)
        self._queued = list(queued) if self._gpu is not None else []

    def run(self, threads: int = 1, after: Any = None) -> list[int]:
        """Run the copies and return the checksum of each part.

        Args:
            after: device event to wait for; None: everything that is queued on the device.
        """
        for tensor in self._zeroed:
            tensor.zero_()
        copies = self._copies
        if self._gpu is not None:
            with _on_stream(self._gpu, after):
                if self._queued:
                    _copy(self._queued)
                return self._totals(_sums_on_device(copies))
        if threads == 1:
            return self._totals(_stacked(copies, range(len(copies)), _copy_and_sum(copies)))
        share = -(-sum(copy.target.nbytes for copy in copies) // threads)
        with ThreadPoolExecutor(threads) as pool:
            sums = [value for some in pool.map(_copy_and_sum, _batches(copies, share)) for value in some]
        return self._totals(_stacked(copies, range(len(copies)), sums))

    def _totals(self, sums: Iterable[_Sums]) -> list[int]:
        """Sum over chunks modulo the word width, and over slots modulo 2**64."""
        chunks: dict[tuple[int, int], int] = defaultdict(int)  # by part and width
        for numbers, values in sums:
            for i, value in zip(numbers, values.tolist(), strict=True):
                chunks[self._copies[i].part, self._copies[i].width] += value
        totals = [0] * self._count
        for (part, width), chunk in chunks.items():
            totals[part] = (totals[part] + chunk % (1 << 8 * width)) % (1 << 64)
        return totals


def copies_to_segment(segment: Segment, parts: Sequence[SegmentPart]) -> CopyBatch:
    """Copies from live tensors into the segment, with checksums of the tensors; missing slots are written as zeros."""
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
    return CopyBatch(len(parts), copies, _cut_at_borders(copies, segment), zeroed)


def copies_from_segment(segment: Segment, parts: Sequence[SegmentPart]) -> CopyBatch:
    """Copies from the segment into live tensors, with checksums of the result or of the larger parts."""
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
    return CopyBatch(len(parts), copies, _cut_at_borders(copies, segment))


def copies_from_device(parts: Sequence[SegmentPart], sources: Sequence[Sequence[torch.Tensor]]) -> CopyBatch:
    """Copies into live tensors on a device from others on it, with checksums of the result.

    Args:
        sources: tensors of each part, slot by slot.
    """
    copies = [
        _Copy(number, live, source, live, _word_bytes(live))
        for number, (part, slots) in enumerate(zip(parts, sources, strict=True))
        for live, source in zip(part.tensors, slots, strict=True)
        if live is not None
    ]
    return CopyBatch(len(parts), copies, [(copy.target, copy.source) for copy in copies])


def sums_on_device(parts: Sequence[SegmentPart]) -> CopyBatch:
    """Checksums of live tensors on a device, which others copy."""
    copies = [
        _Copy(number, live, live, live, _word_bytes(live))
        for number, part in enumerate(parts)
        for live in part.tensors
        if live is not None
    ]
    return CopyBatch(len(parts), copies, ())


def narrow_to_box(tensor: torch.Tensor, low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> torch.Tensor:
    """The box [low, high), in global coordinates, of a tensor that begins at `origin`."""
    for dim, (a, b, o) in enumerate(zip(low, high, origin, strict=True)):
        if b - a < tensor.shape[dim]:
            tensor = tensor.narrow(dim, a - o, b - a)
    return tensor


def _copy_and_sum(copies: Sequence[_Copy]) -> list[torch.Tensor]:
    sums: list[torch.Tensor] = []
    for batch in _batches(copies, BATCH_BYTES):
        _copy([(copy.target, copy.source) for copy in batch])
        sums += map(_word_sum, batch)
    return sums


@contextmanager
def _on_stream(gpu: Any, after: Any) -> Iterator[None]:
    """Run on a side stream and always wait for it at the end: copied memory may be unpinned afterwards.

    Checksums are read there too: on the main stream they would queue behind the next step.
    """
    stream = gpu.side_stream("copies")
    if after is not None:
        stream.wait_event(after)
    else:
        stream.wait_stream(gpu.current_stream())
    try:
        with gpu.on_stream(stream), torch.no_grad():
            yield
    finally:
        stream.synchronize()


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)


def _cut_at_borders(copies: Sequence[_Copy], segment: Segment) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Target and source of each copy, cut where one registration of pinned memory ends and the next begins."""
    borders = segment.borders
    first = segment.address
    for copy in copies:
        into = first <= copy.target.data_ptr() < first + segment.size_bytes
        stored, live = (copy.target, copy.source) if into else (copy.source, copy.target)
        for stored_part, live_part in _cut(stored, live, borders):
            yield (stored_part, live_part) if into else (live_part, stored_part)


def _cut(
    stored: torch.Tensor, live: torch.Tensor, borders: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of `stored` without a border inside, each with its part of `live`, which has the same shape.

    Torch copies a tensor whose rows are not contiguous through a buffer of its own; such a one needs no cut.
    """
    start = stored.data_ptr()
    index = bisect.bisect_right(borders, start)
    if not stored.is_contiguous() or index == len(borders) or borders[index] >= start + stored.nbytes:
        yield stored, live
        return
    if stored.dim() == 0:  # the border lies within a number
        yield from _cut(stored.reshape(1).view(torch.uint8), live.reshape(1).view(torch.uint8), borders)
        return
    row_bytes = stored.nbytes // stored.shape[0]
    whole, cut = divmod(borders[index] - start, row_bytes)
    if whole:
        yield stored[:whole], live[:whole]
    if cut:
        yield from _cut(stored[whole], live[whole], borders)
        whole += 1
    if whole < stored.shape[0]:
        yield from _cut(stored[whole:], live[whole:], borders)


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
    if live.nbytes <= 2 * BATCH_BYTES or live.dim() == 0 or accelerator.of(live.device) is not None:
        yield live, stored
        return
    rows = max(1, BATCH_BYTES * live.shape[0] // live.nbytes)
    yield from zip(live.split(rows), stored.split(rows), strict=True)


def _word_bytes(tensor: torch.Tensor) -> int:
    return _width((tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size())


@functools.cache
def _width(row_bytes: int) -> int:
    """Width of the words that a tensor with such rows is summed in."""
    return next(width for width in _WORD_DTYPES if row_bytes % width == 0)


def _sums_on_device(copies: Sequence[_Copy]) -> Iterator[_Sums]:
    """Word sums; those of small tensors as differences of one running sum, which wraps around as they do."""
    small: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    large: list[int] = []
    for i, copy in enumerate(copies):
        if copy.summed.nbytes <= SMALL_BYTES and accelerator.of(copy.summed.device) is not None:
            small[copy.width, copy.summed.device].append(i)
        else:
            large.append(i)
    sums = [_word_sum(copies[i]) for i in large]
    for (width, device), numbers in small.items():
        words = [_words(copies[i].summed, _WORD_DTYPES[width]).flatten() for i in numbers]
        ends = torch.tensor(list(itertools.accumulate(map(len, words)))).sub_(1).to(device)
        running = torch.cat(words).cumsum(0, dtype=torch.int64)[ends]
        yield numbers, running.diff(prepend=running.new_zeros(1))
    yield from _stacked(copies, large, sums)


def _stacked(copies: Sequence[_Copy], numbers: Sequence[int], sums: Sequence[torch.Tensor]) -> Iterator[_Sums]:
    """Sums of these copies, those of one width and device together."""
    # Under offload some of a rank's tensors are in host memory and some on its device.
    groups: dict[tuple[int, torch.device], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for i, value in zip(numbers, sums, strict=True):
        groups[copies[i].width, value.device].append((i, value))
    for group in groups.values():
        yield [i for i, _ in group], torch.stack([value for _, value in group])


def _word_sum(copy: _Copy) -> torch.Tensor:
    """Sum over the words of a tensor, as a scalar on its device; wraps around at the word width."""
    dtype = _WORD_DTYPES[copy.width]
    return _words(copy.summed, dtype).sum(dtype=dtype)


def _words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    try:
        return tensor.view(dtype)
    except RuntimeError:  # misaligned for wide words; the sum must not depend on alignment
        return tensor.clone(memory_format=torch.contiguous_format).view(dtype)
