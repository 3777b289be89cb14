"""Registry of the cluster's hosts: their links, requests to their agents, and their agents' reports as events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec

from clusterd.config import Config, HostOptions
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle.reconcile import needs_action
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.hosts.launch_records import LaunchRecord, LaunchRecords, secret_rows
from clusterd.daemon.hosts.links import (
    AccountLinks,
    AgentOwners,
    DroppedMessages,
    LinkFailures,
    MakeLink,
    agent_identity,
    ip_address,
    keep_running,
    shut_down,
)
from clusterd.daemon.hosts.reports import HostDown, HostUp, PendingReplies, Progress, Reports
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.journal.secrets_key import SECRETS_KEY, SecretsKey
from clusterd.daemon.process import guarded
from clusterd.errors import AgentLost, ClusterError, HostError
from clusterd.protocol import ProtocolError, agent, rank
from clusterd.protocol.launch import Address
from clusterd.protocol.messages import Request, from_map, to_map
from clusterd.protocol.requests import AdmitReaders, ServeDataset, ServeSegments
from clusterd.ssh.host import HostLink, LinkCallbacks, LinkState
from clusterd.types import AttemptReport, HostFacts, HostId, HostState, JobId

R = TypeVar("R")

log = logging.getLogger(__name__)

LOCAL = "local:"
"""Prefix of the address of an embedded host."""

JOINED = "joined:"
"""Prefix of the address of a host that dials in; its identity follows, which is no port of a host of that name."""

FORMER_TIMEOUT_S = 20.0

ONE_ACCOUNT = {
    LOCAL: "jobs on an embedded host run as the daemon's account alone",
    JOINED: "a host that dialed in runs jobs of the daemon's account alone",
}
"""Reason why no other account can log in, by the beginning of the host's address."""

WHY_MAX = 500
"""Characters of the failure of a checkpoint: ranks run code of users, and it is journaled and shown."""


@dataclass(slots=True)
class _Managed:
    link: HostLink
    address: str
    options: HostOptions
    stop: anyio.CancelScope
    facts: dict[str, Any] = field(default_factory=dict)
    outside: tuple[OutsideProcess, ...] = ()  # processes on its GPUs
    failures: LinkFailures = field(default_factory=LinkFailures)


class HostRegistry:
    """Hosts of the cluster with their links.

    Attributes:
        reports: subscriptions to what agents report.
        exits: exit reports of ranks that are no attempts of the scheduler's, by host, job and attempt.
        checkpoints: outcomes of checkpoints that a user asked for, by job and path.
        records: of launches, kept by agents.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        config: Config,
        tasks: anyio.abc.TaskGroup,
        make_link: MakeLink,
    ) -> None:
        self._engine, self._journal, self._config = engine, journal, config
        self._state = engine.state
        self._tasks, self._make_link = tasks, make_link
        self._managed: dict[HostId, _Managed] = {}
        self._agents = AgentOwners(engine.state.hosts.values())
        self._dropped = DroppedMessages()
        self._logged_in: set[str] = set()  # accounts whose agents are dialed on every host
        self.exits: PendingReplies[tuple[HostId, str, int], agent.RankExited] = PendingReplies()
        self.checkpoints: PendingReplies[tuple[str, str], rank.Checkpointed | rank.CheckpointFailed] = PendingReplies()
        self.reports = Reports()
        self.records = LaunchRecords(engine, journal, SecretsKey(config.state_dir / SECRETS_KEY))
        self.accounts = AccountLinks(
            engine, self.reports, tasks, make_link, self._agents, self._on_gpu_use, self.adoptable
        )
        self.reports.subscribe(agent.RankExited, self._on_rank_exited)
        self.reports.subscribe(HostDown, self._fail_waiting)
        self.reports.subscribe(rank.FromRank, self._on_rank_message)
        self.reports.subscribe(agent.FactsChanged, self._on_facts)
        self.reports.subscribe(agent.Progress, Progress(engine, tasks, self.request).on_progress)

    # --- membership ---------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Dial every host of the cluster again."""
        for name, address, options in await self.known():
            if name not in self._state.hosts:
                await self._drop_row(name)  # the daemon died between the event and its row
                continue
            self._manage(name, address, options)
        jobs = self._state.jobs.values()
        for account in sorted({job.spec.account for job in jobs if not job.state.is_final} - {""}):
            await self.log_in(account)

    async def log_in(self, account: str, again: bool = False) -> None:
        """Dial an account's agents on all hosts; each reports when it answers, or why it does not.

        Args:
            again: without waiting for the next try where the last one failed.
        """
        self._logged_in.add(account)
        for host in list(self._managed):
            await self._log_in_at(host, account)
            if again:
                self.accounts.retry_now(host, account)

    async def _log_in_at(self, host: HostId, account: str) -> None:
        address, known = self._managed[host].address, self._state.hosts.get(host)
        if known is None or not known.agent:
            return  # until it is up: it may be another host under a second name, with the same agents
        if why := next((why for prefix, why in ONE_ACCOUNT.items() if address.startswith(prefix)), ""):
            if known.logins.get(account) != why:
                await self.accounts.refuse(host, account, why)
        else:
            self.accounts.open(host, address, account)

    async def add(self, host: HostId, address: str, options: HostOptions) -> None:
        """Add a host to the cluster and dial it for as long as it is a member."""
        row = (host, address, msgspec.msgpack.encode(options))
        statement = ("INSERT OR REPLACE INTO hosts VALUES (?, ?, ?)", row)
        await self._engine.post(e.HostAdded(at_s=time.time(), host=host), [statement])
        self._manage(host, address, options)

    async def keep_options(self, host: HostId, options: HostOptions) -> None:
        """Store a host's options; they apply when it is dialed next."""
        row = (msgspec.msgpack.encode(options), host)
        await self._journal.execute([("UPDATE hosts SET options = ? WHERE name = ?", row)])

    async def remove(self, host: HostId) -> dict[str, str]:
        """Remove a host and shut its agents down; a host that runs something stays.

        Returns:
            Reason why an agent could not be reached, by account ("": the daemon's own); it may still run there.
        """
        managed, known = self._managed.get(host), self._state.hosts.get(host)
        if managed is not None and known is not None and managed.link.state.name == "up":
            for account in list(known.logins):  # since the daemon's start only those with jobs were dialed
                await self._log_in_at(host, account)
            await self.accounts.wait_until_tried(host)
        await self._engine.post(e.HostRemoved(at_s=time.time(), host=host))
        if host in self._state.hosts:
            return {}
        await self._drop_row(host)
        self._agents.release(host)
        managed = self._managed.pop(host, None)
        if managed is None:
            return {}  # a concurrent request removes it
        left = await self.accounts.close(host)
        if not await shut_down(managed.link):
            left[""] = str(managed.link.state)
        managed.stop.cancel()
        return left

    async def _drop_row(self, host: HostId) -> None:
        try:
            await self._journal.execute([("DELETE FROM hosts WHERE name = ?", (host,))])
        except ClusterError as error:
            log.error("the address of the removed host %s is dropped at the next start: %s", host, error)

    def _manage(self, host: HostId, address: str, options: HostOptions) -> None:
        options = self._config.hosts.get(host, options)
        callbacks = LinkCallbacks(
            on_state=lambda state: self.on_state(host, state),
            on_up=lambda message: self._on_up(host, message),
            on_event=lambda message: self.on_event(host, message),
            on_identity=lambda identity: self._agents.check(host, identity),
            home_source=lambda: self._agent_home(host),
        )
        managed = _Managed(self._make_link(host, address, "", callbacks), address, options, anyio.CancelScope())
        self._managed[host] = managed
        self._tasks.start_soon(keep_running, managed.link, managed.stop)

    # --- the link -----------------------------------------------------------------------------------------------------

    def on_state(self, host: HostId, state: LinkState) -> None:
        """Handle a step of the link; only one that broke, or could not be made, matters."""
        if state.name == "waiting":
            self._tasks.start_soon(guarded, self._on_down, host, state.why)

    async def _on_up(self, host: HostId, message: dict[str, Any]) -> None:
        """Handle the agent's reply to hello.

        Raises:
            HostError: it is another host's agent, or its reply is malformed.
        """
        managed = self._managed[host]
        route = managed.link.route
        reached_at = await ip_address(route.host) if route is not None and route.host else ""
        try:
            hello = agent.hello_reply(message)
            address = facts.address(hello.facts, reached_at)
            pids = self.accounts.gpu_pids(host)
            elsewhere = self._gpus_elsewhere(host, hello.boot_id)
            known = facts.host_facts(host, hello.facts, managed.options, address, pids, elsewhere)
        except ProtocolError as error:
            raise HostError(f"its agent's reply is malformed: {error}") from None
        identity = agent_identity(hello)
        self._agents.claim(host, identity)
        managed.facts = {**hello.facts, "clock_skew_s": message["clock_skew_s"]}
        await self.reports.publish(host, HostUp(hello))
        reported = [facts.attempt_report(row) for row in hello.attempts if row.attempt != facts.DESCRIPTION]
        records = await self.adoptable(host, "", reported)
        adopted = {record.job.id for record in records}
        state = self._state
        reports = tuple(r for r in reported if r.job in adopted or needs_action(state, host, r))
        home = managed.link.agent_home
        before = self._state.hosts[host].agent_home
        if before is not None and before != home:
            await self._end_former(managed.link, before)
        await self._engine.report(
            e.HostConnected(
                at_s=time.time(),
                host=host,
                facts=known,
                attempts=reports,
                agent=identity,
                agent_home=home,
                adopted=tuple(record.job for record in records),
            ),
            secret_rows(records),
        )
        managed.failures = LinkFailures()
        for account in sorted(self._logged_in):
            await self._log_in_at(host, account)
        await self.reports.publish_orphaned(host, hello, lambda job: state.account_of(job) == "")
        await self._on_gpu_use(host)  # an account's agent may have told of its ranks since `known` was made

    async def adoptable(self, host: HostId, account: str, reports: Iterable[AttemptReport]) -> list[LaunchRecord]:
        """Records of jobs of an account's agent that are newer than the state; see `LaunchRecords`."""
        return await self.records.adoptable(
            host, account, reports, lambda wanted: self.request(host, wanted, account=account)
        )

    def _agent_home(self, host: HostId) -> str:
        """Directory of the host's agent; "": its default.

        While ranks run there it is the one under which they were started: an agent in another directory does not know
        them, so that they would count as gone and run twice.
        """
        state = self._state
        managed, known = self._managed.get(host), state.hosts.get(host)
        wanted = managed.options.agent_home or "" if managed is not None else ""
        if known is None or known.agent_home is None or not any(state.attempts_on(host)):
            return wanted
        if known.agent_home != wanted:
            was = known.agent_home or "its default"
            log.info("%s: agent_home stays %s until its jobs are over", host, was)
        return known.agent_home

    async def _end_former(self, link: HostLink, home: str) -> None:
        """Shut down the agent in the former directory; its files stay there."""
        was = home or "the default place"
        try:
            with anyio.fail_after(FORMER_TIMEOUT_S):
                await link.end_former(home)
            log.info("%s: the agent at %s has ended; agent_home is %s", link.name, was, link.agent_home or "not set")
        except (ClusterError, TimeoutError) as error:
            log.warning("%s: if there is still an agent at %s, it stays: %s", link.name, was, error)

    async def _on_down(self, host: HostId, why: str) -> None:
        await self.reports.publish(host, HostDown(why))
        managed = self._managed.get(host)
        if managed is not None and managed.failures.add(why):
            await self._engine.report(e.HostDisconnected(at_s=time.time(), host=host, why=why))

    def _fail_waiting(self, host: HostId, report: HostDown) -> None:
        account_of = self._state.account_of
        self.exits.fail(lambda key: key[0] == host and account_of(key[1]) == report.account)

    # --- reports of agents --------------------------------------------------------------------------------------------

    async def on_event(self, host: HostId, message: dict[str, Any]) -> None:
        """Handle an unasked message of the host's agent; a malformed one is logged and dropped.

        Ranks run code of users, and their messages pass through their agent: nothing that a job sends may reach the
        scheduler unchecked, or cost other jobs the host's link.
        """
        try:
            await self.reports.publish(host, agent.report(message))
        except ProtocolError as error:
            self._dropped.add(host, error)

    async def _on_rank_exited(self, host: HostId, report: agent.RankExited) -> None:
        self.exits.resolve((host, report.job, report.attempt), report)
        if report.attempt == facts.DESCRIPTION or not self._is_news(report):
            return
        await self._engine.report(
            e.RankExited(
                at_s=time.time(),  # the scheduler has one clock: a host's may be hours off
                job=JobId(report.job),
                attempt=report.attempt,
                generation=report.generation,
                host=host,
                rank=report.rank,
                end=facts.rank_end(report),
            )
        )

    def _is_news(self, report: agent.RankExited) -> bool:
        """False for the exit of a rank that is over already: an agent may repeat it without end."""
        attempt = self._state.attempt(JobId(report.job), report.attempt)
        if attempt is None:
            return False
        if report.generation != attempt.generation:
            return attempt.migration is not None and attempt.migration.generation == report.generation
        known = attempt.ranks.get(report.rank)
        return known is not None and known.end is None

    async def _on_rank_message(self, host: HostId, report: rank.FromRank) -> None:
        match report.message:
            case rank.Orphaned() as orphaned:
                await self._engine.report(
                    e.RankOrphaned(
                        at_s=time.time(),
                        job=JobId(report.job),
                        attempt=report.attempt,
                        generation=report.generation,
                        rank=report.rank,
                        step=orphaned.step,
                        can_finish_step=orphaned.may_finish,
                        out_of_memory=orphaned.out_of_memory,
                    )
                )
            case rank.Checkpointed() as taken if report.rank == 0:
                await self._engine.report(
                    e.CheckpointTaken(
                        at_s=time.time(),
                        job=JobId(report.job),
                        attempt=report.attempt,
                        step=taken.step,
                        path=f"{host}:{taken.path}" if taken.on_host else taken.path,
                    )
                )
                self.checkpoints.resolve((report.job, taken.asked or taken.path), taken)
            case rank.CheckpointFailed() as failed if (report.job, failed.path) in self.checkpoints:
                self.checkpoints.resolve((report.job, failed.path), failed)
            case rank.CheckpointFailed() as failed if report.rank == 0:
                log.warning("%s.%d: step %d was not saved: %s", report.job, report.attempt, failed.step, failed.why)
                await self._engine.report(
                    e.CheckpointFailed(
                        at_s=time.time(),
                        job=JobId(report.job),
                        attempt=report.attempt,
                        step=failed.step,
                        why=failed.why[:WHY_MAX],
                    )
                )

    async def _on_facts(self, host: HostId, report: agent.FactsChanged) -> None:
        self._managed[host].facts = report.facts
        await self._on_gpu_use(host)

    async def _on_gpu_use(self, host: HostId) -> None:
        """Tell the scheduler of a host whose devices, or their use by foreign processes, changed."""
        managed = self._managed.get(host)
        known = self._state.hosts.get(host)
        if managed is None or known is None or known.facts is None or not managed.facts:
            return
        pids = self.accounts.gpu_pids(host)
        elsewhere = self._gpus_elsewhere(host, known.facts.boot_id)
        managed.outside = facts.outside_processes(host, managed.facts, pids)
        now = facts.host_facts(host, managed.facts, managed.options, self._address(host), pids, elsewhere)
        if _offered(now) != _offered(known.facts):
            await self._engine.report(e.HostChanged(at_s=time.time(), host=host, facts=now))

    def _gpus_elsewhere(self, host: HostId, boot_id: str) -> dict[str, HostId]:
        """Hosts on the same machine that offer a GPU, by its uuid."""
        others = [h for h in self._state.hosts.values() if h.id != host]
        return {
            device.uuid: other.id
            for other in others
            if other.facts is not None and other.facts.boot_id == boot_id
            for device in other.facts.devices
            if device.kind == "cuda" and not device.offered_by
        }

    def outside_processes(self) -> list[OutsideProcess]:
        """Processes on the GPUs of hosts that are up which belong to no job."""
        hosts = self._state.hosts
        there = [self._managed[host] for host in self._managed if host in hosts and hosts[host].state is HostState.UP]
        return [process for managed in there for process in managed.outside]

    # --- requests to agents -------------------------------------------------------------------------------------------

    async def request(
        self, host: HostId, request: Request[R], timeout_s: float | None = 60.0, *, account: str | None = None
    ) -> R:
        """Send a request to an agent of the host and return the reply.

        Args:
            timeout_s: after this long the link is broken; None waits for as long as it holds.
            account: whose agent; None: that of the job that the request names, else the daemon's own.
        Raises:
            AgentLost: not connected, or the link broke before the reply, as it does when that is late.
            HostError: the agent refused, with its message, or its reply is malformed.
        """
        managed = self._managed.get(host)
        if managed is None:
            raise AgentLost(f"{host} is no longer part of the cluster")
        if account is None:
            account = self._state.account_of(str(getattr(request, "job", "")))
        link = managed.link if not account else self.accounts.get(host, account)
        if link is None:
            raise AgentLost(f"the agent of {account} on {host} is not connected")
        answer = await link.request(request.verb, timeout_s=timeout_s, **to_map(request))
        try:
            reply: R = from_map(request.reply, answer, request.verb)
        except ProtocolError as error:
            raise HostError(f"{host}: its agent's reply is malformed: {error}") from None
        return reply

    async def slice_server(
        self, host: HostId, request: ServeSegments | AdmitReaders | ServeDataset, *, account: str = ""
    ) -> Address:
        """Have an agent of a host serve slices at the host's address for other hosts; return address and port.

        Args:
            request: says what is served; its address is filled in here.
            account: whose agent; "": the daemon's own.
        Raises:
            ClusterError: as `request`.
        """
        address = self._address(host) or "127.0.0.1"
        return address, (await self.request(host, replace(request, address=address), account=account)).port

    async def everywhere(
        self, decision: d.ToRanks, kind: Callable[..., Request[R]], **args: Any
    ) -> tuple[list[R], list[ClusterError]]:
        """Send a request to the agents of all hosts of a decision, each on its own.

        Args:
            kind: makes the request, of the attempt's job, number and generation, and `args`.
        Returns:
            The replies, and the errors; errors of hosts that are not merely away are logged already.
        """
        answers: list[R] = []
        errors: list[ClusterError] = []
        request = kind(job=decision.job, attempt=decision.attempt, generation=decision.generation, **args)

        async def ask(host: HostId) -> None:
            try:
                answers.append(await self.request(host, request))
            except ClusterError as error:
                errors.append(error)
                if not isinstance(error, AgentLost):
                    log.warning("%s: %s of %s.%d: %s", host, request.verb, decision.job, decision.attempt, error)

        async with anyio.create_task_group() as group:
            for host in decision.hosts:
                group.start_soon(ask, host)
        return answers, errors

    def retry_now(self, host: HostId) -> None:
        """Dial at once: the obstacle may be gone."""
        self._managed[host].link.retry_now()

    async def known(self) -> list[tuple[HostId, str, HostOptions]]:
        """Name, address and options of every host of the cluster."""
        rows = await self._journal.query("SELECT name, address, options FROM hosts")
        return [(HostId(n), a, msgspec.msgpack.decode(o, type=HostOptions)) for n, a, o in rows]

    def link_row(self, host: HostId) -> dict[str, Any]:
        """Address and state of the link, and the agent's own facts, for display."""
        managed = self._managed.get(host)
        if managed is None:
            return {}
        row = {"address": managed.address, "state": str(managed.link.state), "facts": managed.facts}
        return {**row, "failures": managed.failures.to_row()} if managed.failures.times else row

    def _address(self, host: HostId) -> str:
        known = self._state.hosts.get(host)
        return known.facts.address if known is not None and known.facts is not None else ""

    async def close(self) -> None:
        """Close every link; agents and ranks go on."""
        for managed in self._managed.values():
            managed.stop.cancel()


def _offered(known: HostFacts) -> object:
    """Facts whose change the scheduler must hear of."""
    return known.devices, known.gpu_error, known.runtimes
