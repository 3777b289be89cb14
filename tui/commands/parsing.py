"""What people type into a line: each of these reads one kind of answer; a ValueError says what is wanted instead."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path


def something(wanted: str) -> Callable[[str], str]:
    """Any text but none at all, which is answered with `wanted`."""

    def read(text: str) -> str:
        if not text:
            raise ValueError(wanted)
        return text

    return read


def whole_number(text: str) -> int:
    """``-7``; of so few digits that it fits into a message."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise ValueError("a whole number of at most nine digits, please")
    return int(text)


def absolute_path(text: str) -> str:
    """A path on the hosts, which need not be there on this machine."""
    if not text.startswith("/"):
        raise ValueError("an absolute path, please")
    return text


FILES_MAX = 200
LOOK_S = 1.0
"""For job files; whoever is in the root of a file system knows the path."""


def job_files() -> list[str]:
    """Files below this directory that may hold a job, to choose among, near ones first.

    Hidden directories and what cannot be read are passed over, and names that are no text, which cannot be shown.
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
    """A file of this machine.

    Raises:
        ValueError: there is none.
        OSError, RuntimeError: nobody can know, as of a name that is too long, or of the home of nobody.
    """
    file = Path(text).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {text!r} here")
    return file
