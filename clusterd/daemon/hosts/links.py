"""Links to agents, as the registry and the accounts both use them: kept running, counted, shut down, told apart."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import anyio

from clusterd.core.host import Host
from clusterd.errors import ClusterError, HostError
from clusterd.protocol import agent
from clusterd.ssh.host import HostLink
from clusterd.types import HostId

log = logging.getLogger(__name__)

LINK_FAILED_PAUSE_S = 5.0
SHUTDOWN_S = 5.0


REASONS_MAX = 8
"""Reasons of a link's failures that are journaled until it is up again; a host may give another one each time."""


@dataclass(slots=True)
class LinkFailures:
    """Failures of a link since it was up: all of them are counted, and each new reason is journaled once."""

    times: int = 0
    since_s: float = 0.0
    why: str = ""  # the newest reason
    journaled: set[str] = field(default_factory=set)

    def add(self, why: str) -> bool:
        """Count a failure; True: the journal does not hold its reason yet."""
        self.times, self.why, self.since_s = self.times + 1, why, self.since_s or time.time()
        is_new = why not in self.journaled and len(self.journaled) < REASONS_MAX
        self.journaled |= {why} if is_new else set()
        return is_new

    def to_row(self) -> dict[str, object]:
        """The failures as one row, for display."""
        return {"times": self.times, "since_s": self.since_s, "why": self.why}


async def keep_running(link: HostLink, stop: anyio.CancelScope) -> None:
    """Run a link until its scope is cancelled.

    One agent's message must not end the daemon: after an unexpected error the link starts over, and the agent reports
    again.
    """
    with stop:
        while True:
            try:
                await link.run()
            except Exception:
                log.exception("the link to %s failed", link.name)
                await anyio.sleep(LINK_FAILED_PAUSE_S)


async def shut_down(link: HostLink) -> bool:
    """Shut down an agent; False while it cannot be reached."""
    with anyio.move_on_after(SHUTDOWN_S):
        try:
            await link.request("shutdown", timeout_s=SHUTDOWN_S, force=False)
            return True
        except ClusterError as error:
            log.info("an agent of %s was not shut down: %s", link.name, error)
    return False


async def ip_address(host: str) -> str:
    """IPv4 address of a host name; the name itself where only a jump host can resolve it."""
    try:
        found = await anyio.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return host
    return str(found[0][4][0])


class DroppedMessages:
    """Log of messages that were not handled, by sender."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def add(self, sender: str, why: object) -> None:
        """Log a dropped message: the 1st, 2nd, 4th, ... of a sender, as a job must not fill the log either."""
        self._count[sender] += 1
        if self._count[sender].bit_count() == 1:
            log.warning("%s: dropped a malformed message (%d so far): %s", sender, self._count[sender], why)


def agent_identity(hello: agent.HelloReply) -> str:
    """Identity of an agent: its directory's, on this boot of this machine, as directories are cloned and shared."""
    return f"{hello.agent}@{hello.machine or hello.boot_id}"


class AgentOwners:
    """Host of each agent: under two names a machine would be offered twice, and each would end the other's jobs."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        """Start from the agents that hosts had before; an agent belongs to the host that had it first."""
        self._owners: dict[str, HostId] = {}
        for host in hosts:
            self._owners.setdefault(host.agent, host.id)

    def check(self, host: HostId, identity: str) -> None:
        """Check that an agent may become this host's; one that is led already would leave its other link.

        Raises:
            HostError: it is another host's.
        """
        owner = self._owners.get(identity, host)
        if owner != host:
            raise HostError(f"it is {owner} under another name (its agent answers): clusterd host remove {host}")

    def claim(self, host: HostId, identity: str) -> None:
        """Make an agent this host's.

        Raises:
            HostError: as `check`.
        """
        self.check(host, identity)
        self.release(host)
        self._owners[identity] = host

    def release(self, host: HostId) -> None:
        """Forget the host's agent; another host may have it."""
        self._owners = {agent: owner for agent, owner in self._owners.items() if owner != host}
