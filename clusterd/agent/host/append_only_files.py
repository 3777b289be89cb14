"""Append-only files (logs, training steps): reading by offset, and trimming of old log data."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from clusterd.protocol.requests import Chunk

CHUNK_BYTES_MAX = 4 << 20

LOG_BYTES_MAX = 1 << 30
"""Largest log of one rank on disk; a larger one is trimmed to its last half of this size."""

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # of fallocate(2)


def pull(path: Path, offset: int, limit: int, ended: bool) -> Chunk:
    """Read at most `limit` bytes of `path` from `offset` on.

    Args:
        ended: the file's writer has ended.
    Returns:
        An offset past the end returns no data, never the start of the file again.
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
    return Chunk(data, after, size, done=ended and after >= size)


def trim(path: Path, most: int = LOG_BYTES_MAX) -> int:
    """Free the disk space of the oldest part of a log that occupies more than `most` bytes.

    The old part becomes a hole in the file: offsets do not change, and the writer is not disturbed. A link to
    a file of the job's is left whole.

    Returns:
        Bytes freed; 0 if the log is small enough or the file system does not support holes.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0  # its rank has not started
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0
        raise
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
    """Offset of the first byte from `offset` on that is not in a hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # the file system does not support SEEK_DATA, so it has no holes either
        return offset


def _punch(descriptor: int, end: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
