"""Blocks: old events of the journal, thousands of them compressed into one row.

Most events are progress of running jobs, and much alike: a tenth of their bytes is enough. Blocks stay in the
journal's file, so that a replay, a check and a backup still have every event; a start of the daemon reads none.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from clusterd.daemon.journal import checksums
from clusterd.daemon.journal.checksums import Damaged, of_body, of_event

SCHEMA = """
    CREATE TABLE IF NOT EXISTS blocks (
        first INTEGER PRIMARY KEY, last INTEGER NOT NULL, checksum BLOB NOT NULL, body BLOB NOT NULL
    )
"""
"""`checksum`: of the last event. Those of the others follow from the events."""

BLOCK_EVENTS = 4000
UNCOMPRESSED_EVENTS = 20_000
"""Newest events that stay rows of their own, for `history` and for whoever was away for a while."""

_SELECT_EVENTS = """
    SELECT events.id, events.batch, events.at_s, events.kind, events.body, events.checksum,
        proposals.body, proposals.checksum
    FROM events LEFT JOIN proposals ON proposals.batch = events.batch WHERE events.id > ? ORDER BY events.id
"""

Row = tuple[Any, ...]
"""A row of `events`, with body and checksum of the proposal of its batch."""


class _Block(msgspec.Struct, array_like=True):
    """Columns compress better than rows."""

    ids: list[int]
    batches: list[int]
    times: list[float]
    kinds: list[str]
    bodies: list[bytes]
    proposals: dict[int, bytes]  # by batch


_decoder = msgspec.msgpack.Decoder(_Block)


def stored_rows(db: sqlite3.Connection, after: int = 0) -> Iterator[Row]:
    """Every event after the given one, compressed or not; the caller holds a transaction if others write.

    Raises:
        Damaged: a block does not match its checksum.
    """
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'blocks'").fetchone() is not None:
        for first, last, checksum, body in db.execute(
            "SELECT first, last, checksum, body FROM blocks WHERE last > ? ORDER BY first", (after,)
        ):
            rows = _expanded(first, last, checksum, body, _checksum_before(db, first))
            yield from (row for row in rows if row[0] > after)
    yield from db.execute(_SELECT_EVENTS, (after,))


def checksum_of(db: sqlite3.Connection, event: int) -> bytes | None:
    """Checksum of an event; None: the journal does not have it.

    Raises:
        Damaged: the block that holds it does not match its checksum.
    """
    row = db.execute("SELECT checksum FROM events WHERE id = ?", (event,)).fetchone()
    if row is not None:
        return bytes(row[0])
    query = "SELECT first, last, checksum, body FROM blocks WHERE first <= ? AND last >= ?"
    block = db.execute(query, (event, event)).fetchone()
    if block is None:
        return None
    first, last, checksum, body = block
    rows = _expanded(first, last, checksum, body, _checksum_before(db, first))
    return next((bytes(row[5]) for row in rows if row[0] == event), None)


def compact(db: sqlite3.Connection, newest: int) -> bool:
    """Compress the oldest events into one block, inside a transaction of the caller; false: too few are old enough.

    Args:
        newest: id of the newest event that a journal snapshot covers.
    Raises:
        Damaged: a row does not match its checksum.
    """
    (oldest,) = db.execute("SELECT min(id) FROM events").fetchone()
    if oldest is None or newest - oldest < UNCOMPRESSED_EVENTS + BLOCK_EVENTS:
        return False
    rows = db.execute(f"{_SELECT_EVENTS} LIMIT ?", (0, BLOCK_EVENTS)).fetchall()
    ends = [number for number, (row, following) in enumerate(pairwise(rows), 1) if row[1] != following[1]]
    if not ends:  # one batch, and the rest of it is not here
        return False
    rows = rows[: ends[-1]]
    rows = list(checksums.verified(rows, _checksum_before(db, rows[0][0])))
    ids, batches, times, kinds, bodies = ([row[number] for row in rows] for number in range(5))
    proposals = {row[1]: row[6] for row in rows if row[6] is not None}
    body = zlib.compress(msgspec.msgpack.encode(_Block(ids, batches, times, kinds, bodies, proposals)))
    first, last = rows[0][0], rows[-1][0]
    db.execute("INSERT INTO blocks VALUES (?, ?, ?, ?)", (first, last, rows[-1][5], body))
    db.execute("DELETE FROM events WHERE id <= ?", (last,))
    db.execute("DELETE FROM proposals WHERE batch <= ?", (last,))
    return True


def _checksum_before(db: sqlite3.Connection, event: int) -> bytes:
    """Checksum of the last event before this one, which begins a block or follows the last one."""
    row = db.execute("SELECT checksum FROM blocks WHERE last < ? ORDER BY first DESC LIMIT 1", (event,)).fetchone()
    return bytes(row[0]) if row is not None else checksums.FIRST


def _expanded(first: int, last: int, checksum: bytes, body: bytes, before: bytes) -> list[Row]:
    """Rows of a block."""
    rows = []
    try:
        block = _decoder.decode(zlib.decompress(body))
        for event, batch, at_s, kind, content in zip(
            block.ids, block.batches, block.times, block.kinds, block.bodies, strict=True
        ):
            before = of_event(before, event, batch, at_s, kind, content)
            proposal = block.proposals.get(batch)
            of_proposal = None if proposal is None else of_body(proposal)
            rows.append((event, batch, at_s, kind, content, before, proposal, of_proposal))
    except (zlib.error, ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
        raise Damaged(f"the block of events {first} to {last} is damaged: {error}") from None
    if before != checksum:
        raise Damaged(f"the block of events {first} to {last} does not match its checksum")
    return rows
