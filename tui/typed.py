"""What people type into a line: each of these reads one kind of answer; a ValueError says what is wanted instead."""

from __future__ import annotations

import itertools
import os
import re
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


def job_files() -> list[str]:
    """Files below this directory that may hold a job, to choose among; a name that is no text cannot be shown."""
    found = (
        os.path.relpath(os.path.join(directory, name))
        for directory, _, names in os.walk(".")  # what cannot be read is passed over
        for name in names
        if name.endswith(".toml") and name != "pyproject.toml"
    )
    return sorted(itertools.islice((path for path in found if path.isprintable()), FILES_MAX))


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
