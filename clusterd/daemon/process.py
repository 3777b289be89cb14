"""The daemon as a process: its lock on the state directory, its log, and its notifications to systemd."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import logging.handlers
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from clusterd.errors import ClusterError, first_of
from clusterd.trusted_paths import own_directory

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 16 << 20
FILES_MAX = 3


@contextlib.contextmanager
def only_instance(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel frees it at the end of the process.

    Raises:
        ClusterError: another daemon holds it; names its process.
    """
    path = directory / "daemon.lock"
    try:
        own_directory(str(directory))
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


class JsonLines(logging.Formatter):
    """Formatter of log records as JSON, one object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        fields = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_log(file: Path, level: str, foreground: bool) -> None:
    """Log to `file`, and in the foreground to standard error too: as text on a terminal, else as JSON.

    Raises:
        ClusterError: the file cannot be written.
    """
    root = logging.getLogger()
    root.setLevel(level.upper())
    try:
        handler = logging.handlers.RotatingFileHandler(
            file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX, encoding="utf-8"
        )
    except OSError as error:
        raise ClusterError(f"{file}: {error.strerror}: make it a file that can be written, or remove it") from None
    handler.setFormatter(JsonLines())
    root.addHandler(handler)
    if foreground:
        shown = logging.StreamHandler(sys.stderr)
        human = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        shown.setFormatter(human if sys.stderr.isatty() else JsonLines())
        root.addHandler(shown)
    logging.getLogger("asyncssh").setLevel(max(logging.WARNING, root.level))


def notify_systemd(message: str) -> None:
    """Send one `sd_notify` message; does nothing outside a systemd unit of ``Type=notify``."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(message.encode(), address)
        except OSError as error:  # systemd's watchdog acts on the silence
            log.warning("systemd cannot be notified at %s: %s", address, error.strerror)


async def guarded(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Run background work; a bug there is logged and does not end the daemon."""
    try:
        await work(*arguments)
    except Exception:
        log.exception("%s failed", work.__qualname__)


def in_a_line(error: BaseException) -> str:
    """Error for a caller whose request ran into a bug."""
    cause = first_of(error)
    return f"a bug of clusterd's own, which daemon.log tells of: {type(cause).__name__}: {cause}"
