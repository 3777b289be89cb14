"""The tensor store: files in shared memory that ranks map; the agent owns them and they outlive the ranks.

The first write into fresh shared memory costs a page fault per 4 KiB, many times a warm write, and so does the first
access of each process through a new mapping (three times a warm copy, measured). Segments are therefore faulted in and
mapped when they are made, while the old plan still trains; they stay mapped, and dropped ones are pooled for the next
migration. A segment that is still being written, as at an abort, is not pooled: the bytes would land in its successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import read_json
from clusterd.page_tables import POPULATE_WRITE, populate, threads
from clusterd.trusted_paths import UnsafePath, private_directory

SPARE_SHARE = 0.1
"""Part of a segment's size that must stay free beside it, for other users of shared memory."""

OTHERS_BYTES_MAX = 1 << 30
OTHERS_SHARE = 0.1
"""Part of all shared memory that stays free: NCCL and data loaders need some, and fail without it."""

SHARED_BYTES_MIN = 1 << 30
"""Shared memory below this, as of a container's 64 MB, is left to NCCL and data loaders."""

OWNER = "owner"
"""File of a store in memory that names its agent's directory, and is locked while that agent lives."""

POOL_BYTES_MAX = 4 << 30
"""Limit of the pool of dropped segments."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


SNAPSHOT_NAME = re.compile(r"(.+\.g\d+)\.snap(\d+)\.\d$")
"""Name of the segment of a state snapshot: job, attempt and generation; the rank; the one of two that take turns."""


def set_of(name: str) -> str | None:
    """Name under which all snapshots of one generation are admitted and dropped; None if it is no snapshot."""
    found = SNAPSHOT_NAME.fullmatch(name)
    return f"{found[1]}.snaps" if found else None


@dataclass
class Segment:
    """One file of the store.

    Attributes:
        size: requested size; the file may be larger.
        rank_writes: a rank has it mapped for writing and has not finished.
        fetches: number of threads that write received data into it.
    """

    name: str
    path: Path
    size: int
    move: str
    mapped: mmap.mmap = field(repr=False, compare=False)
    complete: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    dropped: bool = False
    rank_writes: bool = False
    fetches: int = 0

    @property
    def file_bytes(self) -> int:
        """Size of the file, which never changes: whoever has it mapped may still write to its last page."""
        return len(self.mapped)

    @contextlib.contextmanager
    def filling(self) -> Iterator[memoryview]:
        """Context in which this agent writes the segment; until its end no one else gets the file.

        Raises:
            EOFError: it was dropped.
        """
        with self.changed:
            if self.dropped:
                raise EOFError("its segment was dropped")
            self.fetches += 1
        try:
            with memoryview(self.mapped) as view:
                yield view
        finally:
            with self.changed:
                self.fetches -= 1

    def wait(self, timeout_s: float) -> bool:
        """Wait until the segment is complete; False if it was dropped or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.complete or self.dropped, timeout_s)
            return self.complete and not self.dropped


class Store:
    """All segments of one agent. Methods may be called from any thread."""

    def __init__(self, shared: Path, files: Path, limits: Path | None = None) -> None:
        """Open the store, and empty it.

        `shared` is in memory (below /dev/shm); `files` is on disk, for segments that do not fit.

        Args:
            limits: a JSON file that may say how much the store may take, ``{"memory_bytes": ..., "disk_bytes": ...}``,
                on hosts where others need the room; looked at for every new segment.
        """
        self._places = (shared, files)
        self._limits = limits
        self._segments: dict[str, Segment] = {}
        self._pool: list[Segment] = []
        self._pooled = itertools.count(1)
        self._lock = threading.Condition()  # notified of segments that are made or dropped
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)
            private_directory(str(place))
        self._owned = _own(shared)
        os.write(self._owned, os.fsencode(files.parent))
        _sweep(shared)

    def make(self, name: str, size: int, move: str, *, rank_writes: bool = False) -> Segment:
        """Make a segment of at least one page with every page present; the same name and size return the same segment.

        Args:
            rank_writes: a rank will fill it; otherwise this agent does.
        Raises:
            Refused: neither memory nor disk has room ("disk-full"), or the name is no name.
        """
        if not _NAME.fullmatch(name):
            raise Refused("request", f"{name!r} is no name for a segment")
        size = max(size, mmap.PAGESIZE)
        with self._lock:
            known = self._segments.get(name)
            if known is not None and known.size == size:
                return known
            if known is not None:
                self._discard(known)
            segment = self._recycled(name, size, move)
        if segment is None:
            segment = self._fresh(name, size, move)
        segment.rank_writes = rank_writes
        with self._lock:
            self._segments[name] = segment
            self._lock.notify_all()
        return segment

    def awaited(self, name: str, is_over: Callable[[], bool], timeout_s: float) -> Segment | None:
        """Return the segment of this name, once it is made; None: `drop` came first, as `is_over` then says."""
        with self._lock:
            self._lock.wait_for(lambda: name in self._segments or is_over(), timeout_s)
            return self._segments.get(name)

    def find(self, name: str) -> Segment | None:
        """Return the segment of this name."""
        with self._lock:
            return self._segments.get(name)

    def all(self) -> list[Segment]:
        """All segments in use."""
        with self._lock:
            return list(self._segments.values())

    def of(self, move: str) -> list[Segment]:
        """All segments of a migration."""
        with self._lock:
            return [s for s in self._segments.values() if s.move == move]

    def publish(self, name: str, meta: dict[str, Any], *, last: bool = True) -> Segment:
        """Mark a segment as complete.

        Args:
            last: its writer will not write again.

        Raises:
            Refused: there is no such segment.
        """
        segment = self.find(name)
        if segment is None:
            raise Refused("unknown", f"there is no segment {name!r} here")
        with segment.changed:
            segment.meta, segment.complete = meta, True
            segment.rank_writes = segment.rank_writes and not last
            segment.changed.notify_all()
        return segment

    def drop(self, move: str) -> None:
        """Drop the segments of a migration: waiting peers get an error, memory without a writer goes to the pool."""
        with self._lock:
            for segment in [s for s in self._segments.values() if s.move == move]:
                del self._segments[segment.name]
                self._discard(segment)
            self._lock.notify_all()

    def close(self) -> None:
        """Remove all segments."""
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)
        os.close(self._owned)

    def _discard(self, segment: Segment) -> None:
        with segment.changed:
            segment.dropped = True
            written = segment.rank_writes or segment.fetches > 0
            segment.changed.notify_all()
        pooled_bytes = sum(s.file_bytes for s in self._pool)
        in_memory = segment.path.parent == self._places[0]
        if written or not in_memory or pooled_bytes + segment.file_bytes > POOL_BYTES_MAX:
            segment.path.unlink(missing_ok=True)
            return
        # Under another name: a segment of the old name may be made again with another size.
        path = segment.path.with_name(f"~{next(self._pooled)}")
        segment.path.rename(path)
        self._pool.append(replace(segment, path=path))

    def _recycled(self, name: str, size: int, move: str) -> Segment | None:
        """The smallest pooled segment that is large enough, and not much larger."""
        fits = [s for s in self._pool if size <= s.file_bytes <= 2 * size]
        if not fits:
            return None
        old = min(fits, key=lambda s: s.file_bytes)
        self._pool.remove(old)
        path = old.path.with_name(name)
        old.path.rename(path)
        return Segment(name, path, size, move, old.mapped)

    def _fresh(self, name: str, size: int, move: str) -> Segment:
        last: OSError | None = None
        wanted = size * (1 + SPARE_SHARE)
        if self._available_bytes(self._places[0]) < wanted:
            self._empty_pool()  # before a disk is written to
        for place in self._places:
            if self._available_bytes(place) < wanted:
                continue
            path = place / name
            try:
                mapped = _make_present(path, size, in_memory=place == self._places[0])
            except OSError as error:
                path.unlink(missing_ok=True)
                last = error
                continue
            return Segment(name, path, size, move, mapped)
        cause = f": {last}" if last else ""
        free = " nor ".join(f"{place} ({self._available_bytes(place) >> 20} MiB free)" for place in self._places)
        raise Refused("disk-full", f"no room for a segment of {size >> 20} MiB in {free}{cause}")

    def _available_bytes(self, place: Path) -> int:
        free = _free_bytes(place)
        if place == self._places[0]:
            total = _total_bytes(place)
            free = free - min(OTHERS_BYTES_MAX, int(total * OTHERS_SHARE)) if total >= SHARED_BYTES_MIN else 0
        limits = (read_json(self._limits) or {}) if self._limits is not None else {}
        limit = limits.get("memory_bytes" if place == self._places[0] else "disk_bytes")
        if limit is None:
            return max(free, 0)
        with self._lock:
            taken = sum(s.file_bytes for s in (*self._segments.values(), *self._pool) if s.path.parent == place)
        return max(min(free, int(limit) - taken), 0)

    def _empty_pool(self) -> None:
        with self._lock:
            for segment in self._pool:
                segment.path.unlink(missing_ok=True)
            self._pool.clear()


def _free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _total_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_blocks * found.f_frsize


def _make_present(path: Path, size: int, *, in_memory: bool) -> mmap.mmap:
    """Make a file in which every page exists, and map it.

    Raises:
        OSError: no space. Without this, a later write to a missing page would raise SIGBUS.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        by_threads = in_memory and threads() > 1  # the kernel allocates a file by one thread at a time
        if by_threads:
            os.ftruncate(descriptor, size)
        else:
            os.posix_fallocate(descriptor, 0, size)
        # Never closed, as threads may be sending from it; the last view frees it.
        mapped = mmap.mmap(descriptor, size)
        if not populate(mapped, [(0, size)], POPULATE_WRITE):  # no space, or an older kernel: touch each page
            os.posix_fallocate(descriptor, 0, size)
            for offset in range(0, size, mmap.PAGESIZE):
                mapped[offset] = 0
        return mapped
    finally:
        os.close(descriptor)


def _own(place: Path) -> int:
    """Take the lock of a store; return its descriptor, which holds the lock until it is closed.

    An agent that starts at the same time may take the new store for one without an agent and remove it: then again.
    """
    while True:
        private_directory(str(place))
        try:
            descriptor = os.open(place / OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(place / OWNER)):
                return descriptor
        os.close(descriptor)


def _sweep(mine: Path) -> None:
    """Remove the stores of this user's agents that do not live: memory until the next boot.

    Their content is of no use: an agent empties its store when it starts. The lock tells, not the agent's directory:
    a test leaves its directory behind, and containers share memory but not directories.
    """
    prefix = mine.name.rpartition("-")[0]
    for store in mine.parent.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError, UnsafePath):  # others may make entries of such names
            private_directory(str(store), make=False)
            with open(store / OWNER, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(store, ignore_errors=True)
