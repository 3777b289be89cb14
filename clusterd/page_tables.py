"""Population of page tables for shared memory, so that its first use costs no page faults."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

POPULATE_READ, POPULATE_WRITE = 22, 23
"""Advice to the kernel, from Linux 5.14 on."""
_HUGEPAGE = 14

CHUNK_BYTES = 16 << 20
"""One call keeps other threads from mapping memory, as an allocation on a GPU does, for as long as it takes."""

THREADS_MAX = 4


def threads() -> int:
    """Threads that populate: a quarter of this process's cores, since training goes on beside."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), THREADS_MAX)


def populate(mapped: mmap.mmap, ranges: Iterable[tuple[int, int]], advice: int) -> bool:
    """Populate ranges [start, stop) of a mapping, each from the start of a page on; false: the kernel refused one.

    Missing pages are made, as huge ones where the file system offers them. The GIL is free meanwhile.
    """
    libc = ctypes.CDLL(None)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), _HUGEPAGE)
    chunks = [(low, min(CHUNK_BYTES, stop - low)) for start, stop in ranges for low in range(start, stop, CHUNK_BYTES)]

    def is_populated(chunk: tuple[int, int]) -> bool:
        refused: int = libc.madvise(ctypes.c_void_p(address + chunk[0]), ctypes.c_size_t(chunk[1]), advice)
        return not refused

    count = min(threads(), len(chunks))
    if count < 2:
        return all(map(is_populated, chunks))
    with ThreadPoolExecutor(count) as pool:
        return all(pool.map(is_populated, chunks))
