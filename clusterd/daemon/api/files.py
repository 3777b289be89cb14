"""Verbs about stored files: listing and reading those of jobs, wherever they are; their removal; backups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import anyio.to_thread

from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.access import Peer
from clusterd.daemon.api.workdirs import WorkdirVerbs
from clusterd.daemon.hosts.facts import DESCRIPTION
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive
from clusterd.daemon.storage.backups import Backups
from clusterd.errors import AgentLost, ClusterError, TryLater, UsageError, without_host
from clusterd.protocol.messages import to_map
from clusterd.protocol.requests import ForgetAttempt, ListFiles, ReadFile
from clusterd.ssh.host import AgentRefused
from clusterd.types import HostId, HostState, JobId, JobKind

CHUNK_BYTES = 1 << 20


class FileVerbs:
    """Lists and reads files of one job, its newest attempt first."""

    def __init__(self, engine: Engine, hosts: HostRegistry) -> None:
        self._engine, self._hosts = engine, hosts

    async def files(self, peer: Peer, job: str, after: str = "") -> dict[str, Any]:
        """Newest file of each path over all attempts, and the hosts that could not be asked, with the reason.

        What several hosts of a command wrote under one path are several files. `more` are left out: they follow
        `after` the last path. `name` is the path itself where it has letters that are shown escaped.
        """
        known = self._own(peer, job)
        state = self._engine.state
        newest: dict[tuple[str, bytes], list[dict[str, Any]]] = {}
        left: dict[str, str] = {}
        more, ends = 0, []
        for attempt in known.attempts:
            for host in hosts_of(known, attempt):
                here = state.hosts.get(host)
                if here is None or not here.reaches(attempt.account):
                    left[host] = here.why_away(attempt.account) if here is not None else "it was removed"
                    continue
                try:
                    answer = await self._hosts.request(host, ListFiles(known.id, attempt.number, after), timeout_s=None)
                except ClusterError as error:
                    if not (isinstance(error, AgentRefused) and error.kind == "unknown"):  # it was never launched there
                        left[host] = without_host(host, error)
                    continue
                more += answer.more
                ends += [answer.files[-1].path] if answer.more and answer.files else []
                for file in answer.files:
                    row = {**to_map(file), "host": host, "attempt": attempt.number}
                    before = newest.setdefault((file.path, file.name), [row])
                    if known.spec.kind is JobKind.COMMAND and before[0]["attempt"] == attempt.number:
                        mark = file.at_s, file.inode
                        if mark not in [(other["at_s"], other["inode"]) for other in before]:  # else it is one file
                            before.append(row)
                    elif before[-1]["at_s"] <= file.at_s:
                        newest[file.path, file.name] = [row]
        rows = [row for key in sorted(newest) for row in newest[key] if row["path"] > after]
        end = min(ends, default="")  # behind it the list of that host has gaps
        files = [row for row in rows if not end or row["path"] <= end]
        return {
            "job": known.id,
            "name": known.spec.name,
            "files": files,
            "more": more + len(rows) - len(files),
            "left": left,
            "continues": _predecessor(known, state),
        }

    async def file(
        self, peer: Peer, job: str, path: str, host: str, attempt: int, written: bool = False, name: bytes = b""
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream one file in chunks: ``{data, size}``; `written`: only one that is not as it was submitted.

        `name`: of its row, in the place of the path.
        """
        known = self._own(peer, job)
        if not any(attempt == one.number and host in hosts_of(known, one) for one in known.attempts):
            raise ClusterError(f"attempt {attempt} of job {known.id} ({known.spec.name}) was never on {host}")
        offset = 0
        while True:
            try:
                wanted = ReadFile(known.id, attempt, path, offset, CHUNK_BYTES, written, name)
                piece = await self._hosts.request(HostId(host), wanted)
            except AgentLost as lost:
                raise TryLater(f"{path} is not copied, {host} went away in the middle of it: {lost}") from None
            yield {"data": piece.data, "size": piece.size}
            offset += len(piece.data)
            if not piece.data or offset >= piece.size:
                return

    def _own(self, peer: Peer, job: str) -> Job:
        return admission.find_own_job(self._engine.state, job, peer.user, peer.is_operator)


EVERY_MIN_S = 10.0
"""Shortest time between repeated backups."""


class RetentionVerbs:
    """Removes logs, step files and working directories; the job's row stays."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive, workdirs: WorkdirVerbs) -> None:
        self._engine, self._hosts, self._archive, self._workdirs = engine, hosts, archive, workdirs

    async def forget(self, peer: Peer, job: str) -> dict[str, Any]:
        """Remove one job's files; returns the bytes freed and the hosts that still have some, with the reason."""
        state = self._engine.state
        known = admission.find_own_job(state, job, peer.user, peer.is_operator, ends=True)
        if not known.state.is_final:
            raise ClusterError(
                f"job {known.id} ({known.spec.name}) is {known.state.value}: nothing was deleted; "
                f"clusterd cancel {known.id} ends it, and its files can be deleted then"
            )
        freed = 0
        left: dict[str, str] = {}
        for number, host in _places(known, state):
            if host not in state.hosts:
                continue
            if not state.hosts[host].reaches(known.spec.account):
                left[host] = state.hosts[host].why_away(known.spec.account)
                continue
            try:
                answer = await self._hosts.request(host, ForgetAttempt(known.id, number), timeout_s=None)
            except ClusterError as error:
                left[host] = without_host(host, error)
            else:
                freed += answer.bytes
        freed += await anyio.to_thread.run_sync(self._archive.remove_job, known.id)
        if known.spec.snapshot:
            freed += self._workdirs.remove(known.spec.snapshot)
        return {"job": known.id, "name": known.spec.name, "bytes": freed, "left": left}


class BackupVerbs:
    """Writes backups on request, and shows those that are repeated.

    Who has a backup can lead the hosts: it is for the daemon's own account alone.
    """

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    async def backup(self, peer: Peer, to: str, every_s: float | None = None) -> dict[str, Any]:
        """Write a backup to a directory or HOST:DIRECTORY, and repeat it every so often; `every_s` of 0 ends that."""
        if every_s is not None and every_s <= 0:
            await self._backups.end(to)
            return {"to": to}
        if every_s is not None and every_s < EVERY_MIN_S:
            raise UsageError(f"backups cannot be repeated more often than every {EVERY_MIN_S:.0f} s")
        answer = await self._backups.write(to)
        if every_s is not None:
            await self._backups.repeat(to, every_s)
            self._backups.repeated[to].event = answer["event"]
        return answer

    async def backups(self, peer: Peer) -> list[dict[str, Any]]:
        """Targets of repeated backups, with the last complete one and the trouble since."""
        return [{"to": to, **asdict(state)} for to, state in sorted(self._backups.repeated.items())]


def _predecessor(job: Job, state: State) -> JobId | None:
    """Job whose training a resumed one goes on with: the newest before it, as it knows the first alone."""
    first = job.spec.continues
    before = [
        (other.submitted_s, other.id)
        for other in state.jobs.values()
        if first is not None and first in (other.id, other.spec.continues) and other.submitted_s < job.submitted_s
    ]
    return max(before)[1] if before else first


def _places(job: Job, state: State) -> list[tuple[int, HostId]]:
    """Hosts that may have files of each attempt, by number."""
    places = [(attempt.number, host) for attempt in job.attempts for host in hosts_of(job, attempt)]
    if job.spec.kind is JobKind.ELASTIC:  # whoever told its model is not written down; who is away tidies up by itself
        places += [(DESCRIPTION, host.id) for host in state.hosts.values() if host.state is HostState.UP]
    return places


def hosts_of(job: Job, attempt: Attempt) -> list[HostId]:
    """Hosts of every generation of an attempt."""
    hosts = {*attempt.hosts, *(host for former in attempt.former.values() for host in former.hosts.values())}
    return sorted(hosts | {place.host for move in job.plan_changes for place in move.places})
