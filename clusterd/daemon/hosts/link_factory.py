"""Construction of links to agents: on hosts reached over SSH, on embedded hosts, and on hosts that dial in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from clusterd.config import Config, HostOptions
from clusterd.daemon.hosts.host_key_enrolment import HostKeyEnrolment
from clusterd.daemon.hosts.registry import JOINED, LOCAL
from clusterd.daemon.journal.engine import Engine
from clusterd.protocol.proof import proof
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.host import HostLink, Leader, LinkCallbacks, LinkState
from clusterd.ssh.joined import JoinedDialer
from clusterd.ssh.login_key import LoginKey
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
            if state.name == "closed" and host not in self._engine.scheduler.state.hosts:
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
