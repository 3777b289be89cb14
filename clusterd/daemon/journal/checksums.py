"""Checksums of the journal's rows.

The checksum of an event covers its row and the checksum of the event before it. One id with its checksum therefore
stands for the whole history up to there: a removed, changed or reordered event shows, and so does an older copy of the
journal that went on without the events that an agent has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

FORMAT = 4
"""Version of the schema and of the encoded events (`PRAGMA user_version`). Formats before were never released."""

FIRST = b""
"""Checksum before the first event."""

Row = tuple[int, int, float, str, bytes, bytes]
"""A row of `events`: id, batch, time, kind, body, checksum."""


class Damaged(ValueError):
    """A row of the journal does not match its checksum."""


def of_event(before: bytes, event: int, batch: int, at_s: float, kind: str, body: bytes) -> bytes:
    """Checksum of an event after the event with checksum `before`."""
    head = f"{len(before)} {event} {batch} {float(at_s)!r} {kind}\n".encode(errors="replace")
    return blake2b(before + head + body, digest_size=8).digest()


def of_body(body: bytes) -> bytes:
    """Checksum of a proposal or of a journal snapshot."""
    return blake2b(body, digest_size=8).digest()


def verified(rows: Iterable[tuple[Any, ...]], before: bytes) -> Iterator[tuple[Any, ...]]:
    """The rows of events, each after its check; columns after those of `Row` pass unchecked.

    Raises:
        Damaged: names the first event that does not match.
    """
    for row in rows:
        event, batch, at_s, kind, body, checksum = row[:6]
        if (
            not isinstance(body, bytes)
            or not isinstance(at_s, float)
            or of_event(before, event, batch, at_s, kind, body) != checksum
        ):
            raise Damaged(f"event {event} ({kind}) does not match its checksum")
        before = checksum
        yield row
