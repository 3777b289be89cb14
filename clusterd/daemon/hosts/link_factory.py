"""Links to agents by the kind of their host: reached over SSH, embedded, which are started here, or dialing in."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from clusterd.config import Config, HostOptions
from clusterd.core.state import State
from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.hosts.registry import JOINED, LOCAL, HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.protocol.proof import proof
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost, shared_out
from clusterd.ssh.host import HostLink, Leader, LinkCallbacks, LinkState
from clusterd.ssh.hostkeys import LoginKey
from clusterd.ssh.joined import JoinedDialer
from clusterd.ssh.resolve import Route
from clusterd.types import HostId

HEARTBEAT_MIN_S = 20.0
"""Shortest silence of an agent that counts as a hang, whatever `host_lost_after` is: hosts are busy at times."""


class LinkFactory:
    """Makes the link to an agent by the kind of its host's address and by its account.

    Args:
        embedded: servers of the embedded hosts, by number.
    Attributes:
        joined_dialers: of hosts that dial in, where their links wait for connections.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        leader: Leader,
        dialer: Dialer,
        enrolment: HostKeyEnrolment,
        login_key: LoginKey,
        embedded: Mapping[int, EmbeddedHost],
    ) -> None:
        self.joined_dialers: defaultdict[HostId, JoinedDialer] = defaultdict(JoinedDialer)
        self._config, self._engine = config, engine
        self._dialer, self._enrolment, self._login_key, self._embedded = dialer, enrolment, login_key, embedded
        self._leader = leader
        self._lost_after_s = max(config.host_lost_after_s, HEARTBEAT_MIN_S)

    def make(self, host: HostId, address: str, account: str, callbacks: LinkCallbacks) -> HostLink:
        """Make the link to an account's agent on a host ("": the daemon's own); it dials once it runs."""
        if account:
            return self._of_account(host, address, account, callbacks)
        if address.startswith(JOINED):
            return self._of_joined(host, address, callbacks)

        async def route() -> Route:
            if address.startswith(LOCAL):
                return self._embedded[int(address.removeprefix(LOCAL))].route
            return await self._enrolment.route(address)

        return HostLink(host, route, self._dialer, self._leader, callbacks, lost_after_s=self._lost_after_s)

    def _of_account(self, host: HostId, address: str, account: str, callbacks: LinkCallbacks) -> HostLink:
        becomes = self._config.become == "sudo"

        async def route() -> Route:
            found = await self._enrolment.route(address)
            return found if becomes else self._login_key.route(found, account)

        def home() -> str:
            given = self._config.hosts.get(host, HostOptions()).agent_home or ""
            return given if not given or given.startswith("~") else f"{given}/{account}"

        return HostLink(
            host,
            route,
            self._dialer,
            replace(self._leader, key=proof(self._leader.key, "account", account)),
            replace(callbacks, home_source=home),
            lost_after_s=self._lost_after_s,
            become=account if becomes else "",
        )

    def _of_joined(self, host: HostId, address: str, callbacks: LinkCallbacks) -> HostLink:
        async def route() -> Route:
            return Route(name=host, host="", port=0, user="")  # never dialed

        told = callbacks.on_state

        def on_state(state: LinkState) -> None:
            told(state)
            if state.name == "closed" and host not in self._engine.state.hosts:
                self._end_removed(host)

        key = proof(self._leader.key, "joined", address)  # who runs the host's command gets its key alone
        leader, callbacks = replace(self._leader, key=key), replace(callbacks, on_state=on_state)
        return HostLink(host, route, self.joined_dialers[host], leader, callbacks, lost_after_s=self._lost_after_s)

    def _end_removed(self, host: HostId) -> None:
        """Tell a host that dialed in that it was removed, and end its connection."""
        dialer = self.joined_dialers.pop(host, None)
        if dialer is not None and dialer.current is not None:
            dialer.current.send({"removed": True})
            dialer.current.end()


log = logging.getLogger(__name__)

DEVICES = 2
"""Default number of CPU devices of a new embedded host."""


@asynccontextmanager
async def local_hosts(
    hosts: HostRegistry,
    state: State,
    directory: Path,
    count: int,
    devices: int | None,
    servers: dict[int, EmbeddedHost],
) -> AsyncIterator[None]:
    """Start the servers of known embedded hosts and of the first `count`, then dial every host of the cluster.

    Args:
        devices: of each of the first `count`; None: what it has, or the default. One with jobs keeps what it has.
        servers: is filled, by number.
    """
    known = {
        int(address.removeprefix(LOCAL)): options
        for _, address, options in await hosts.known()
        if address.startswith(LOCAL)
    }
    offered = dict(known)
    for number in range(count):
        if number not in known:
            offered[number] = HostOptions(cpu_devices=devices or DEVICES)
        elif devices is not None and not any(state.attempts_on(_name(number))):
            offered[number] = replace(known[number], cpu_devices=devices)
    numbers = sorted(offered)
    most = max((options.cpu_devices or DEVICES for options in offered.values()), default=DEVICES)
    cores = shared_out(sorted(os.sched_getaffinity(0)), len(numbers), most)
    async with AsyncExitStack() as stack:
        for number, own in zip(numbers, cores, strict=True):
            server = EmbeddedHost(_name(number), directory / str(number), cores=own)
            await server.start()
            stack.push_async_callback(server.stop)
            servers[number] = server
        for number in _changed(known, offered):
            log.info("%s offers %s CPU devices from now on", _name(number), offered[number].cpu_devices)
            await hosts.keep_options(_name(number), offered[number])
        await hosts.restore()
        for number in range(count):
            if _name(number) not in state.hosts:
                options = offered[number] if any(cores) else replace(offered[number], cores_per_device=1)
                await hosts.add(_name(number), f"{LOCAL}{number}", options)
        yield


def _changed(known: dict[int, HostOptions], offered: dict[int, HostOptions]) -> Iterable[int]:
    return [number for number, options in known.items() if offered[number] != options]


def _name(number: int) -> HostId:
    return HostId(f"local{number}")
