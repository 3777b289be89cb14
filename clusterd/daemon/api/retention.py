"""Removal of files of jobs that are over, on hosts and on the head node: `clusterd forget`."""

from __future__ import annotations

from typing import Any

import anyio.to_thread

from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.api.server import Peer, Verb
from clusterd.daemon.hosts.facts import DESCRIPTION
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import ClusterError, without_host
from clusterd.protocol.requests import ForgetAttempt
from clusterd.types import HostId, HostState, JobKind


class RetentionVerbs:
    """Removes logs, step files and working directories; the job's row stays."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine, self._hosts, self._archive = engine, hosts, archive

    @property
    def verbs(self) -> dict[str, Verb]:
        """Methods by verb."""
        return {"forget": self.forget}

    async def forget(self, peer: Peer, job: str) -> dict[str, Any]:
        """Remove one job's files; returns the bytes freed and the hosts that still have some, with the reason."""
        state = self._engine.scheduler.state
        known = admission.find_own_job(state, job, peer.user, peer.is_operator)
        if not known.state.is_final:
            raise ClusterError(f"{known.spec.name} is {known.state.value}: it is forgotten when it is over")
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
        needed = any(j.spec.snapshot == known.spec.snapshot and not j.state.is_final for j in state.jobs.values())
        if known.spec.snapshot and not needed:
            freed += await anyio.to_thread.run_sync(self._archive.remove_snapshot, known.spec.snapshot)
        return {"job": known.id, "name": known.spec.name, "bytes": freed, "left": left}


def _places(job: Job, state: State) -> list[tuple[int, HostId]]:
    """Hosts that may have files of each attempt, by number."""
    places = [(attempt.number, host) for attempt in job.attempts for host in hosts_of(job, attempt)]
    if job.spec.kind is JobKind.ELASTIC:  # whoever told its model is not written down; who is away tidies up by itself
        places += [(DESCRIPTION, host.id) for host in state.hosts.values() if host.state is HostState.UP]
    return places


def hosts_of(job: Job, attempt: Attempt) -> list[HostId]:
    """Hosts of every generation of an attempt."""
    hosts = {*attempt.hosts, *(host for ranks in attempt.hosts_by_generation.values() for host in ranks.values())}
    return sorted(hosts | {place.host for move in job.migrations for place in move.places})
