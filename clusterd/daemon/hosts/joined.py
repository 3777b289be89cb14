"""Hosts that dial in: admission, their connections, and their removal when they leave or stay away."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict

import anyio
import anyio.abc

from clusterd.config import HostOptions
from clusterd.core import events as e
from clusterd.daemon.hosts.registry import JOINED, HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.process import guarded
from clusterd.errors import ClusterError, UsageError
from clusterd.protocol.requests import Shutdown
from clusterd.ssh.joined import JoinedConnection, JoinedDialer
from clusterd.types import AttemptState, HostId

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.2
SHUTDOWN_S = 5.0
MIGRATION_S = 10.0
"""Time for migrations off a host that leaves; Slurm gives 30 s between SIGTERM and SIGKILL."""

_IDENTITY = re.compile(r"[0-9a-f]{16,64}")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,60}[A-Za-z0-9_])?")


class JoinedHosts:
    """Registry of hosts that dial in.

    Such a host is recognised by an identity, which its command keeps in a file. It is removed once it has been away for
    as long as another host would be given up.

    Args:
        dialers: of these hosts, where their links wait for connections; entries are made here and by the links.
        lost_after_s: a host that is away for longer is removed.

    Attributes:
        ends_s: wall clock of the ends of hosts' allocations, as far as these have told them.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: HostRegistry,
        dialers: defaultdict[HostId, JoinedDialer],
        tasks: anyio.abc.TaskGroup,
        lost_after_s: float,
    ) -> None:
        self._engine, self._hosts, self._dialers, self._tasks = engine, hosts, dialers, tasks
        self._state = engine.state
        self._lost_after_s = lost_after_s
        self.ends_s: dict[HostId, float] = {}
        self._admission = anyio.Lock()
        self._by_peer: dict[int, tuple[HostId, JoinedConnection]] = {}  # by the number of the client's connection

    async def restore(self) -> None:
        """Give hosts of an earlier daemon time to come back."""
        for host, address, _ in await self._hosts.known():
            if address.startswith(JOINED) and self._dialers[host].current is None:
                self._watch(host, None)

    async def admit(self, identity: str, name: str, is_exact: bool, options: HostOptions) -> HostId:
        """Name of the host in the cluster, to which it is added unless it is part of it already.

        Args:
            is_exact: no other name will do, where a number would make it unique.
        Raises:
            UsageError: identity or name are malformed.
            ClusterError: there is another host of that name.
        """
        if not _IDENTITY.fullmatch(identity):
            raise UsageError(f"the identity {identity!r:.80} of the host is malformed")
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a host: letters, digits, '.', '_' and '-'")
        address = JOINED + identity
        async with self._admission:
            for known, at, _ in await self._hosts.known():
                if at == address and known in self._state.hosts:
                    return known
            host = self._free_name(name, is_exact)
            await self._hosts.add(host, address, options)
            log.info("%s dialed in", host)
            return host

    def _free_name(self, name: str, is_exact: bool) -> HostId:
        known = self._state.hosts
        if is_exact and name in known:
            raise ClusterError(f"{name} is in the cluster already: give another --name, or clusterd host remove {name}")
        names = (name if number == 1 else f"{name}-{number}" for number in range(1, len(known) + 2))
        return HostId(next(each for each in names if each not in known))

    def connect(self, host: HostId, peer: int, until_s: float | None) -> JoinedConnection:
        """Make a client's connection that of a host, in the place of an earlier one; `until_s`: see `ends_s`."""
        self.ends_s.pop(host, None)
        if until_s is not None:
            self.ends_s[host] = until_s
        connection = self._dialers[host].offer()
        self._by_peer[peer] = host, connection
        self._hosts.retry_now(host)
        return connection

    def of_peer(self, peer: int) -> tuple[HostId, JoinedConnection]:
        """Host that joined over a client's connection.

        Raises:
            UsageError: none did.
        """
        if peer not in self._by_peer:
            raise UsageError("no host joined over this connection")
        return self._by_peer[peer]

    def gone(self, peer: int) -> None:
        """Handle the end of a client's connection."""
        if (found := self._by_peer.pop(peer, None)) is not None:
            host, connection = found
            connection.end()
            self._watch(host, connection)

    def _watch(self, host: HostId, connection: JoinedConnection | None) -> None:
        self._tasks.start_soon(guarded, self._remove_when_lost, host, connection)

    async def _remove_when_lost(self, host: HostId, connection: JoinedConnection | None) -> None:
        """Remove a host that stays away; its ranks were given up by then."""
        await anyio.sleep(self._lost_after_s)
        while host in self._state.hosts and self._dialers[host].current is connection:
            await self._hosts.remove(host)
            if host not in self._state.hosts:
                log.info("%s was removed: it has not dialed in for %.0f s", host, self._lost_after_s)
                return
            await anyio.sleep(CHECK_EVERY_S)

    async def leave(self, host: HostId, user: str) -> None:
        """Take a host out of the cluster: its jobs are stopped and queued again, and its agent is shut down.

        A job that is being migrated off it has a while to finish that.
        """
        state = self._state
        await self._engine.post(e.HostDrained(at_s=time.time(), host=host, by=user, why="it leaves the cluster"))
        migrated_by_s = time.monotonic() + MIGRATION_S
        while host in state.hosts:
            await self._requeue(host, time.monotonic() > migrated_by_s)
            if any(state.attempts_on(host)):
                await anyio.sleep(CHECK_EVERY_S)
                continue
            try:  # what is left there inspects models for jobs, which is repeated elsewhere
                await self._hosts.request(host, Shutdown(force=True), SHUTDOWN_S)
            except ClusterError as error:
                log.info("the agent of %s was not shut down: %s", host, error)
            await self._hosts.remove(host)

    async def _requeue(self, host: HostId, is_late: bool) -> None:
        """Stop the jobs on a host and queue them again, those in a migration once it is late."""
        by = f"{host}, which leaves the cluster"
        for attempt in list(self._state.attempts_on(host)):
            # Source ranks of a migration that has switched are stopped anyway.
            leaves = host in attempt.hosts and (attempt.migration is None or is_late)
            if leaves and attempt.state is not AttemptState.STOPPING:
                await self._engine.post(e.JobRequeued(at_s=time.time(), job=attempt.job, by=by))
