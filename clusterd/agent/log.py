"""What the agent and its fork servers say about themselves, into a log that may lie on a full disk."""

from __future__ import annotations

import contextlib
import os


def say(text: str) -> None:
    """A line to standard error; lost where that takes none: nobody's exit code may be lost with it.

    Not through Python's buffer, which would keep what it could not write, and pass it on to the log of the next fork.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
