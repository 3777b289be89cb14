"""Archive of the head node beside the journal: packed workdirs, secrets, logs and training steps of jobs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgpack

from clusterd.core.state import Attempt
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.journal.secrets_key import SECRETS_KEY, SecretsKey
from clusterd.durable_files import sync_directory
from clusterd.errors import ClusterError, UsageError
from clusterd.protocol.requests import Chunk, ReadLog, ReadSteps
from clusterd.types import AttemptState, HostId

log = logging.getLogger(__name__)

LOG_BYTES_MAX = 16 << 20
"""Most bytes fetched of each rank's log, from its end; the whole log stays on its host."""

CHUNK_BYTES = 1 << 20

SEALED = "fernet:"
"""Beginning of an encrypted value in the secrets table."""


class Tail(NamedTuple):
    """End of the log of a running rank, as last fetched."""

    begin: int  # offset in the log of the first byte of `data`
    end: int  # offset after its last byte
    data: bytes


class Archive:
    """Files below the state directory, and the secrets table."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self.directory = directory
        self._journal = journal
        self._key = SecretsKey(directory / SECRETS_KEY)
        try:
            for name in ("snapshots", "attempts"):
                (directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in (directory / "snapshots").glob("*.partial"):  # uploads to a daemon that was killed
                left.unlink()
        except OSError as error:
            raise ClusterError(
                f"{error.filename}: {error.strerror}: make it a writable directory, or move it away"
            ) from None

    # --- workdirs -----------------------------------------------------------------------------------------------------

    def has_workdir(self, digest: str) -> bool:
        """True if the packed workdir was received completely."""
        return self._snapshot(digest).exists()

    async def put_workdir(self, digest: str, offset: int, data: bytes, last: bool, sender: int = 0) -> None:
        """Receive one chunk of a packed workdir; after the last one, check the file against the digest.

        Chunks of each `sender` go to a separate file, so that two clients can submit the same directory at once.

        Raises:
            UsageError: chunks arrived out of order, or the content does not match the digest.
            ClusterError: the file cannot be written, for example because the disk is full.
        """
        partial = self._snapshot(digest).with_suffix(f".{sender}.partial")
        try:
            await anyio.to_thread.run_sync(self._write_chunk, partial, offset, data)
        except OSError as error:
            raise ClusterError(
                f"{partial.parent} cannot be written: {error.strerror}: free space on the head node"
            ) from None
        if last:
            found = await anyio.to_thread.run_sync(_digest, partial)
            if found != digest:
                partial.unlink()
                raise UsageError("the workdir arrived damaged: submit again")
            await anyio.to_thread.run_sync(make_durable, partial, self._snapshot(digest))

    def drop_partial(self, sender: int) -> None:
        """Remove the incomplete uploads of a sender that has disconnected."""
        for left in (self.directory / "snapshots").glob(f"*.{sender}.partial"):
            left.unlink(missing_ok=True)

    def _write_chunk(self, partial: Path, offset: int, data: bytes) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with partial.open("r+b" if offset else "wb") as file:
            if offset != os.fstat(file.fileno()).st_size:
                raise UsageError("the workdir arrived out of order: submit again")
            file.seek(offset)
            file.write(data)

    async def snapshot_chunks(self, digest: str, size: int) -> AsyncIterator[tuple[bytes, bool]]:
        """Yield the packed workdir in chunks of `size` bytes, each with true if it is the last.

        Raises:
            ClusterError: it is not here, as where its job was submitted after the backup of a restored state.
        """
        if not self.has_workdir(digest):
            raise ClusterError("the head node has lost the job's working directory: submit the job again")
        async with await anyio.open_file(self._snapshot(digest), "rb") as file:
            data = await file.read(size)
            while True:
                following = await file.read(size)
                yield data, not following
                if not following:
                    return
                data = following

    def _snapshot(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise UsageError(f"{digest!r} is not a sha256 digest")
        return self.directory / "snapshots" / f"{digest}.tar"

    # --- secrets ------------------------------------------------------------------------------------------------------

    async def secrets(self, job: str) -> dict[str, str]:
        """Values of the job's secrets by name; they are stored until the job ends."""
        rows = await self._journal.query("SELECT name, value FROM secrets WHERE job = ?", (job,))
        return {name: self._unsealed(value) for name, value in rows}

    def sealed(self, value: str) -> str:
        """Encrypt a secret for the journal, so that copies of it tell nothing without the key file."""
        return SEALED + self._key.seal(value.encode()).decode()

    def _unsealed(self, stored: str) -> str:
        if not stored.startswith(SEALED):  # of a version that stored them as they are
            return stored
        try:
            return self._key.open(stored.removeprefix(SEALED).encode()).decode()
        except ClusterError as error:
            raise ClusterError(f"a secret of the job: {error}, or submit the job again") from None

    async def forget_secrets(self, job: str) -> None:
        """Delete the secrets of a job that has ended."""
        await self._journal.execute([("DELETE FROM secrets WHERE job = ?", (job,))])

    async def keep_secrets_of(self, jobs: Container[str]) -> None:
        """Delete all other secrets: an earlier daemon ended before it deleted them or before it accepted their job."""
        for (job,) in await self._journal.query("SELECT DISTINCT job FROM secrets"):
            if job not in jobs:
                await self.forget_secrets(job)

    # --- logs and steps -----------------------------------------------------------------------------------------------

    def log_file(self, job: str, attempt: int, generation: int, rank: int) -> Path:
        """Path of the fetched log of a rank that has ended; the file may be missing."""
        return self._attempt(job, attempt) / f"rank-{rank}.{generation}.log"

    def streams_file(self, job: str, attempt: int, generation: int, rank: int) -> Path:
        """Path of the fetched offsets at which that log changes between stdout and stderr; it may be missing."""
        return self.log_file(job, attempt, generation, rank).with_suffix(".streams")

    def log_begins_at(self, job: str, attempt: int, generation: int, rank: int) -> int:
        """Offset in the rank's log at which the fetched part begins; only the host has the part before."""
        try:
            return int(_begin(self.log_file(job, attempt, generation, rank)).read_text())
        except FileNotFoundError:
            return 0

    def steps_file(self, job: str, attempt: int, generation: int) -> Path:
        """Path of the fetched training steps of one generation; the file may be missing."""
        return self._attempt(job, attempt) / f"steps.{generation}.jsonl"

    def _attempt(self, job: str, attempt: int) -> Path:
        return self.directory / "attempts" / f"{job}.{attempt}"

    async def write_log(self, job: str, attempt: int, rank: int, data: bytes) -> None:
        """Store `data` as the log of a rank."""
        await anyio.to_thread.run_sync(_write, self.log_file(job, attempt, 1, rank), data)

    async def write_tail(self, job: str, attempt: int, generation: int, rank: int, tail: Tail) -> None:
        """Store the end of a running rank's log until the log is fetched."""
        file = _tail(self.log_file(job, attempt, generation, rank))
        await anyio.to_thread.run_sync(_replace_atomically, file, msgpack.packb(tail))

    def tail(self, job: str, attempt: int, generation: int, rank: int) -> Tail | None:
        """Stored end of a log that is not fetched yet; None if there is none."""
        try:
            return Tail(*msgpack.unpackb(_tail(self.log_file(job, attempt, generation, rank)).read_bytes()))
        except FileNotFoundError:
            return None

    async def fetch_attempt(
        self,
        hosts: HostRegistry,
        host: HostId,
        job: str,
        attempt: int,
        generation: int,
        ranks: Iterable[int],
        *,
        streams: bool = False,
    ) -> None:
        """Copy the end of each rank's log, and the training steps, from the host to the head node.

        `streams`: the offsets that tell stdout and stderr apart, too. A failure is only logged, because the files are
        still on the host.
        """
        which: dict[str, Any] = {
            "job": job, "attempt": attempt, "generation": generation, "offset": 0, "limit": 0
        }  # fmt: skip
        try:
            for rank in ranks:
                wanted = ReadLog(rank=rank, **which)
                if streams:  # before the log, which stands for both
                    offsets = self.streams_file(job, attempt, generation, rank)
                    await self._fetch(hosts, host, replace(wanted, streams=True), offsets, most=sys.maxsize)
                await self._fetch(hosts, host, wanted, self.log_file(job, attempt, generation, rank))
                if rank == 0:
                    await self._fetch(hosts, host, ReadSteps(**which), self.steps_file(job, attempt, generation))
        except (ClusterError, OSError) as error:
            log.warning("cannot fetch the logs of attempt %s.%d from %s: %s", job, attempt, host, error)

    async def _fetch(
        self,
        hosts: HostRegistry,
        host: HostId,
        wanted: ReadLog | ReadSteps,
        target: Path,
        *,
        most: int = LOG_BYTES_MAX,
    ) -> None:
        answer = await hosts.request(host, wanted)
        offset = max(answer.size - most, 0)
        partial = target.with_suffix(".partial")
        await anyio.to_thread.run_sync(_write, partial, b"")
        if offset:
            await anyio.to_thread.run_sync(_write, _begin(target), str(offset).encode())
        async with await anyio.open_file(partial, "wb") as file:
            while True:
                answer = await hosts.request(host, replace(wanted, offset=offset, limit=CHUNK_BYTES))
                await file.write(answer.data)
                offset = answer.offset
                if not answer.data or offset >= answer.size:
                    break
        await anyio.to_thread.run_sync(partial.replace, target)
        _tail(target).unlink(missing_ok=True)

    async def last_step(self, job: str, attempt: int, generation: int) -> dict[str, Any] | None:
        """Newest fetched training step of a generation, with the loss of step 1 as ``first_loss`` if that was fetched.

        None if no step was fetched.
        """
        return await anyio.to_thread.run_sync(_last_step, self.steps_file(job, attempt, generation))

    def jobs(self) -> set[str]:
        """Ids of the jobs that have logs or steps here."""
        return {directory.name.rpartition(".")[0] for directory in (self.directory / "attempts").iterdir()}

    def remove_job(self, job: str) -> int:
        """Remove logs and steps of all attempts of a job; returns the bytes freed."""
        freed = 0
        for directory in (self.directory / "attempts").glob(f"{job}.*"):
            freed += sum(file.stat().st_size for file in directory.iterdir())
            shutil.rmtree(directory)
        return freed

    def workdirs(self) -> list[tuple[str, float]]:
        """Digests of the packed workdirs, and when each was stored last."""
        return [(file.stem, file.stat().st_mtime) for file in (self.directory / "snapshots").glob("*.tar")]

    def remove_workdir(self, digest: str) -> int:
        """Remove a packed workdir; returns the bytes freed."""
        file = self._snapshot(digest)
        freed = file.stat().st_size if file.exists() else 0
        file.unlink(missing_ok=True)
        return freed


def _last_step(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    lines = file.read_bytes().splitlines()
    last = next(filter(None, map(_step, reversed(lines))), None)
    first = next(filter(None, map(_step, lines)), None)
    if last is None or first is None:
        return None
    return {**last, "first_loss": first.get("loss") if first["step"] == 1 else None}


def _step(line: bytes) -> dict[str, Any] | None:
    """Parse a line of steps.jsonl; None for other lines: the note of a restart, or a truncated line."""
    try:
        step = json.loads(line)
    except ValueError:
        return None
    return step if isinstance(step, dict) and {"step", "time_s"} <= step.keys() else None


def _begin(log: Path) -> Path:
    return log.with_suffix(".begin")


def _tail(log: Path) -> Path:
    return log.with_suffix(".tail")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def make_durable(partial: Path, target: Path) -> None:
    """Rename a complete file to `target`, so that both the file and its name survive a power failure."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    sync_directory(target.parent)


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target.write_bytes(data)


def _replace_atomically(target: Path, data: bytes) -> None:
    """Replace `target` atomically."""
    partial = target.with_name(f"{target.name}.partial")
    _write(partial, data)
    partial.replace(target)


EVERY_S = 20.0
TAIL_BYTES = 64 << 10
"""Bytes copied of each rank's log; the archive fetches the log itself when the rank has ended."""

Which = tuple[str, int, int, int]
"""Job, attempt, generation, rank."""


class LogTails:
    """Copies the log tails of all running attempts."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine = engine
        self._hosts = hosts
        self._archive = archive
        self._ends: dict[Which, int] = {}

    async def run(self) -> None:
        """Copy tails every `EVERY_S` seconds until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Copy the tails of logs that have grown; hosts are asked concurrently, so that a slow one delays no other."""
        by_host = self._running()
        known = {which for ranks in by_host.values() for which in ranks}
        self._ends = {which: end for which, end in self._ends.items() if which in known}
        async with anyio.create_task_group() as group:
            for host, ranks in by_host.items():
                group.start_soon(self._copy_tails, host, ranks)

    def _running(self) -> dict[HostId, list[Which]]:
        state = self._engine.state
        found: dict[HostId, list[Which]] = {}
        for job in state.active:
            attempt: Attempt | None = state.jobs[job].attempt
            if attempt is None or attempt.state is not AttemptState.RUNNING:
                continue
            for number, rank in attempt.ranks.items():
                if rank.end is None and state.hosts[rank.place.host].reaches(attempt.account):
                    which = (attempt.job, attempt.number, attempt.generation, number)
                    found.setdefault(rank.place.host, []).append(which)
        return found

    async def _copy_tails(self, host: HostId, ranks: list[Which]) -> None:
        for which in ranks:
            try:
                await self._copy(host, which)
            except ClusterError as error:
                log.debug("%s: the log tail of %s.%d: %s", host, *which[:2], error)  # not started yet, or host lost
            except OSError as error:
                log.warning("cannot store the log tail of %s.%d: %s", *which[:2], error)

    async def _copy(self, host: HostId, which: Which) -> None:
        names = dict(zip(("job", "attempt", "generation", "rank"), which, strict=True))
        size = (await self._pull(host, names, 0, 0)).size
        if size == self._ends.get(which, 0):
            return
        begin = max(size - TAIL_BYTES, 0)
        answer = await self._pull(host, names, begin, TAIL_BYTES)
        end = answer.offset
        await self._archive.write_tail(*which, Tail(begin, end, answer.data))
        self._ends[which] = end

    async def _pull(self, host: HostId, names: dict[str, Any], offset: int, limit: int) -> Chunk:
        return await self._hosts.request(host, ReadLog(offset=offset, limit=limit, **names))
