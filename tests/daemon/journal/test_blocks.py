"""Old events are compressed, and nothing that reads the journal misses one."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

import anyio
import pytest

from clusterd.core.scheduler import Scheduler
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.check import check_file
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.replay import journal_batches
from tests.daemon.journal.test_journal import engine_of, post, submitted

EVENTS = 120


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterd.daemon.journal.blocks.BLOCK_EVENTS", 10)
    monkeypatch.setattr("clusterd.daemon.journal.blocks.UNCOMPRESSED_EVENTS", 20)


async def write(engine: Engine, compacts: bool = True) -> None:
    """Events in batches of one and of several, with journal snapshots on the way."""
    for first in range(1, EVENTS + 1, 4):
        await post(engine, submitted(first))
        await post(engine, *(submitted(first + n) for n in (1, 2, 3)))
        if compacts:
            await engine.snapshot()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal most of whose events are in blocks."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    anyio.run(write, engine_of(journal)[0])
    journal.close()
    with sqlite3.connect(path) as db:
        (blocks, rows) = db.execute("SELECT (SELECT count(*) FROM blocks), (SELECT count(*) FROM events)").fetchone()
        assert blocks >= 9
        assert 20 <= rows < 40
        (left,) = db.execute("SELECT count(*) FROM proposals").fetchone()
        assert left < rows
    db.close()
    return path


def plain_copy(tmp_path: Path) -> Journal:
    """A journal with the same events in rows of their own."""
    journal = Journal(tmp_path / "plain.db")
    anyio.run(write, engine_of(journal)[0], False)
    return journal


def test_a_replay_of_blocks_gives_the_same_batches_and_state(path: Path, tmp_path: Path) -> None:
    plain = plain_copy(tmp_path)
    assert list(journal_batches(path)) == list(plain.replay_after(0))
    journal = Journal(path)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM snapshots")  # as after an upgrade that changed the state's shape
    db.close()
    engine, _ = engine_of(journal)
    assert engine.restore() == EVENTS
    scheduler = Scheduler()
    for batch in plain.replay_after(0):
        scheduler.replay(batch)
    assert codec.encode(engine.scheduler.state) == codec.encode(scheduler.state)
    assert journal.newest == plain.newest
    journal.close()
    plain.close()


def test_what_an_agent_has_seen_is_found_in_blocks(path: Path, tmp_path: Path) -> None:
    plain, journal = plain_copy(tmp_path), Journal(path)
    checksums = dict(anyio.run(plain.query, "SELECT id, checksum FROM events"))

    async def look() -> None:
        for event in (1, 2, 10, 11, 55, EVENTS - 1, EVENTS):
            assert await journal.has(event, checksums[event].hex())
            assert not await journal.has(event, "00" * 8)
        assert not await journal.has(EVENTS + 1, checksums[EVENTS].hex())

    anyio.run(look)
    plain.close()
    journal.close()


def test_a_check_counts_events_in_blocks_and_names_a_damaged_block(path: Path) -> None:
    assert check_file(path) == (EVENTS, [])
    with sqlite3.connect(path) as db:
        first, last, body = db.execute(
            "SELECT first, last, body FROM blocks ORDER BY first LIMIT 1 OFFSET 3"
        ).fetchone()
        odd = bytearray(zlib.decompress(body))
        odd[len(odd) // 2] ^= 1
        for damaged in (zlib.compress(bytes(odd)), body[:-10], b""):
            db.execute("UPDATE blocks SET body = ? WHERE first = ?", (damaged, first))
            db.commit()
            sound, damages = check_file(path)
            assert sound < first
            assert len(damages) == 1
            assert damages[0].startswith((f"the block of events {first} to {last}", f"event {first}"))
    db.close()
    journal = Journal(path)
    assert engine_of(journal)[0].restore() == 0  # the snapshot covers what the block held
    with pytest.raises(ClusterError, match=f"the block of events {first} to {last}"):
        list(journal.replay_after(0))
    journal.close()


def test_damaged_events_are_not_compressed(tmp_path: Path) -> None:
    """A block has the checksum of its last event alone: what is wrong before would be hidden in it."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    engine, _ = engine_of(journal)
    anyio.run(write, engine, False)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE events SET kind = 'JobHeld' WHERE id = 5")
    db.close()
    anyio.run(engine.snapshot)
    journal.close()
    assert check_file(path) == (4, ["event 5 (JobHeld) does not match its checksum"])
