"""One daemon per state directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from clusterd.errors import ClusterError


@contextlib.contextmanager
def only_instance(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel frees it whatever becomes of us.

    Raises:
        ClusterError: another daemon holds it; names its process.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / "daemon.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ClusterError(
            f"{path}: {error.strerror}: set CLUSTERD_STATE_DIR to a directory that can be written"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ClusterError(
            f"a daemon (pid {holder}) already serves {directory}: clusterd status, or clusterd stop, or another "
            "CLUSTERD_STATE_DIR"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    try:
        yield
    finally:
        os.close(lock)
