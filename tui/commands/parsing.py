"""Parsers of prompt input: each returns the value, or raises ValueError with a message that says what is expected."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path


def something(wanted: str) -> Callable[[str], str]:
    """A parser of any text except the empty one, which is refused with `wanted`."""

    def read(text: str) -> str:
        if not text:
            raise ValueError(wanted)
        return text

    return read


def whole_number(text: str) -> int:
    """An integer such as ``-7``, of at most nine digits."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise ValueError("a whole number of at most nine digits, please")
    return int(text)


def absolute_path(text: str) -> str:
    """An absolute path on the hosts; it need not exist on this machine."""
    if not text.startswith("/"):
        raise ValueError("an absolute path, please")
    return text


FILES_MAX = 200
LOOK_S = 1.0
"""Time limit of the search for job files; from the root of a file system it would take too long."""


def job_files() -> list[str]:
    """Possible job files below the current directory, nearest first.

    Skips hidden directories, unreadable ones, and names that cannot be displayed.
    """
    until_s = time.monotonic() + LOOK_S
    found: list[str] = []
    waiting = deque([""])
    while waiting and len(found) < FILES_MAX and time.monotonic() < until_s:
        here = waiting.popleft()
        try:
            with os.scandir(here or ".") as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in inside:
            path = os.path.join(here, entry.name)
            if entry.is_dir(follow_symlinks=False):
                waiting += [] if entry.name.startswith(".") else [path]
            elif entry.name.endswith(".toml") and entry.name != "pyproject.toml" and path.isprintable():
                found.append(path)
    return found[:FILES_MAX]


def existing_file(text: str) -> Path:
    """A file on this machine.

    Raises:
        ValueError: there is no such file.
        OSError, RuntimeError: the path cannot be resolved: a name too long, or ``~`` of an unknown user.
    """
    file = Path(text).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {text!r} here")
    return file
