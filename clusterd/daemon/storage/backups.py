"""Backups of all that another daemon needs to lead the hosts again: once, or again and again.

The journal is copied last and by SQLite's own online backup, so that each backup is the state at one event, and every
file that this state needs is beside it. Older files in the directory are replaced one by one: each is written under
another name, flushed to the disk, and renamed, so that it is always whole under its own name.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import asyncssh

from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.journal.leadership import BACKUP_OF, NEWEST_EVENT
from clusterd.daemon.journal.secrets_key import SECRETS_KEY
from clusterd.daemon.storage.archive import make_durable
from clusterd.errors import ClusterError, UsageError
from clusterd.ssh.connection import Dialer
from clusterd.trusted_paths import UnsafePath, own_directory

log = logging.getLogger(__name__)

JOURNAL = "journal.db"
MEASUREMENTS = "measurements.db"
SETTINGS = "clusterd.toml"
WORKDIRS = "snapshots"

REPEATED = "backups"
"""Fact in the journal: targets that are written again and again, with their seconds."""


@dataclass(slots=True)
class BackupState:
    """State of the backups to one target."""

    every_s: float
    at_s: float | None = None  # of the last complete one
    event: int = 0  # that it goes up to
    trouble: str = ""  # why the last one failed


class Backups:
    """Writes backups, and repeats those that a user asked to be repeated.

    Args:
        config_file: settings of this daemon; None: it has none.
    """

    def __init__(
        self,
        directory: Path,
        config_file: Path | None,
        engine: Engine,
        journal: Journal,
        dialer: Dialer,
        routes: HostKeyEnrolment,
    ) -> None:
        self._directory, self._config_file, self._engine = directory, config_file, engine
        self._journal, self._dialer, self._routes = journal, dialer, routes
        self._writing = anyio.Lock()
        self._changed = anyio.Event()
        self._failing: set[str] = set()
        self.repeated = {to: BackupState(every_s) for to, every_s in json.loads(journal.fact(REPEATED, "{}")).items()}

    async def run(self) -> None:
        """Write the repeated backups when they are due, until cancelled."""
        due_s: dict[str, float] = {}
        while True:
            now_s = time.monotonic()
            for to, state in list(self.repeated.items()):
                if due_s.get(to, 0.0) <= now_s:
                    await self._repeat(to, state)
                    due_s[to] = time.monotonic() + state.every_s
            waits = [due_s.get(to, 0.0) - time.monotonic() for to in self.repeated]
            with anyio.move_on_after(max(min(waits), 0.0) if waits else None):
                await self._changed.wait()
                due_s = {to: at_s for to, at_s in due_s.items() if to in self.repeated}
            self._changed = anyio.Event()

    async def _repeat(self, to: str, state: BackupState) -> None:
        try:
            await self.write(to)
        except ClusterError as error:
            if to not in self._failing:  # one line for each outage, not for each try
                log.error("the backup to %s failed: %s", to, error)
            self._failing.add(to)
        else:
            self._failing.discard(to)

    async def repeat(self, to: str, every_s: float) -> None:
        """Write backups to a target from now on, each so many seconds after the one before."""
        known = self.repeated.get(to)
        self.repeated[to] = BackupState(every_s, known.at_s, known.event) if known else BackupState(every_s)
        await self._keep()

    async def end(self, to: str) -> None:
        """Write no more backups to a target; what is there stays.

        Raises:
            UsageError: there is no such target.
        """
        if self.repeated.pop(to, None) is None:
            raise UsageError(f"no backup to {to} is repeated: clusterd backup shows those that are")
        await self._keep()

    async def _keep(self) -> None:
        await self._journal.keep_fact(REPEATED, json.dumps({to: state.every_s for to, state in self.repeated.items()}))
        self._changed.set()

    async def write(self, to: str) -> dict[str, Any]:
        """Write one backup; returns its event and the bytes that were copied.

        Args:
            to: a directory, or HOST:DIRECTORY.
        Raises:
            ClusterError: it could not be written; what was there before is as it was, or newer.
        """
        try:
            async with self._writing, self._opened(to) as target:
                event, copied = await self._write(target)
        except (OSError, asyncssh.Error, sqlite3.Error, ClusterError) as error:
            why = str(error) or type(error).__name__
            if (state := self.repeated.get(to)) is not None:
                state.trouble = why
            raise error if isinstance(error, ClusterError) else ClusterError(f"the backup to {to}: {why}") from None
        if (state := self.repeated.get(to)) is not None:
            state.at_s, state.event, state.trouble = time.time(), event, ""
        return {"to": to, "event": event, "bytes": copied}

    @asynccontextmanager
    async def _opened(self, to: str) -> AsyncIterator[Target]:
        host, colon, directory = to.partition(":")
        if to.startswith("/"):
            if self._directory.resolve() in (Path(to).resolve(), *Path(to).resolve().parents):
                raise UsageError(f"{to} is in the state directory itself: name a directory elsewhere")
            yield LocalTarget(Path(to))
            return
        if not colon or not directory or "/" in host:
            raise UsageError(f"{to!r} is no target: write an absolute directory, or HOST:DIRECTORY")
        route = await self._routes.route(host)
        async with self._dialer.connect(route) as connection, sftp_target(connection, directory) as target:
            yield target

    async def _write(self, target: Target) -> tuple[int, int]:
        there = await target.sizes()
        if NEWEST_EVENT in there:
            raise ClusterError("a daemon has led from that directory: its journal is not replaced by another one")
        copy = self._directory / "backup.partial"
        try:
            event = await anyio.to_thread.run_sync(_copy_journal, self._journal.path, copy, str(self._directory))
            copied = await self._put_workdirs(target, copy)
            for name in (SECRETS_KEY, "login_key", "known_hosts"):
                copied += await _put(target, self._directory / name, name)
            if self._config_file is not None:
                copied += await _put(target, self._config_file, SETTINGS)
            if (self._directory / MEASUREMENTS).exists():
                measured = self._directory / "measurements.partial"
                try:
                    await anyio.to_thread.run_sync(_copy_database, self._directory / MEASUREMENTS, measured)
                    copied += await _put(target, measured, MEASUREMENTS)
                finally:
                    measured.unlink(missing_ok=True)
            copied += await _put(target, copy, JOURNAL)
        finally:
            copy.unlink(missing_ok=True)
        for name in set(await target.sizes(WORKDIRS)) - await self._workdirs():
            await target.remove(f"{WORKDIRS}/{name}")
        return event, copied

    async def _put_workdirs(self, target: Target, journal: Path) -> int:
        """Copy the working directories that jobs need and that are not there; their names are their content's."""
        there, copied = await target.sizes(WORKDIRS), 0
        for name in sorted(await self._workdirs() - set(there)):
            copied += await _put(target, self._directory / WORKDIRS / name, f"{WORKDIRS}/{name}")
        return copied

    async def _workdirs(self) -> set[str]:
        """Packed working directories, without those whose jobs are over."""
        jobs = self._engine.state.jobs.values()
        archived = await self._journal.query("SELECT DISTINCT workdir FROM archived_jobs")
        over = {job.spec.snapshot for job in jobs if job.state.is_final} | {digest for (digest,) in archived}
        needed = {job.spec.snapshot for job in jobs if not job.state.is_final}
        stored = {file.name for file in (self._directory / WORKDIRS).glob("*.tar")}
        return stored - {f"{digest}.tar" for digest in over - needed}


async def _put(target: Target, source: Path, name: str) -> int:
    """Copy a file, if there is one; returns its bytes."""
    try:
        size = source.stat().st_size
    except FileNotFoundError:
        return 0
    await target.put(source, name)
    return size


def _copy_journal(journal: Path, copy: Path, origin: str) -> int:
    """Copy the journal as of one event, and mark the copy as one; returns the event."""
    _copy_database(journal, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (BACKUP_OF, origin))
        db.execute("DELETE FROM facts WHERE name = ?", (REPEATED,))  # it must not write over itself
        return int(db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])


def _copy_database(source: Path, copy: Path) -> None:
    """Copy a SQLite file, while others write to it, as of one transaction."""
    copy.unlink(missing_ok=True)
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as origin,
        closing(sqlite3.connect(copy, isolation_level=None)) as db,
    ):
        origin.backup(db)
        db.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it


CHUNK_BYTES = 1 << 20

PARTIAL = ".partial"
"""Suffix of a file that is being written."""


class Target(Protocol):
    """A directory of one backup."""

    async def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of each file, by name, of the directory or of one in it; it is made if it is not there."""

    async def put(self, source: Path, name: str) -> None:
        """Copy a file there, in the place of the one of that name."""

    async def remove(self, name: str) -> None:
        """Remove a file."""


class LocalTarget:
    """A directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def sizes(self, below: str = "") -> dict[str, int]:
        """See `Target`."""
        return await anyio.to_thread.run_sync(self._sizes, self._directory / below)

    def _sizes(self, directory: Path) -> dict[str, int]:
        try:
            own_directory(str(directory))
        except UnsafePath as error:
            raise ClusterError(f"{error}: a backup has the keys of the cluster") from None
        return {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}

    async def put(self, source: Path, name: str) -> None:
        """See `Target`."""
        await anyio.to_thread.run_sync(self._put, source, self._directory / name)

    def _put(self, source: Path, target: Path) -> None:
        partial = target.with_name(target.name + PARTIAL)
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with source.open("rb") as data, open(file, "wb") as copy:
            while chunk := data.read(CHUNK_BYTES):
                copy.write(chunk)
        make_durable(partial, target)

    async def remove(self, name: str) -> None:
        """See `Target`."""
        await anyio.to_thread.run_sync((self._directory / name).unlink)


class SftpTarget:
    """A directory of another machine."""

    def __init__(self, sftp: asyncssh.SFTPClient, directory: str) -> None:
        self._sftp = sftp
        self._directory = directory

    async def sizes(self, below: str = "") -> dict[str, int]:
        """See `Target`."""
        directory = posixpath.join(self._directory, below)
        if not await self._sftp.isdir(directory):
            await self._sftp.makedirs(directory, asyncssh.SFTPAttrs(permissions=0o700), exist_ok=True)
        found = await self._sftp.readdir(directory)
        files = [entry for entry in found if entry.attrs.type == asyncssh.FILEXFER_TYPE_REGULAR]
        return {str(entry.filename): entry.attrs.size or 0 for entry in files}

    async def put(self, source: Path, name: str) -> None:
        """See `Target`."""
        target = posixpath.join(self._directory, name)
        partial = target + PARTIAL
        if await self._sftp.exists(partial):
            await self._sftp.remove(partial)
        written = 0
        # Private from its first byte on: it may be a key.
        async with self._sftp.open(partial, "xb", asyncssh.SFTPAttrs(permissions=0o600)) as copy:
            async with await anyio.open_file(source, "rb") as data:
                while chunk := await data.read(CHUNK_BYTES):
                    await copy.write(chunk)
                    written += len(chunk)
            try:
                await copy.fsync()
            except asyncssh.SFTPOpUnsupported:
                pass  # then the other machine's file system decides when it reaches the disk
        if (found := await self._sftp.getsize(partial)) != written:
            raise ClusterError(f"{partial} has {found} bytes of {written}")
        await self._sftp.posix_rename(partial, target)

    async def remove(self, name: str) -> None:
        """See `Target`."""
        await self._sftp.remove(posixpath.join(self._directory, name))


@asynccontextmanager
async def sftp_target(connection: asyncssh.SSHClientConnection, directory: str) -> AsyncIterator[SftpTarget]:
    """Open a directory behind an SSH connection; a relative one is below the login's home."""
    async with connection.start_sftp_client() as sftp:
        if directory.startswith("~/"):
            directory = directory.removeprefix("~/")
        yield SftpTarget(sftp, directory)
