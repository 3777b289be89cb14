"""Enrolment of host keys: a host's identity is confirmed before anything is sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterd.core.state import State
from clusterd.errors import ClusterError
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.hostkeys import Changed, Unknown
from clusterd.ssh.resolve import Route, parse_address, resolve
from clusterd.types import HostId


class HostKeyEnrolment:
    """Inspects host keys along a route and stores those that a user accepted.

    Args:
        embedded: hosts inside this machine, which no SSH configuration knows, by number.
    """

    def __init__(self, dialer: Dialer, ssh_config: Path | None, embedded: Mapping[int, EmbeddedHost]) -> None:
        self._dialer = dialer
        self._ssh_config = ssh_config
        self._embedded = embedded

    async def route(self, address: str) -> Route:
        """Route that ``ssh ADDRESS`` would take.

        Raises:
            UsageError: it is no address. HostError: ssh does not know the way.
        """
        return await resolve(parse_address(address), config=self._ssh_config)

    def name(self, address: str, state: State) -> HostId:
        """Name of the host in the cluster.

        Raises:
            UsageError: it is no address. ClusterError: there is a host of that name.
        """
        given = parse_address(address)
        name = HostId(given.host)
        if name in state.hosts:
            other = "; another port or account there needs a name of its own: Host in the SSH configuration"
            way = other if given.port or given.user else ""
            raise ClusterError(f"{name} is in the cluster already: clusterd host show {name}{way}")
        for number, server in self._embedded.items():
            if server.name == name:
                again = f"clusterd stop, then clusterd start --local {number + 1}, adds it again"
                raise ClusterError(f"{name} is a host inside this machine, which ssh does not reach: {again}")
        return name

    async def inspect(self, address: str, accept: list[str]) -> dict[str, Any]:
        """Unknown and changed keys on the route, up to the first such hop.

        What is behind an unknown jump host cannot be seen before that one is accepted; `accept` are the fingerprints
        that the person agreed to so far, which are kept.
        """
        route = await self.route(address)
        for hop in route.hops:
            verdict = await self._dialer.inspect(hop)
            if isinstance(verdict, Unknown):
                if verdict.fingerprint not in accept:
                    return {"unknown": [_shown(hop, verdict)], "changed": []}
                self._dialer.keys.accept(hop, verdict.key)
            elif isinstance(verdict, Changed):
                old = {"old_fingerprint": verdict.old.fingerprint, "place": verdict.old.place}
                return {"unknown": [], "changed": [_shown(hop, verdict) | old]}
        return {"unknown": [], "changed": []}

    async def admit(self, address: str, accept: list[str], state: State) -> HostId:
        """Name of the host in the cluster, once every key on the route is known.

        Raises:
            HostKeyUnknown, HostKeyChanged: of any hop; ClusterError: there is a host of that name.
        """
        name = self.name(address, state)
        route = await self.route(address)
        for hop in route.hops:
            verdict = await self._dialer.inspect(hop)
            if isinstance(verdict, Unknown) and verdict.fingerprint in accept:
                self._dialer.keys.accept(hop, verdict.key)
            elif isinstance(verdict, Unknown | Changed):
                raise verdict.error()
        return name

    async def trust(self, address: str, accept: list[str]) -> dict[str, Any]:
        """Replace known keys on the route by the current ones, if the user accepted them."""
        route = await self.route(address)
        for hop in route.hops:
            verdict = await self._dialer.inspect(hop)
            if isinstance(verdict, Unknown | Changed):
                if verdict.fingerprint not in accept:
                    raise verdict.error()
                self._dialer.keys.trust(hop, verdict.key)
        return {"trusted": accept}


def _shown(hop: Route, verdict: Unknown | Changed) -> dict[str, Any]:
    kind = verdict.key.get_algorithm().removeprefix("ssh-")
    return {"host": hop.name, "fingerprint": verdict.fingerprint, "kind": kind}
