"""The hosts of the cluster: their links, kept for life, and their agents' words as events."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import msgspec

from clusterd.config import Config, HostOptions
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle.reconcile import needs_action
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.agents import Agents, identity
from clusterd.daemon.hosts.pending_replies import Expected
from clusterd.daemon.hosts.progress import Progress
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.unexpected import guarded
from clusterd.errors import AgentLost, ClusterError
from clusterd.ssh.host import HostLink, LinkState
from clusterd.types import HostId, JobId

log = logging.getLogger(__name__)

LINK_FAILED_PAUSE_S = 5.0
FORMER_TIMEOUT_S = 20.0

LinkFactory = Callable[["Hosts", HostId, str], HostLink]


@dataclass(slots=True)
class _Managed:
    link: HostLink
    address: str
    options: HostOptions
    stop: anyio.CancelScope
    facts: dict[str, Any] = field(default_factory=dict)


class Hosts:
    """One link per host; requests go through it, and what agents say unasked becomes events."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        config: Config,
        tasks: anyio.abc.TaskGroup,
        make_link: LinkFactory,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._config = config
        self._tasks = tasks
        self._make_link = make_link
        self._managed: dict[HostId, _Managed] = {}
        self._agents = Agents(engine.scheduler.state.hosts.values())
        self._progress = Progress(engine, tasks, self.request)
        self.on_rank_said: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        """Called with what ranks tell the daemon, such as how a migration goes."""
        self.on_snapshot: Callable[[HostId, dict[str, Any]], object] = lambda host, message: None
        self.on_snapshots: Callable[[HostId, list[dict[str, Any]]], None] = lambda host, snapshots: None
        self.on_description_left: Callable[[HostId, str], object] = lambda host, job: None
        """Called for each job whose model the host still tells, while nobody waits for it."""
        self.on_job_told: Callable[[str, str], None] = lambda job, host: None
        """Called with each job that a host has something of, when it is connected."""
        self.on_probe: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_steps: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_host_down: Callable[[HostId, str], None] = lambda host, why: None
        self.on_rank_gone: Callable[[str, int, int, int, str], None] = lambda *_: None
        self.checkpoints: dict[tuple[str, str], Expected] = {}
        self.expected: dict[tuple[str, str, int], Expected] = {}

    # --- membership ---------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Dial every host of the cluster again."""
        for name, address, options in await self.known():
            if name not in self._engine.scheduler.state.hosts:
                await self._drop_row(name)  # the daemon died between the event and its row
                continue
            self._manage(name, address, options)

    async def add(self, host: HostId, address: str, options: HostOptions) -> None:
        """Make it part of the cluster and dial it, for life."""
        row = (host, address, msgspec.msgpack.encode(options))
        statement = ("INSERT OR REPLACE INTO hosts VALUES (?, ?, ?)", row)
        await self._engine.post(e.HostAdded(at_s=time.time(), host=host), [statement])
        self._manage(host, address, options)

    async def keep_options(self, host: HostId, options: HostOptions) -> None:
        """What is said of a host holds from when it is dialed next."""
        row = (msgspec.msgpack.encode(options), host)
        await self._journal.execute([("UPDATE hosts SET options = ? WHERE name = ?", row)])

    async def remove(self, host: HostId) -> bool:
        """Take it out of the cluster; its agent ends, for nothing runs there. Where something does, nothing happens.

        Returns: whether the agent was told, as it is not while its host cannot be reached.
        """
        await self._engine.post(e.HostRemoved(at_s=time.time(), host=host))
        if host in self._engine.scheduler.state.hosts:
            return False
        await self._drop_row(host)
        self._agents.release(host)
        managed = self._managed.pop(host, None)
        if managed is None:
            return True  # by whoever else removes it
        told = False
        with anyio.move_on_after(5.0):
            try:
                await managed.link.request("shutdown", timeout_s=5.0, force=False)
                told = True
            except ClusterError as error:
                log.info("the agent of %s was not told: %s", host, error)
        managed.stop.cancel()
        return told

    async def _drop_row(self, host: HostId) -> None:
        try:
            await self._journal.execute([("DELETE FROM hosts WHERE name = ?", (host,))])
        except ClusterError as error:
            log.error("the address of %s, which is gone, is dropped at the next start: %s", host, error)

    def _manage(self, host: HostId, address: str, options: HostOptions) -> None:
        options = self._config.hosts.get(host, options)
        managed = _Managed(self._make_link(self, host, address), address, options, anyio.CancelScope())
        self._managed[host] = managed
        self._tasks.start_soon(self._serve, managed)

    async def _serve(self, managed: _Managed) -> None:
        with managed.stop:
            while True:
                try:
                    await managed.link.run()
                except Exception:
                    # What one agent said must not end the daemon; the link starts over, and hears it all again.
                    log.exception("the link to %s failed", managed.link.name)
                    await anyio.sleep(LINK_FAILED_PAUSE_S)

    # --- what links tell ----------------------------------------------------------------------------------------------

    def on_state(self, host: HostId, state: LinkState) -> None:
        """The link took a step; only a broken one, or one that cannot be made, is news."""
        if state.name == "waiting":
            self._tasks.start_soon(guarded, self._on_down, host, state.why)

    async def on_up(self, host: HostId, hello: dict[str, Any], reached_at: str) -> None:
        """The agent answered: what it runs is news.

        Raises:
            HostError: it is another host's agent; nothing that it runs is this one's.
        """
        agent = identity(hello)
        self._agents.claim(host, agent)
        managed = self._managed[host]
        managed.facts = {**hello["facts"], "clock_skew_s": hello["clock_skew_s"]}
        address = facts.address(hello["facts"], reached_at)
        known = facts.host_facts(host, hello["facts"], managed.options, address)
        self.on_snapshots(host, hello.get("snapshots", []))
        for job in {r["job"] for r in hello["attempts"] if r["attempt"] == facts.DESCRIPTION}:
            if (host, job, facts.DESCRIPTION) not in self.expected:
                self.on_description_left(host, job)
        for report in hello["attempts"]:
            self.on_job_told(report["job"], host)
        told = (facts.attempt_report(r) for r in hello["attempts"] if r["attempt"] != facts.DESCRIPTION)
        reports = tuple(r for r in told if needs_action(self._engine.scheduler.state, host, r))
        home = managed.link.agent_home
        before = self._engine.scheduler.state.hosts[host].agent_home
        if before is not None and before != home:
            await self._end_former(managed.link, before)
        await self._engine.report(
            e.HostConnected(at_s=time.time(), host=host, facts=known, attempts=reports, agent=agent, agent_home=home)
        )

    def agent_home(self, host: HostId) -> str:
        """Where the host's agent is to be looked for; "": at its default place.

        While ranks of ours are there it is where they were started: an agent elsewhere knows nothing of them, and they
        would be taken for gone, and run twice.
        """
        state = self._engine.scheduler.state
        managed, known = self._managed.get(host), state.hosts.get(host)
        wanted = managed.options.agent_home or "" if managed is not None else ""
        if known is None or known.agent_home is None or not any(state.attempts_on(host)):
            return wanted
        if known.agent_home != wanted:
            was = known.agent_home or "its default"
            log.info("%s: agent_home stays %s until what runs there is over", host, was)
        return known.agent_home

    async def _end_former(self, link: HostLink, home: str) -> None:
        """The agent at the old place is of no use when another took over; what it has is left there."""
        was = home or "the default place"
        try:
            with anyio.fail_after(FORMER_TIMEOUT_S):
                await link.end_former(home)
            log.info("%s: the agent at %s has ended; agent_home is %s", link.name, was, link.agent_home or "not set")
        except (ClusterError, TimeoutError) as error:
            log.warning("%s: if there is still an agent at %s, it stays: %s", link.name, was, error)

    async def _on_down(self, host: HostId, why: str) -> None:
        for key, expected in list(self.expected.items()):
            if key[0] == host:
                expected.arrive(None)
        self.on_host_down(host, why)
        await self._engine.report(e.HostDisconnected(at_s=time.time(), host=host, why=why))

    async def on_event(self, host: HostId, message: dict[str, Any]) -> None:
        """The agent said something unasked."""
        match message["event"]:
            case "rank_exited":
                await self._on_rank_exited(host, message)
            case "snapshot":
                self.on_snapshot(host, message)
            case "progress":
                self.on_steps(message)
                await self._progress.heard(host, message)
            case "rank_said":
                if message["said"]["what"] == "probe":
                    self.on_probe(message)
                elif message["said"]["what"] == "orphaned":
                    await self._on_orphaned(message)
                elif message["said"]["what"].startswith("checkpoint"):
                    await self._on_checkpoint(message)
                elif self.on_rank_said is not None:
                    await self.on_rank_said(message)
            case "facts":
                managed = self._managed[host]
                managed.facts = message["facts"]
                address = self._address(host)
                known = facts.host_facts(host, message["facts"], managed.options, address)
                before = self._engine.scheduler.state.hosts[host].facts
                if before is None or known.devices != before.devices:
                    await self._engine.report(e.HostChanged(at_s=time.time(), host=host, facts=known))
            case unknown:
                log.warning("%s said something this version does not know: %s", host, unknown)

    async def _on_rank_exited(self, host: HostId, message: dict[str, Any]) -> None:
        expected = self.expected.get((host, message["job"], message["attempt"]))
        if expected is not None:
            expected.arrive({**message, "state": "exited"})
        if message["attempt"] == facts.DESCRIPTION:
            return
        end = facts.rank_end({**message, "state": "exited"})
        self.on_rank_gone(message["job"], message["attempt"], message["generation"], message["rank"], str(end))
        await self._engine.report(
            e.RankExited(
                at_s=time.time(),  # the scheduler's clock is one: that of a host may be hours off
                job=JobId(message["job"]),
                attempt=message["attempt"],
                generation=message["generation"],
                host=host,
                rank=message["rank"],
                end=end,
            )
        )

    async def _on_checkpoint(self, message: dict[str, Any]) -> None:
        said = message["said"]
        if message["rank"] == 0 and said["what"] == "checkpointed":
            await self._engine.report(
                e.CheckpointTaken(
                    at_s=time.time(),
                    job=JobId(message["job"]),
                    attempt=message["attempt"],
                    step=said["step"],
                    path=said["path"],
                )
            )
        waiting = self.checkpoints.get((message["job"], said.get("asked") or said["path"]))
        if waiting is not None and (message["rank"] == 0 or said["what"] == "checkpoint_failed"):
            waiting.arrive(said)

    async def _on_orphaned(self, message: dict[str, Any]) -> None:
        await self._engine.report(
            e.RankOrphaned(
                at_s=time.time(),
                job=JobId(message["job"]),
                attempt=message["attempt"],
                generation=message["generation"],
                rank=message["rank"],
                step=message["said"]["step"],
                can_finish_step=bool(message["said"].get("may_finish", False)),
                out_of_memory=bool(message["said"].get("out_of_memory", False)),
            )
        )

    # --- talking to agents --------------------------------------------------------------------------------------------

    async def request(self, host: HostId, verb: str, timeout_s: float | None = 60.0, **args: Any) -> dict[str, Any]:
        """Ask the host's agent.

        Args:
            timeout_s: after this long the link is broken; None waits for as long as it holds.
        Raises:
            AgentLost: not connected, or the link broke before the answer, as it does where that is late.
            HostError: the agent refused; its words.
        """
        managed = self._managed.get(host)
        if managed is None:
            raise AgentLost(f"{host} is not part of the cluster any more")
        return await managed.link.request(verb, timeout_s=timeout_s, **args)

    async def everywhere(
        self, decision: d.ToRanks, verb: str, **args: Any
    ) -> tuple[list[dict[str, Any]], list[ClusterError]]:
        """Ask the agents of all its hosts, each apart: one that is gone keeps the word from no other.

        Returns: the answers, and what went wrong, logged already but for hosts that are away.
        """
        answers: list[dict[str, Any]] = []
        errors: list[ClusterError] = []

        async def ask(host: HostId) -> None:
            which: dict[str, Any] = {
                "job": decision.job,
                "attempt": decision.attempt,
                "generation": decision.generation,
            }
            try:
                answers.append(await self.request(host, verb, **which, **args))
            except ClusterError as error:
                errors.append(error)
                if not isinstance(error, AgentLost):
                    log.warning("%s: %s of %s.%d: %s", host, verb, decision.job, decision.attempt, error)

        async with anyio.create_task_group() as group:
            for host in decision.hosts:
                group.start_soon(ask, host)
        return answers, errors

    def retry_now(self, host: HostId) -> None:
        """Dial at once: what was in the way may be gone."""
        self._managed[host].link.retry_now()

    async def known(self) -> list[tuple[HostId, str, HostOptions]]:
        """Name, address and options of every host of the cluster."""
        rows = await self._journal.query("SELECT name, address, options FROM hosts")
        return [(HostId(n), a, msgspec.msgpack.decode(o, type=HostOptions)) for n, a, o in rows]

    def expect_exit(self, host: HostId, job: str, attempt: int) -> Expected:
        """Wait for the end of a rank that is no attempt of the scheduler's."""
        return Expected(self.expected, (str(host), job, attempt))

    def link_row(self, host: HostId) -> dict[str, Any]:
        """What the link says of itself, and the agent's own facts."""
        managed = self._managed.get(host)
        if managed is None:
            return {}
        return {"address": managed.address, "state": str(managed.link.state), "facts": managed.facts}

    def _address(self, host: HostId) -> str:
        known = self._engine.scheduler.state.hosts[host].facts
        return known.address if known else ""

    async def close(self) -> None:
        """Hang up everywhere; agents and ranks go on."""
        for managed in self._managed.values():
            managed.stop.cancel()
