"""Which agent is which host's: under two names a machine would be offered twice, and each end the other's jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clusterd.core.state import Host
from clusterd.errors import HostError
from clusterd.types import HostId


def identity(hello: Mapping[str, Any]) -> str:
    """Of an agent: its directory's, on this boot of this machine, for directories are cloned and shared."""
    return f"{hello['agent']}@{hello.get('machine') or hello['boot_id']}"  # agents of earlier versions name no machine


class Agents:
    """Each belongs to the host that had it first."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        """`hosts`: in the order in which they were added, with the agents that they had before."""
        self._owners: dict[str, HostId] = {}
        for host in hosts:
            self._owners.setdefault(host.agent, host.id)

    def claim(self, host: HostId, agent: str) -> None:
        """The host's agent is this one now.

        Raises:
            HostError: it is another host's.
        """
        owner = self._owners.get(agent, host)
        if owner != host:
            raise HostError(f"it is {owner} under another name (its agent answers): clusterd host remove {host}")
        self.release(host)
        self._owners[agent] = host

    def release(self, host: HostId) -> None:
        """The host's agent may be another host's from now on."""
        self._owners = {agent: owner for agent, owner in self._owners.items() if owner != host}
