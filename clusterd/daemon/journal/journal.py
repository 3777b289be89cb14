"""Journal of events and decisions in one SQLite file, written before the daemon acts on them.

One thread owns the connection; the event loop waits for it without blocking. Commits reach the disk (WAL with
``synchronous=FULL``), so an acknowledged event survives a power failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import anyio

from clusterd.core.events import Event
from clusterd.core.scheduler import Batch
from clusterd.core.view import Proposal
from clusterd.daemon.journal import blocks, checksums, codec, job_table
from clusterd.daemon.journal.checksums import FORMAT, Damaged
from clusterd.errors import ClusterError

log = logging.getLogger(__name__)

R = TypeVar("R")
Statement = tuple[str, tuple[Any, ...]]

SCHEMA = f"""
    BEGIN;
    CREATE TABLE events (
        id INTEGER PRIMARY KEY, batch INTEGER NOT NULL, at_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL,
        checksum BLOB NOT NULL
    );
    CREATE TABLE decisions (
        id INTEGER PRIMARY KEY, cause INTEGER NOT NULL, at_s REAL NOT NULL, kind TEXT NOT NULL,
        job TEXT, host TEXT, reason TEXT NOT NULL, body BLOB NOT NULL
    );
    CREATE INDEX decisions_of_job ON decisions (job, id);
    CREATE TABLE snapshots (event INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum BLOB NOT NULL);
    CREATE TABLE hosts (name TEXT PRIMARY KEY, address TEXT NOT NULL, options BLOB NOT NULL);
    CREATE TABLE secrets (job TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (job, name));
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE proposals (batch INTEGER PRIMARY KEY, body BLOB NOT NULL, checksum BLOB NOT NULL);
    PRAGMA user_version={FORMAT};
    COMMIT;
"""

SET_ASIDE = """
    CREATE TABLE IF NOT EXISTS set_aside (
        id INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, why TEXT NOT NULL
    )
"""

ROWS_AT_ONCE = 10_000
"""Rows that a replay has in memory."""

_NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "afs", "9p", "fuse.sshfs", "glusterfs",
}  # fmt: skip


class Journal:
    """Journal file with its writer thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal.

        Raises:
            ClusterError: the file is on a network file system, has another format, or is not a journal.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_network_file_system(path.parent)
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._db = self._thread.submit(self._open).result()
        self.newest = self._at_start(self._read_newest)
        """Id and checksum of the newest event; 0 and no bytes for an empty journal."""

    def _open(self) -> sqlite3.Connection:
        with ExitStack() as stack:
            try:
                db = sqlite3.connect(self.path, isolation_level=None)
                stack.callback(db.close)
                self._bring_to_format(db)
                self._check_structure(db)
                self._inode = self.path.stat().st_ino
            except (sqlite3.Error, OSError) as error:
                raise self._unusable(error) from None
            stack.pop_all()
        return db

    def _bring_to_format(self, db: sqlite3.Connection) -> None:
        self.path.chmod(0o600)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA secure_delete=ON")  # a deleted secret must not stay in a free page
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables:
            raise self._unusable("it is a database of another program")
        if version == 0:
            db.executescript(SCHEMA)
        if version in (0, FORMAT):
            db.execute(SET_ASIDE)
            for statement in (blocks.SCHEMA, *job_table.SCHEMA):
                db.execute(statement)
        elif version > FORMAT:
            raise ClusterError(
                f"{self.path} was written by a newer clusterd (format {version}, this one knows {FORMAT}): "
                "run that version"
            )
        elif version < FORMAT:
            raise ClusterError(
                f"{self.path} was written by a development version of clusterd (format {version}, this one needs "
                f"{FORMAT}): end its jobs with that version, then move the state directory away"
            )

    def _unusable(self, why: object) -> ClusterError:
        return ClusterError(
            f"{self.path} cannot be used as the journal: {why}: check that its disk has free space and is writable, "
            "or move the file away, or restore a backup"
        )

    def _check_structure(self, db: sqlite3.Connection) -> None:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._damaged(found)

    def _damaged(self, what: object) -> ClusterError:
        return ClusterError(
            f"{self.path} is damaged: {what}: restore a backup of it and start with `clusterd start --restored`; "
            f"`clusterd journal check {self.path}` lists all damages; jobs keep running"
        )

    def _read_newest(self) -> tuple[int, bytes]:
        row = self._db.execute("SELECT id, checksum FROM events ORDER BY id DESC LIMIT 1").fetchone()
        return (int(row[0]), bytes(row[1])) if row else (0, checksums.FIRST)

    def _at_start(self, work: Callable[[], R]) -> R:
        """Run `work` in the writer thread before the event loop runs.

        Raises:
            ClusterError: the file is damaged or cannot be written.
        """
        try:
            return self._thread.submit(work).result()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    async def _run(self, work: Callable[[], R]) -> R:
        """Run `work` in the writer thread to its end, even if the waiting task is cancelled."""
        with anyio.CancelScope(shield=True):
            result = await asyncio.wrap_future(self._thread.submit(work))
        return result

    async def append(self, events: Sequence[Event], extra: Iterable[Statement] = ()) -> None:
        """Make one batch durable, together with further statements in the same transaction.

        Raises:
            ClusterError: the disk is full or failing; no row of the batch was written.
        """
        batch = events[0].id
        rows: list[checksums.Row] = []
        _, checksum = self.newest
        for event in events:
            row = (event.id, batch, event.at_s, type(event).__name__, codec.encode(event))
            checksum = checksums.of_event(checksum, *row)
            rows.append((*row, checksum))
        await self._transaction([("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row) for row in rows] + list(extra))
        self.newest = (rows[-1][0], checksum)

    async def set_aside(self, first: int, events: Iterable[Event], why: str) -> None:
        """Remove the events from `first` on, which no client has seen; the next start removes their extra rows.

        Args:
            events: those that the scheduler cannot handle; they are stored outside of the journal, for a bug report.
            why: the traceback.
        Raises:
            ClusterError: the journal cannot be written.
        """
        await self._transaction(_set_aside(first, events, why))
        self.newest = await self._run(self._read_newest)

    def set_aside_at_start(self, first: int, events: Iterable[Event], why: str) -> None:
        """The same before the event loop runs."""
        statements = _set_aside(first, events, why)
        self._at_start(lambda: self._write(statements))
        self.newest = self._at_start(self._read_newest)

    def count_set_aside(self) -> int:
        """Number of events that were set aside."""
        return int(self._at_start(lambda: self._db.execute("SELECT count(*) FROM set_aside").fetchone())[0])

    async def record(self, at_s: float, decisions: Sequence[Any], extra: Iterable[Statement] = ()) -> None:
        """Store decisions with their reasons for display; a replay derives them again from events and proposals."""
        rows = [
            (
                d.cause,
                at_s,
                type(d).__name__,
                getattr(d, "job", None),
                getattr(d, "host", None),
                d.reason,
                codec.encode(d),
            )
            for d in decisions
        ]
        statement = "INSERT INTO decisions (cause, at_s, kind, job, host, reason, body) VALUES (?, ?, ?, ?, ?, ?, ?)"
        await self._transaction([(statement, row) for row in rows] + list(extra))

    async def execute(self, statements: Iterable[Statement]) -> None:
        """Execute statements on other tables in one transaction."""
        await self._transaction(list(statements))

    async def query(self, statement: str, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return all rows.

        Raises:
            ClusterError: the file is damaged, or its disk fails.
        """
        try:
            return await self._run(lambda: self._db.execute(statement, arguments).fetchall())
        except sqlite3.Error as error:
            raise self._unreadable(error) from None

    def _unreadable(self, why: object) -> ClusterError:
        return ClusterError(f"the journal {self.path} cannot be read: {why}: check its disk")

    def _unwritable(self, why: Exception) -> ClusterError:
        locked = isinstance(why, sqlite3.OperationalError) and "locked" in str(why)
        advice = "end the other program that has it open" if locked else "free space on its disk"
        return ClusterError(f"the journal {self.path} cannot be written: {why}: {advice}")

    def _write(self, statements: list[Statement]) -> None:
        """Execute statements in one transaction; in the writer thread."""

        def execute() -> None:
            for statement, arguments in statements:
                self._db.execute(statement, arguments)

        self._in_transaction(execute)

    def _in_transaction(self, work: Callable[[], object]) -> None:
        self._restore_removed_file()
        self._db.execute("BEGIN")
        try:
            work()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    async def _transaction(self, statements: list[Statement]) -> None:
        try:
            await self._run(lambda: self._write(statements))
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None

    def _restore_removed_file(self) -> None:
        """Write the journal file again if it was removed; the open connection still has its whole content.

        Raises:
            ClusterError: another file is in its place.
            sqlite3.Error, OSError: the file cannot be written.
        """
        try:
            found = self.path.stat().st_ino
        except FileNotFoundError:
            pass
        else:
            if found == self._inode:
                return
            raise ClusterError(
                f"the journal {self.path} was replaced while the daemon runs: put the old file back, or stop the "
                "daemon and start it with the new one"
            )
        log.error("the journal %s was removed: writing it again", self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        anew = self.path.with_suffix(".anew")
        anew.unlink(missing_ok=True)
        self._db.execute("VACUUM INTO ?", (str(anew),))
        self._db.close()
        for rest in ("-wal", "-shm"):  # SQLite would apply those of the removed file to the new one
            self.path.with_name(self.path.name + rest).unlink(missing_ok=True)
        os.replace(anew, self.path)
        self._db = self._open()

    def replay_after(self, event: int) -> Iterator[Batch]:
        """Batches after an event that a journal snapshot covers, in order; for the start of the daemon.

        Raises:
            ClusterError: an event is damaged, or this version does not know it.
        """
        try:
            before = self._at_start(lambda: self._checksum_at(event))
            stored = blocks.stored_rows(self._db, event)
            yield from batches(self._fetched(stored), before)
        except Damaged as error:
            raise self._damaged(error) from None
        except (KeyError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise self._unusable(f"it has events that this version does not know ({error})") from None

    def _fetched(self, rows: Iterator[blocks.Row]) -> Iterator[blocks.Row]:
        """Rows of a query, in parts: years of them may be replayed."""
        while some := self._at_start(lambda: list(islice(rows, ROWS_AT_ONCE))):
            yield from some

    def _checksum_at(self, event: int) -> bytes:
        found = blocks.checksum_of(self._db, event) if event else checksums.FIRST
        if found is None:
            raise Damaged(f"event {event} is missing")
        return found

    async def has(self, event: int, checksum: str) -> bool:
        """True if the journal holds this event, with this history before it.

        Raises:
            ClusterError: the file is damaged there, or its disk fails.
        """
        try:
            found = await self._run(lambda: blocks.checksum_of(self._db, event))
        except Damaged as error:
            raise self._damaged(error) from None
        except sqlite3.Error as error:
            raise self._unreadable(error) from None
        return found is not None and found.hex() == checksum

    async def compact(self, newest: int) -> None:
        """Compress old events, a few thousand in each call, so that years of them fit on the disk.

        Args:
            newest: the newest event that a journal snapshot covers.
        Raises:
            ClusterError: the journal cannot be written, or the events are damaged; nothing has changed.
        """
        try:
            await self._run(lambda: self._in_transaction(lambda: blocks.compact(self._db, newest)))
        except Damaged as error:
            raise self._damaged(error) from None
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None

    async def write_snapshot(self, event: int, body: bytes, extra: Iterable[Statement] = ()) -> None:
        """Replace the journal snapshot by one that covers the events up to `event`.

        Raises:
            ClusterError: the journal cannot be written; the former snapshot is still there.
        """
        rest = list(extra)

        def write() -> None:
            packed = zlib.compress(body, 1)  # a tenth, mostly in jobs that are over
            row = (event, packed, checksums.of_body(packed))
            insert = ("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)
            self._write([*rest, insert, ("DELETE FROM snapshots WHERE event < ?", (event,))])

        try:
            await self._run(write)
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None

    def newest_snapshot(self) -> tuple[int, bytes] | None:
        """Newest journal snapshot, as the id of the last event it covers and its body; None without a sound one."""
        statement = "SELECT event, body, checksum FROM snapshots ORDER BY event DESC LIMIT 1"
        row = self._at_start(lambda: self._db.execute(statement).fetchone())
        if row is None:
            return None
        event, packed, checksum = row
        try:
            if checksums.of_body(packed) == checksum:
                return event, zlib.decompress(packed)
        except zlib.error:  # written by a version that did not compress it
            pass
        log.warning("the journal snapshot at event %d is damaged: replaying all events", event)
        return None

    def last_event_id(self) -> int:
        """Id of the newest event; 0 for an empty journal."""
        return self.newest[0]

    def fact(self, name: str, default: str) -> str:
        """A stored value, such as the cluster's id; `default` is stored if there is none yet."""

        def read() -> str:
            self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, default))
            return str(self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0])

        return self._at_start(read)

    async def keep_fact(self, name: str, value: str) -> None:
        """Change a stored value."""
        await self.execute([("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))])

    def close(self) -> None:
        """Finish pending writes and close the file."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()


def _set_aside(first: int, events: Iterable[Event], why: str) -> list[Statement]:
    insert = "INSERT INTO set_aside (at_s, kind, body, why) VALUES (?, ?, ?, ?)"
    rows = [(event.at_s, type(event).__name__, codec.encode(event), why) for event in events]
    return [("DELETE FROM events WHERE id >= ?", (first,)), *((insert, row) for row in rows)]


def proposal_row(batch: int, proposal: Proposal) -> Statement:
    """Statement that stores the policy's proposal after a batch, for replays."""
    body = codec.encode(proposal) if proposal != Proposal() else b""
    return "INSERT OR REPLACE INTO proposals VALUES (?, ?, ?)", (batch, body, checksums.of_body(body))


def batches(rows: Iterable[tuple[Any, ...]], before: bytes = checksums.FIRST) -> Iterator[Batch]:
    """Decode batches from stored rows.

    Args:
        before: checksum of the event before the first row.
    Raises:
        Damaged: a row does not match its checksum.
        KeyError, msgspec.ValidationError: this version does not know an event.
    """
    for batch, together in groupby(checksums.verified(rows, before), key=itemgetter(1)):
        some = list(together)
        body, checksum = some[0][6:]
        if body is not None and checksums.of_body(body) != checksum:
            raise Damaged(f"the proposal of batch {batch} does not match its checksum")
        proposal = None if body is None else codec.proposal(body) if body else Proposal()
        yield Batch([codec.event(kind, body) for _, _, _, kind, body, *_ in some], proposal)


def refuse_network_file_system(directory: Path) -> None:
    """Check that `directory` is on a local file system: on others SQLite's locks fail and the journal would corrupt.

    Raises:
        ClusterError: `directory` is on a network file system.
    """
    kind, mount = _file_system(directory.resolve())
    if kind in _NETWORK_FILE_SYSTEMS:
        raise ClusterError(
            f"{directory} is on a network file system ({kind} at {mount}), where the journal would corrupt: "
            "set CLUSTERD_STATE_DIR to a directory on a local disk"
        )


def _file_system(directory: Path) -> tuple[str, str]:
    best = ("", "")
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux: the kind of the file system is unknown
        return best
    for line in lines:
        _, mount, kind, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if directory.is_relative_to(mount) and len(mount) >= len(best[1]):
            best = (kind, mount)
    return best
