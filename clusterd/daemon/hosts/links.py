"""Links to agents: of the daemon itself, and of people's own accounts, one for each host and account, beside it.

A person controls their agent, so it is believed about jobs of its account only.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.core.lifecycle.reconcile import needs_action
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.launch_records import LaunchRecord, secret_rows
from clusterd.daemon.hosts.reports import HostDown, HostUp, Reports
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.process import guarded
from clusterd.errors import ClusterError, HostError, without_host
from clusterd.protocol import ProtocolError, agent
from clusterd.protocol.messages import from_map
from clusterd.ssh.host import HostLink, LinkCallbacks, LinkState
from clusterd.types import AttemptReport, HostId

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
    """Host and account of each agent: with two links to it, each would end the jobs of the other."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        """Start from the agents that hosts had before; an agent belongs to the host that had it first."""
        self._owners: dict[str, tuple[HostId, str]] = {}
        for host in hosts:
            self._owners.setdefault(host.agent, (host.id, ""))

    def check(self, host: HostId, identity: str, account: str = "") -> None:
        """Check that an agent may become this host's; one that is led already would leave its other link.

        Args:
            account: whose agent it is; "": the daemon's own.
        Raises:
            HostError: it is another host's.
        """
        owner, _ = self._owners.get(identity, (host, ""))
        if owner != host and account:
            raise HostError(f"the agent of {account} has one directory with {owner}'s: give one of them an agent_home")
        if owner != host:
            raise HostError(f"it is {owner} under another name (its agent answers): clusterd host remove {host}")

    def claim(self, host: HostId, identity: str, account: str = "") -> None:
        """Make an agent this host's.

        Raises:
            HostError: as `check`.
        """
        self.check(host, identity, account)
        self._owners = {agent: owner for agent, owner in self._owners.items() if owner != (host, account)}
        self._owners[identity] = (host, account)

    def release(self, host: HostId) -> None:
        """Forget the host's agents; another host may have them."""
        self._owners = {agent: owner for agent, owner in self._owners.items() if owner[0] != host}


DIAL_S = 20.0
"""Wait for the agents of accounts on a host that is removed, which nobody has dialed since the daemon's start."""

Message = dict[str, Any]


MakeLink = Callable[[HostId, str, str, LinkCallbacks], HostLink]
"""Makes a link to a host by its address, to the agent of an account there ("": the daemon's own)."""


@dataclass(slots=True)
class _Login:
    link: HostLink
    stop: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    gpu_pids: frozenset[int] = frozenset()  # its ranks on GPUs, which the daemon's own agent cannot tell
    failures: LinkFailures = field(default_factory=LinkFailures)
    tried: anyio.Event = field(default_factory=anyio.Event)  # set when the agent has answered, or could not be reached


class AccountLinks:
    """Links by host and account.

    Args:
        agents: hosts of all agents.
        on_gpu_use: called with a host on which other ranks of an account use GPUs than before.
        adoptable: returns the records of jobs that are newer than the state, by host, account and reports.
    """

    def __init__(
        self,
        engine: Engine,
        reports: Reports,
        tasks: anyio.abc.TaskGroup,
        make_link: MakeLink,
        agents: AgentOwners,
        on_gpu_use: Callable[[HostId], Awaitable[None]],
        adoptable: Callable[[HostId, str, Iterable[AttemptReport]], Awaitable[list[LaunchRecord]]],
    ) -> None:
        self._engine, self._reports, self._tasks = engine, reports, tasks
        self._state = engine.state
        self._make_link, self._agents = make_link, agents
        self._on_gpu_use, self._adoptable = on_gpu_use, adoptable
        self._logins: dict[tuple[HostId, str], _Login] = {}
        self._dropped = DroppedMessages()

    def get(self, host: HostId, account: str) -> HostLink | None:
        """The link to an account's agent on a host, if there is one."""
        login = self._logins.get((host, account))
        return login.link if login is not None else None

    def failures(self, host: HostId, account: str) -> dict[str, Any]:
        """Failures of an account's link since it was up, as a row; empty: there are none."""
        login = self._logins.get((host, account))
        return login.failures.to_row() if login is not None and login.failures.times else {}

    def gpu_pids(self, host: HostId) -> frozenset[int]:
        """Processes on a host's GPUs that are ranks of accounts."""
        return frozenset().union(*(login.gpu_pids for (at, _), login in self._logins.items() if at == host))

    def open(self, host: HostId, address: str, account: str) -> None:
        """Dial an account's agent on a host, and keep the link up, unless that is so already."""
        if (host, account) in self._logins:
            return

        def on_state(state: LinkState) -> None:
            if state.name == "waiting":
                why = without_host(host, HostError(state.why))
                is_new = login.failures.add(why)  # at once: whoever asked for this try reads its result next
                login.tried.set()
                self._tasks.start_soon(guarded, self._on_down, host, account, why, is_new)

        callbacks = LinkCallbacks(
            on_state=on_state,
            on_up=lambda message: self._on_up(host, account, message),
            on_event=lambda message: self._on_event(host, account, message),
            on_identity=lambda identity: self._agents.check(host, identity, account),
        )
        login = self._logins[host, account] = _Login(self._make_link(host, address, account, callbacks))
        self._tasks.start_soon(keep_running, login.link, login.stop)

    def retry_now(self, host: HostId, account: str) -> None:
        """Dial at once where the last try failed."""
        if (login := self._logins.get((host, account))) is not None and login.link.state.name == "waiting":
            login.link.retry_now()

    async def refuse(self, host: HostId, account: str, why: str) -> None:
        """Record that an account cannot log in on a host."""
        await self._engine.report(e.AccountDisconnected(at_s=time.time(), host=host, account=account, why=why))

    async def wait_until_tried(self, host: HostId) -> None:
        """Wait until each account's agent on a host has answered, or could not be reached."""
        with anyio.move_on_after(DIAL_S):
            for login in [login for (at, _), login in self._logins.items() if at == host]:
                await login.tried.wait()

    async def close(self, host: HostId) -> dict[str, str]:
        """Shut down the agents of all accounts on a host that is removed.

        Returns:
            Reason why an agent could not be reached, by account: it may still run there.
        """
        left: dict[str, str] = {}
        for key in [key for key in self._logins if key[0] == host]:
            login = self._logins.pop(key)
            if not await shut_down(login.link):
                left[key[1]] = login.failures.why or str(login.link.state)
            login.stop.cancel()
        return left

    async def _on_up(self, host: HostId, account: str, message: Message) -> None:
        try:
            hello = agent.hello_reply(message)
            self._logins[host, account].gpu_pids = _gpu_pids(hello.facts)
        except ProtocolError as error:
            raise HostError(f"the reply of the agent of {account} is malformed: {error}") from None
        self._agents.claim(host, agent_identity(hello), account)
        await self._reports.publish(host, HostUp(hello, account))
        reported = [facts.attempt_report(row) for row in hello.attempts if row.attempt != facts.DESCRIPTION]
        of = self._state.account_of
        may_be_mine = [r for r in reported if r.job not in self._state.jobs or of(r.job) == account]
        records = await self._adoptable(host, account, may_be_mine)
        adopted = {record.job.id for record in records}
        mine = (r for r in may_be_mine if r.job in adopted or of(r.job) == account)
        await self._engine.report(
            e.AccountConnected(
                at_s=time.time(),
                host=host,
                account=account,
                attempts=tuple(r for r in mine if r.job in adopted or needs_action(self._state, host, r)),
                adopted=tuple(record.job for record in records),
            ),
            secret_rows(records),
        )
        await self._reports.publish_orphaned(host, hello, lambda job: of(job) == account)
        login = self._logins[host, account]
        login.failures = LinkFailures()
        login.tried.set()
        await self._on_gpu_use(host)

    async def _on_down(self, host: HostId, account: str, why: str, is_new: bool) -> None:
        await self._reports.publish(host, HostDown(why, account))
        if is_new and (host, account) in self._logins:
            await self.refuse(host, account, why)

    async def _on_event(self, host: HostId, account: str, message: Message) -> None:
        try:
            report = agent.report(message)
            if isinstance(report, agent.FactsChanged):
                self._logins[host, account].gpu_pids = _gpu_pids(report.facts)
                await self._on_gpu_use(host)
                return
        except ProtocolError as error:
            self._dropped.add(f"the agent of {account} on {host}", error)
            return
        if isinstance(report, agent.Usage):  # of the host its own agent tells
            mine = tuple(use for use in report.attempts if self._state.account_of(use.job) == account)
            await self._reports.publish(host, agent.Usage(0, 0, 0, attempts=mine))
            return
        job = getattr(report, "job", None)
        if not isinstance(job, str) or (self._state.account_of(job) != account and job in self._state.jobs):
            self._dropped.add(f"the agent of {account} on {host}", f"it is about job {job}, which is not its own")
            return
        await self._reports.publish(host, report)


def _gpu_pids(reported: Message) -> frozenset[int]:
    gpus = from_map(agent.Facts, reported, "facts").gpus
    return frozenset(process.pid for gpu in gpus for process in gpu.processes if process.ours)
