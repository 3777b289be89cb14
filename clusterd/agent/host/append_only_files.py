"""Files that grow, pulled by offset: the daemon asks for what it does not have yet."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

CHUNK_BYTES_MAX = 4 << 20

LOG_BYTES_MAX = 1 << 30
"""Of one rank's log on disk; what is older than the last half of it goes."""

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # of fallocate(2)


def pull(path: Path, offset: int, limit: int, ended: bool) -> dict[str, Any]:
    """Bytes of `path` from `offset` on.

    Returns:
        data, the offset to ask for next, the file's size, and whether nothing will follow: its writer ended, and
        this is the last of it. An offset past the end gives nothing, never the file's start again.
    """
    limit = max(0, min(limit, CHUNK_BYTES_MAX))
    offset = max(0, offset)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            begin = _first_data(file.fileno(), offset) if offset < size else offset
            file.seek(min(begin, size))
            data = file.read(limit) if begin < size else b""
    except FileNotFoundError:
        size, begin, data = 0, offset, b""
    after = begin + len(data)
    if begin > offset and data:
        data = f"\n[clusterd: {begin - offset} bytes of this log were dropped to spare the disk]\n".encode() + data
    return {"data": data, "offset": after, "size": size, "done": ended and after >= size}


def trim(path: Path, most: int = LOG_BYTES_MAX) -> int:
    """Give the disk back what is old of a log that takes more than `most` bytes of it; its writer notices nothing.

    Offsets stay what they were: the file has a hole where the old part was.

    Returns:
        Bytes that were dropped; 0 too where the file system knows no holes.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return 0  # its rank has not started
    try:
        known = os.fstat(descriptor)
        if known.st_blocks * 512 <= most:
            return 0
        begin, end = _first_data(descriptor, 0), known.st_size - most // 2
        _punch(descriptor, end)
        return end - begin
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return 0
    finally:
        os.close(descriptor)


def _first_data(descriptor: int, offset: int) -> int:
    """The first byte from `offset` on that is no hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # a file system that cannot tell has none
        return offset


def _punch(descriptor: int, end: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
