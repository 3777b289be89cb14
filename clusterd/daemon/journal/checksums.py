"""Checksums of the journal's rows, and the check of a whole journal file.

The checksum of an event covers its row and the checksum of the event before it. One id with its checksum therefore
stands for the whole history up to there: a removed, changed or reordered event shows, and so does an older copy of the
journal that went on without the events that an agent has seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from clusterd.errors import ClusterError

FORMAT = 4
"""Version of the schema and of the encoded events (`PRAGMA user_version`). Formats before were never released."""

FIRST = b""
"""Checksum before the first event."""

DAMAGES_MAX = 100
"""Damages that a check lists."""

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


def check_file(file: Path) -> tuple[int, list[str]]:
    """Check a journal file whole: the structure of the database, every event, proposal and journal snapshot.

    Opens the file read-only, so a daemon may write at the same time.

    Returns:
        Number of sound events, and the damages in words.
    Raises:
        ClusterError: there is no such file, or it is not a journal of this format.
    """
    if not file.is_file():
        raise ClusterError(f"{file}: there is no journal: give its file or a state directory")
    try:
        db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        return 0, [str(error)]
    if version != FORMAT:
        raise ClusterError(f"{file} is of format {version}; this clusterd knows format {FORMAT}")
    damages: list[str] = []

    def attempt(check: Callable[[], None]) -> None:
        try:
            check()
        except (Damaged, sqlite3.Error) as error:
            damages.append(str(error))

    sound = 0

    def check_structure() -> None:
        found = db.execute(f"PRAGMA integrity_check({DAMAGES_MAX})").fetchall()
        damages.extend(line for (line,) in found if line != "ok")

    def check_events() -> None:
        nonlocal sound
        for _ in verified(db.execute("SELECT id, batch, at_s, kind, body, checksum FROM events ORDER BY id"), FIRST):
            sound += 1

    def check_bodies(table: str, key: str, name: str) -> None:
        for number, body, checksum in db.execute(f"SELECT {key}, body, checksum FROM {table} ORDER BY {key}"):
            if not isinstance(body, bytes) or of_body(body) != checksum:
                damages.append(f"{name} {number} does not match its checksum")

    attempt(check_structure)
    attempt(check_events)
    attempt(lambda: check_bodies("proposals", "batch", "the proposal of batch"))
    attempt(lambda: check_bodies("snapshots", "event", "the journal snapshot at event"))
    db.close()
    return sound, damages[:DAMAGES_MAX]
