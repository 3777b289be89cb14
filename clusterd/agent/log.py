"""Log of the agent and its fork servers."""

from __future__ import annotations

import contextlib
import os


def log_line(text: str) -> None:
    """Write a line to standard error; drop it if that fails, as on a full disk.

    A log line must never change an exit code. Python's buffered stream is bypassed: it would retain the unwritten text
    and pass it to the log of the next fork.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
