"""Recordings: items of `watch`, one a line, read from a file or rebuilt from a daemon's journal.

A recording begins with ``{"snapshot": ..., "number": N, "at_s": T}``; every further line is a row of
`clusterd.projection.change_row`. The journal holds every event since the daemon first started, and the scheduler is
deterministic, so a replay yields every past state of the cluster.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from clusterd import projection
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.daemon.journal.blocks import stored_rows
from clusterd.daemon.journal.checksums import FORMAT, Damaged
from clusterd.daemon.journal.journal import batches
from clusterd.errors import ClusterError, UsageError
from clusterd.rows import plain

Item = dict[str, Any]

JOURNAL = "journal.db"
_SQLITE = b"SQLite format 3\x00"


def recording(path: Path, policy: str = "default") -> Iterator[Item]:
    """Items of a recording, a journal, or the journal in a state directory.

    Args:
        policy: name of the policy that decided when the journal was written.

    Raises:
        ClusterError: no such file, not a recording, or a journal that this version cannot replay.
    """
    file = journal_file(path)
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_SQLITE))
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}: give a recording (clusterd simulate --record FILE) or a state directory"
        ) from None
    return _from_journal(file, policy) if start == _SQLITE else _from_lines(file)


def journal_file(path: Path) -> Path:
    """Path of the journal: the given file, or the one in the given state directory."""
    return path / JOURNAL if path.is_dir() else path


def _from_lines(file: Path) -> Iterator[Item]:
    with file.open("rb") as opened:
        for number, raw in enumerate(opened, 1):
            try:
                item = msgspec.json.decode(raw)
            except msgspec.DecodeError as error:
                raise UsageError(f"{file}, line {number}: no JSON ({error}): is it a recording?") from None
            if not isinstance(item, dict) or (number == 1 and "snapshot" not in item):
                raise UsageError(f"{file}, line {number}: no item of a recording; the first line must hold a snapshot")
            yield item


def write(file: Path, items: Iterator[Item]) -> int:
    """Write a recording; returns the number of items."""
    count = 0
    with file.open("w", encoding="utf-8") as opened:
        for item in items:
            opened.write(json.dumps(item) + "\n")
            count += 1
    return count


def _from_journal(file: Path, policy: str) -> Iterator[Item]:
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    scheduler = Scheduler(POLICIES[policy]())
    first = True
    for batch in journal_batches(file):
        if first:
            at_s = batch.events[0].at_s
            yield {"snapshot": {"jobs": [], "hosts": [], "status": {}}, "number": 0, "at_s": at_s}
            first = False
        try:
            decisions = scheduler.replay(batch)
        except Exception as error:  # any error means that this version's scheduler does not fit this journal
            raise ClusterError(
                f"{file}: this version cannot replay event {batch.events[0].id} ({type(error).__name__}: {error}): "
                f"was another policy than {policy!r} at work, or another version?"
            ) from error
        number, also = batch.events[-1].id, scheduler.side_effects
        yield plain(projection.change_row(scheduler.state, number, batch.events, decisions, side_effects=also))
    if first:
        raise ClusterError(f"{file} holds no events yet")


def journal_batches(file: Path) -> Iterator[Batch]:
    """Batches of events of a journal, with the policy's proposals.

    Opens the file read-only and takes no lock, so a daemon may write at the same time.

    Raises:
        ClusterError: not a journal, or one of another version.
    """
    try:
        db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        db.execute("BEGIN")  # events move into blocks while a daemon runs
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise ClusterError(f"{file} is of format {version}; this clusterd knows format {FORMAT}")
        yield from batches(stored_rows(db))
        db.close()
    except sqlite3.DatabaseError as error:
        raise ClusterError(f"{file} cannot be read as a journal: {error}") from None
    except Damaged as error:
        raise ClusterError(f"{file} is damaged: {error}: restore a backup of it") from None
    except (KeyError, msgspec.ValidationError) as error:
        raise ClusterError(f"{file} holds an event of another version: {error}") from None
