"""Check of a whole journal file: its structure, and the checksum of every row."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from clusterd.daemon.journal.blocks import stored_rows
from clusterd.daemon.journal.checksums import FIRST, FORMAT, Damaged, of_body, verified
from clusterd.errors import ClusterError

DAMAGES_MAX = 100
"""Damages that a check lists."""


def check_file(file: Path) -> tuple[int, list[str]]:
    """Check a journal file whole: its structure, every event, proposal, archived job and journal snapshot.

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
        db.execute("BEGIN")
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
        for _ in verified(stored_rows(db), FIRST):
            sound += 1

    def check_bodies(table: str, key: str, name: str) -> None:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is None:
            return  # a daemon of this version has not opened the file yet
        for number, body, checksum in db.execute(f"SELECT {key}, body, checksum FROM {table} ORDER BY {key}"):
            if not isinstance(body, bytes) or of_body(body) != checksum:
                damages.append(f"{name} {number} does not match its checksum")

    attempt(check_structure)
    attempt(check_events)
    attempt(lambda: check_bodies("proposals", "batch", "the proposal of batch"))
    attempt(lambda: check_bodies("snapshots", "event", "the journal snapshot at event"))
    attempt(lambda: check_bodies("archived_jobs", "job", "archived job"))
    db.close()
    return sound, damages[:DAMAGES_MAX]
