"""Arguments of several commands: jobs by name, id or pattern, and times."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from clusterd.client import Client
from clusterd.errors import UsageError
from clusterd.units import parse_duration_s


def is_selected(row: dict[str, Any], texts: Iterable[str]) -> bool:
    """One of the texts is the job's id or name, or a pattern that matches its name."""
    return any(text == row["id"] or fnmatchcase(row["name"], text) for text in texts)


def own_jobs(cluster: Client, texts: Iterable[str], *, over: bool) -> list[str]:
    """Jobs as named; a pattern expands to the ids of the user's own jobs that match and are over (or not).

    Raises:
        UsageError: a pattern matches nothing.
    """
    found: list[str] = []
    for text in texts:
        if not any(letter in text for letter in "*?["):  # never part of a name
            found.append(text)
            continue
        me = cluster.call("hello")["user"]
        rows = [
            row
            for row in (cluster.all_jobs() if over else cluster.call("jobs"))
            if row["user"] == me and is_selected(row, [text])
        ]
        ids = [row["id"] for row in rows if (row["ended_s"] is not None) == over]
        if not ids:
            raise UsageError(f"no {'finished' if over else 'active'} job of yours matches {text}")
        found += ids
    return list(dict.fromkeys(found))


def time_s(option: str, text: str, hint: str = "") -> float:
    """Seconds given to a time option.

    Raises:
        UsageError: the text is not a time, or negative or infinite.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{option} {text}: give a time of at least 0, as in 90s{hint}")
    return seconds
