"""Segments of shared memory as tensors, with page tables populated in advance for speed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from clusterd.page_tables import POPULATE_READ, POPULATE_WRITE, populate

TOUCH_BYTES = 64 << 20
PIN_BYTES = 256 << 20
"""Size of one registration: the driver holds a lock for as long as it takes, in which no kernel starts."""

PAGE_BYTES = mmap.PAGESIZE


class Segment:
    """Memory map of a file that the agent created."""

    def __init__(self, path: str, *, size_bytes: int = 0) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            self.size_bytes, self._inode = size_bytes or found.st_size, found.st_ino
            self._map = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        self._pinned: dict[int, tuple[int, Any]] = {}  # size and accelerator by address of each registered chunk
        self._populated = 0

    def view(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """Tensor of `shape` at byte `offset`, which need not be aligned."""
        count = torch.Size(shape).numel()
        flat: torch.Tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def populate_for_writing(self, most_bytes: int | None = None) -> None:
        """Populate this process's page table for writing, for the first `most_bytes` or all; the pages exist already.

        Populated pages count as this process's memory.
        """
        start = self._populated // PAGE_BYTES * PAGE_BYTES
        stop = self.size_bytes if most_bytes is None else min(most_bytes, self.size_bytes)
        if not populate(self._map, [(start, stop)], POPULATE_WRITE):  # an older kernel: touch each page
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            for low in range(start, stop, TOUCH_BYTES):
                whole[low : min(low + TOUCH_BYTES, stop) : PAGE_BYTES].zero_()
        self._populated = max(self._populated, stop)

    def populate_for_reading(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Populate this process's page table for reading these (offset, length); older kernels do so on access.

        Through a new mapping the first read of a byte costs three times the copy (measured, 4 KiB pages).
        """
        populate(self._map, _pages(ranges, self.size_bytes), POPULATE_READ)

    def is_at(self, path: str) -> bool:
        """True if the file at `path` is still the mapped one."""
        try:
            return os.stat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def pin(self, gpu: Any, start: int = 0, stop: int | None = None) -> None:
        """Pin the memory so that a GPU copies at full speed; if the driver refuses, copies are just slower.

        In chunks, each of which is a registration of its own; no copy may cross a border of two (`borders`).
        """
        start = start // PAGE_BYTES * PAGE_BYTES
        stop = self.size_bytes if stop is None else stop
        for low in range(start, stop, PIN_BYTES):
            size_bytes = min(PIN_BYTES, stop - low)
            if not gpu.register(self.address + low, size_bytes):
                return
            self._pinned[self.address + low] = size_bytes, gpu

    @property
    def address(self) -> int:
        """Address at which the memory is mapped."""
        return int(torch.frombuffer(self._map, dtype=torch.uint8).data_ptr())

    @property
    def borders(self) -> tuple[int, ...]:
        """Addresses at which a pinned chunk begins or ends, in order."""
        return tuple(
            sorted({edge for low, (size_bytes, _) in self._pinned.items() for edge in (low, low + size_bytes)})
        )

    def close(self) -> None:
        """Unpin and unmap the memory; views do not keep it alive, and using one afterwards crashes the process."""
        for address, (_, gpu) in self._pinned.items():
            gpu.unregister(address)
        self._pinned.clear()
        self._map.close()


def memory_headroom_bytes(share: float) -> int:
    """Bytes by which this process's memory may grow before it reaches `share` of its own peak."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    peak_kb, now_kb = (int(status[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return max(0, int(share * peak_kb) - now_kb) << 10


def trim_heap() -> None:
    """Return freed memory that the C library caches to the system, so that segments can use it."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


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
