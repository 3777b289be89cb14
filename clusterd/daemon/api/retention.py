"""Verbs about stored files: removal of those of jobs that are over, and backups of the head node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import anyio.to_thread

from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.access import Peer
from clusterd.daemon.api.server import Verb
from clusterd.daemon.api.workdirs import WorkdirVerbs
from clusterd.daemon.hosts.facts import DESCRIPTION
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive
from clusterd.daemon.storage.backups import Backups
from clusterd.errors import ClusterError, UsageError, without_host
from clusterd.protocol.requests import ForgetAttempt
from clusterd.types import HostId, HostState, JobKind

EVERY_MIN_S = 10.0
"""Shortest time between repeated backups."""


class RetentionVerbs:
    """Removes logs, step files and working directories; the job's row stays."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive, workdirs: WorkdirVerbs) -> None:
        self._engine, self._hosts, self._archive, self._workdirs = engine, hosts, archive, workdirs

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"forget": self.forget}

    async def forget(self, peer: Peer, job: str) -> dict[str, Any]:
        """Remove one job's files; returns the bytes freed and the hosts that still have some, with the reason."""
        state = self._engine.scheduler.state
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

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"backup": self.backup, "backups": self.backups}

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
