"""Segments of shared memory as tensors, and copies between them and live tensors, with a sum for each part.

The sum of a part is over its words, as wide as its rows allow (8, 4, 2 or 1 bytes), modulo 2**64. It is taken over the
live tensor on either side, so equal sums tell that everything between them was sound: copies, segment and network.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

CHUNK_BYTES = 1 << 20
"""A piece is summed while the cache still holds what was copied."""
TOUCH_BYTES = 64 << 20
PAGE_BYTES = mmap.PAGESIZE

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Segment:
    """A file of the agent's, mapped."""

    def __init__(self, path: str, *, size_bytes: int = 0) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            self.size_bytes, self._inode = size_bytes or found.st_size, found.st_ino
            self._map = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        self._registered = 0
        self._touched = 0

    def view(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """`shape` elements from `offset` on, which need not be aligned."""
        count = torch.Size(shape).numel()
        flat: torch.Tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def touch(self, most_bytes: int | None = None) -> None:
        """Makes this process's page table ready for writing, at the front if not of all; the pages are there.

        In pieces, without the GIL. Pages that were touched count as this process's memory.
        """
        stop = self.size_bytes if most_bytes is None else min(most_bytes, self.size_bytes)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        for start in range(self._touched, stop, TOUCH_BYTES):
            whole[start : min(start + TOUCH_BYTES, stop) : PAGE_BYTES].zero_()
        self._touched = max(self._touched, stop)

    def touch_rest(self) -> None:
        """The same for what is left, before it is written; faster, but with the GIL."""
        for low in range(self._touched // PAGE_BYTES * PAGE_BYTES, self.size_bytes, TOUCH_BYTES):
            with contextlib.suppress(OSError):  # older kernels do it as it is written
                self._map.madvise(_MADV_POPULATE_WRITE, low, min(TOUCH_BYTES, self.size_bytes - low))
        self._touched = self.size_bytes

    def map_in(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Makes this process's page table ready for reading these (offset, length); older kernels do it as they read.

        Through a new mapping the first read of a byte costs three times the copy (measured, 4 KiB pages).
        """
        for start, stop in _pages(ranges, self.size_bytes):
            for low in range(start, stop, TOUCH_BYTES):  # in pieces: each keeps the GIL
                with contextlib.suppress(OSError):
                    self._map.madvise(_MADV_POPULATE_READ, low, min(TOUCH_BYTES, stop - low))

    def is_at(self, path: str) -> bool:
        """Whether this is what lies at `path` now."""
        try:
            return os.stat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def pin(self, start: int = 0, stop: int | None = None) -> None:
        """Lets a GPU copy here at full speed; where the driver refuses, copies are slower and nothing else."""
        start = start // PAGE_BYTES * PAGE_BYTES
        length = (self.size_bytes if stop is None else stop) - start
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() + start
        if int(torch.cuda.cudart().cudaHostRegister(address, length, 0)) == 0:
            self._registered = address
            return
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA tells a refusal once more, to the next kernel: not to one that matters

    def close(self) -> None:
        """Lets go of the memory, as soon as no tensor looks at it."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0
        try:
            self._map.close()
        except BufferError:
            return  # a view is alive; the mapping ends with it


def room_bytes(share: float) -> int:
    """How much may still come into this process's memory before it is `share` of its own peak so far."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    peak_kb, now_kb = (int(status[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return max(0, int(share * peak_kb) - now_kb) << 10


def give_back() -> None:
    """Returns to the system what was freed and the C library keeps, so that it can be somebody's segment."""
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a segment and the live tensors it is of, slot by slot; None: there is no such slot.

    Attributes:
        within: (shape of the part, where the live tensors begin in it), where the part is larger than they.
    """

    offset: int
    tensors: tuple[torch.Tensor | None, ...]
    bytes: int
    within: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def fill(segment: Segment, pieces: Sequence[Piece], *, threads: int = 1) -> list[int]:
    """Copies live tensors into the segment; returns the sums. Missing slots are written as zeros."""
    return _each(segment, pieces, _fill_piece, threads)


def load(segment: Segment, pieces: Sequence[Piece], *, threads: int = 1) -> list[int]:
    """Copies the segment into live tensors; returns the sums of what they are now, or of the larger parts."""
    return _each(segment, pieces, _load_piece, threads)


def narrowed(tensor: torch.Tensor, low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> torch.Tensor:
    """The box [low, high), in global coordinates, of a tensor that begins at `origin`."""
    for dim, (a, b, o) in enumerate(zip(low, high, origin, strict=True)):
        tensor = tensor.narrow(dim, a - o, b - a)
    return tensor


def word_sum(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The sum over the words of `tensor`, as a scalar where the tensor is; wraps around at their width."""
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    try:
        words = tensor.view(_WORDS[width])
    except RuntimeError:  # where it lies does not allow wider words; the sum must not depend on that
        words = tensor.clone(memory_format=torch.contiguous_format).view(_WORDS[width])
    return words.sum(dtype=_WORDS[width])


def word_bytes(tensor: torch.Tensor) -> int:
    """Width of the words that a tensor of this shape and dtype is summed in."""
    row = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    return next(width for width in _WORDS if row % width == 0)


def _each(segment: Segment, pieces: Sequence[Piece], copy: Any, threads: int) -> list[int]:
    if any(t is not None and t.is_cuda for piece in pieces for t in piece.tensors):
        return _on_stream(segment, pieces, copy)
    if threads == 1 or len(pieces) < 2:
        return [_total(copy(segment, piece)) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        # torch copies and sums without the GIL.
        return list(pool.map(lambda piece: _total(copy(segment, piece)), pieces))


def _on_stream(segment: Segment, pieces: Sequence[Piece], copy: Any) -> list[int]:
    """On a side stream, all copies at once and one wait at the end."""
    device = next(t.device for piece in pieces for t in piece.tensors if t is not None and t.is_cuda)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        sums = [copy(segment, piece) for piece in pieces]
    torch.cuda.current_stream(device).wait_stream(stream)
    stream.synchronize()
    return [_total(parts) for parts in sums]


def _fill_piece(segment: Segment, piece: Piece) -> list[tuple[torch.Tensor, int]]:
    sums = []
    missing = sum(t is None for t in piece.tensors)
    there = sum(t.nbytes for t in piece.tensors if t is not None)
    offset = piece.offset
    for tensor in piece.tensors:
        if tensor is None:
            size = (piece.bytes - there) // missing
            segment.view(torch.uint8, (size,), offset).zero_()
            offset += size
            continue
        target = segment.view(tensor.dtype, tensor.shape, offset)
        width = word_bytes(tensor)
        for a, b in _chunks(tensor, target):
            b.copy_(a, non_blocking=True)
            sums.append((word_sum(a, width), width))
        offset += tensor.nbytes
    return sums


def _load_piece(segment: Segment, piece: Piece) -> list[tuple[torch.Tensor, int]]:
    sums = []
    offset = piece.offset
    for tensor in piece.tensors:
        assert tensor is not None
        if piece.within is not None:
            whole = segment.view(tensor.dtype, piece.within[0], offset)
            start = piece.within[1]
            stop = [a + n for a, n in zip(start, tensor.shape, strict=True)]
            tensor.copy_(narrowed(whole, start, stop, [0] * len(start)))
            width = word_bytes(whole)
            sums.append((word_sum(whole, width), width))
            offset += whole.nbytes
            continue
        source = segment.view(tensor.dtype, tensor.shape, offset)
        width = word_bytes(tensor)
        for a, b in _chunks(tensor, source):
            a.copy_(b, non_blocking=True)
            sums.append((word_sum(a, width), width))
        offset += tensor.nbytes
    return sums


def _pages(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Whole pages that cover the ranges, each once, in order."""
    start = stop = 0
    for offset, length in sorted(ranges):
        low, high = offset // PAGE_BYTES * PAGE_BYTES, min(-(-(offset + length) // PAGE_BYTES) * PAGE_BYTES, size)
        if low > stop:
            if stop > start:
                yield start, stop
            start = low
        stop = max(stop, high)
    if stop > start:
        yield start, stop


def _chunks(live: torch.Tensor, stored: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if live.nbytes <= 2 * CHUNK_BYTES or live.dim() == 0 or live.is_cuda:
        yield live, stored
        return
    if live.dim() == 1:
        rows = CHUNK_BYTES // live.element_size()
    else:
        rows = max(1, CHUNK_BYTES * live.shape[0] // live.nbytes)
    for start in range(0, live.shape[0], rows):
        yield live[start : start + rows], stored[start : start + rows]


def _total(sums: list[tuple[torch.Tensor, int]]) -> int:
    """Over chunks, each modulo its words' width; over slots, modulo 2**64."""
    by_width: dict[int, int] = {}
    for value, width in sums:
        by_width[width] = by_width.get(width, 0) + int(value)
    return sum(total % (1 << 8 * width) for width, total in by_width.items()) % (1 << 64)
