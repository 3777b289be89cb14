"""Many jobs by one word: ``net_*``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from clusterd.client import Client
from clusterd.errors import UsageError


def is_meant(row: dict[str, Any], texts: Iterable[str]) -> bool:
    """Whether one of the texts is the job's id or name, or a pattern that its name matches."""
    return any(text == row["id"] or fnmatchcase(row["name"], text) for text in texts)


def own_jobs(cluster: Client, texts: Iterable[str], *, over: bool) -> list[str]:
    """Jobs as they were named, and for a pattern the ids of one's own that match it and are over, or are not.

    Raises:
        UsageError: none matches.
    """
    found: list[str] = []
    for text in texts:
        if not any(letter in text for letter in "*?["):  # which no name has
            found.append(text)
            continue
        me = cluster.call("hello")["user"]
        rows = [row for row in cluster.call("jobs", all=over) if row["user"] == me and is_meant(row, [text])]
        ids = [row["id"] for row in rows if (row["ended_s"] is not None) == over]
        if not ids:
            raise UsageError(f"no job of yours that is {'over' if over else 'not over'} has a name like {text}")
        found += ids
    return list(dict.fromkeys(found))
