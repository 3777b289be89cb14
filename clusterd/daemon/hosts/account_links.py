"""Links to the agents of people's own accounts: one for each host and account, beside the daemon's own.

A person controls their agent, so it is believed about jobs of its account only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from clusterd.core import events as e
from clusterd.core.lifecycle.reconcile import needs_action
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.launch_records import LaunchRecord, secret_rows
from clusterd.daemon.hosts.links import DroppedMessages, LinkFailures, keep_running, shut_down
from clusterd.daemon.hosts.reports import HostDown, HostUp, Reports
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.process import guarded
from clusterd.errors import HostError, without_host
from clusterd.protocol import ProtocolError, agent
from clusterd.protocol.messages import from_map
from clusterd.ssh.host import HostLink, LinkCallbacks, LinkState
from clusterd.types import AttemptReport, HostId

log = logging.getLogger(__name__)

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
        on_gpu_use: called with a host on which other ranks of an account use GPUs than before.
        adoptable: returns the records of jobs that are newer than the state, by host, account and reports.
    """

    def __init__(
        self,
        engine: Engine,
        reports: Reports,
        tasks: anyio.abc.TaskGroup,
        make_link: MakeLink,
        on_gpu_use: Callable[[HostId], Awaitable[None]],
        adoptable: Callable[[HostId, str, Iterable[AttemptReport]], Awaitable[list[LaunchRecord]]],
    ) -> None:
        self._engine, self._reports, self._tasks = engine, reports, tasks
        self._state = engine.state
        self._make_link, self._on_gpu_use, self._adoptable = make_link, on_gpu_use, adoptable
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
