"""Numbered lines of text files, for one-line messages about a wrong one."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterd.simulate.errors import InputError


def text_of(path: Path) -> str:
    """Read a text file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def rows(
    path: Path, columns: Sequence[str], delimiter: str = ",", header: bool = True
) -> list[tuple[int, dict[str, str]]]:
    """Read the lines of a table with their numbers.

    Args:
        header: the first line names the columns; otherwise they are as given, in that order.
    Raises:
        InputError: it cannot be read, lacks one of the columns, or has nothing below the header.
    """
    lines = text_of(path).splitlines()
    reader = csv.DictReader(lines, None if header else list(columns), delimiter=delimiter)
    missing = [c for c in columns if c not in (reader.fieldnames or [])]
    if missing:
        raise InputError(f"{path}, line 1: no column {', '.join(missing)}; needed are {', '.join(columns)}")
    found: list[tuple[int, dict[str, str]]] = []
    for row in reader:
        if None in row or None in row.values():
            count = len(reader.fieldnames or [])
            raise InputError(f"{path}, line {reader.line_num}: it has not {count} fields; correct the line")
        found.append((reader.line_num, dict(row)))
    if not found:
        raise InputError(f"{path}: no lines{' below the header' if header else ''}")
    return found


def table_of(path: Path, expected: str) -> dict[str, Any]:
    """Read the object that a JSON file holds.

    Args:
        expected: description of the content, for the message.
    Raises:
        InputError: it cannot be read, is no JSON, or holds something else.
    """
    try:
        found = json.loads(text_of(path))
    except ValueError as error:
        raise InputError(f"{path}: no JSON ({error}); give {expected}") from None
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path}: holds no object; give {expected}")
    return found
