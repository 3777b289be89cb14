"""Hosts are added and removed concurrently with other requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from clusterd.config import Config, HostOptions
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.access import Peer
from clusterd.daemon.api.hosts import HostVerbs
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.ssh.host import LinkState
from clusterd.types import HostId, JobId, JobSpec
from tests.core.conftest import facts

HOST = HostId("a")
PEER = Peer("ann", 1000, is_operator=True)


class Link:
    """To an agent that does as it is told."""

    name = HOST
    state = LinkState("up", 0.0)

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def request(self, verb: str, **what: Any) -> dict[str, Any]:
        return {}


class Lab:
    """A journal, its engine, and the hosts that are part of the cluster."""

    def __init__(self, journal: Journal, tasks: anyio.abc.TaskGroup) -> None:
        link: Any = Link()
        nobody: Any = None
        self.engine = Engine(journal, Scheduler())
        self.engine.restore()
        config = Config(state_dir=journal.path.parent, socket=journal.path.with_name("sock"))
        self.hosts = HostRegistry(self.engine, journal, config, tasks, lambda *_: link)
        self.membership = HostVerbs(self.engine, self.hosts, nobody, nobody)

    @property
    def names(self) -> list[str]:
        return list(self.engine.scheduler.state.hosts)

    async def known(self) -> list[str]:
        """Hosts that the next daemon will connect to."""
        return [name for name, _, _ in await self.hosts.known()]


@pytest.fixture(name="journal")
def journal_(tmp_path: Path) -> Any:
    made = Journal(tmp_path / "journal.db")
    yield made
    made.close()


@asynccontextmanager
async def lab(journal: Journal) -> AsyncIterator[Lab]:
    async with anyio.create_task_group() as tasks:
        made = Lab(journal, tasks)
        tasks.start_soon(made.engine.run)
        yield made
        tasks.cancel_scope.cancel()


async def with_one_host(made: Lab) -> None:
    await made.hosts.add(HOST, "a", HostOptions())
    await made.engine.post(e.HostConnected(at_s=1.0, host=HOST, facts=facts("a", gpus=1), attempts=()))


def test_a_host_that_is_given_work_while_it_is_removed_stays(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The submit is being written when the removal is asked for; whoever asked is told, and the next daemon starts."""
    real = journal.append

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            writing, go_on = anyio.Event(), anyio.Event()

            async def slowly(*batch: Any) -> None:
                writing.set()
                await go_on.wait()
                await real(*batch)

            async def remove() -> None:
                with pytest.raises(ClusterError, match="a runs job: drain it first"):
                    await made.membership.host_remove(PEER, "a")

            monkeypatch.setattr(journal, "append", slowly)
            async with anyio.create_task_group() as asked:
                spec = JobSpec(name="job", command=("true",))
                asked.start_soon(made.engine.post, e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=spec))
                await writing.wait()
                asked.start_soon(remove)
                await anyio.wait_all_tasks_blocked()
                go_on.set()
            assert (made.names, await made.known()) == (["a"], ["a"])
        async with lab(journal) as again:
            await again.engine.post(e.DaemonStarted(at_s=3.0, epoch=2))
            await again.hosts.restore()
            assert (again.names, await again.known()) == (["a"], ["a"])

    anyio.run(run)


def test_removing_a_lost_host_lists_what_may_still_run_there(journal: Journal) -> None:
    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            spec = JobSpec(name="net", command=("true",))
            await made.engine.post(e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=spec))
            which: dict[str, Any] = {"job": JobId("1"), "attempt": 1, "generation": 1}
            await made.engine.post(e.AttemptLaunched(at_s=3.0, **which))
            await made.engine.post(e.HostDisconnected(at_s=4.0, host=HOST, why="the cable is out"))
            await made.engine.post(e.TimerFired(at_s=1e4, timer=Timer(TimerKind.HOST_LOST, "a")))
            answer = await made.membership.host_remove(PEER, "a")
            assert answer == {"name": "a", "left": ["net (1.1)"], "agent_left": False, "agents_left": {}}

    anyio.run(run)


def test_two_remove_a_host_at_once(journal: Journal) -> None:
    """Both are told that it is gone."""

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            async with anyio.create_task_group() as asked:
                for _ in range(2):
                    asked.start_soon(made.membership.host_remove, PEER, "a")
            assert (made.names, await made.known()) == ([], [])

    anyio.run(run)


def test_the_address_of_a_host_that_is_gone_is_not_dialed(journal: Journal) -> None:
    """The daemon died between the removal and the address."""

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            await made.engine.post(e.HostRemoved(at_s=2.0, host=HOST))
            assert await made.known() == ["a"]
        async with lab(journal) as again:
            await again.hosts.restore()
            assert await again.known() == []
            assert again.hosts.link_row(HOST) == {}

    anyio.run(run)


def test_a_rank_ends_by_the_daemons_clock(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock may be an hour ahead, and the scheduler's timers would wait for it."""
    output: list[e.Event] = []

    async def report(event: e.Event) -> None:
        output.append(event)

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            spec = JobSpec(name="net", command=("true",))
            await made.engine.post(e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=spec))
            monkeypatch.setattr(made.engine, "report", report)
            message = {"job": "1", "attempt": 1, "generation": 1, "rank": 0, "exit_code": 0, "reason": "exit"}
            ahead = {**message, "event": "rank_exited", "at_s": time.time() + 3600.0}
            await made.hosts.on_event(HOST, ahead)
        assert output[0].at_s <= time.time()

    anyio.run(run)


def test_an_exception_after_a_lost_link_leaves_the_daemon_running(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            made.hosts.on_state(HOST, LinkState("waiting", 2.0, why="no \udcfc in here"))
            await anyio.wait_all_tasks_blocked()
            await made.engine.report(e.HostDisconnected(at_s=3.0, host=HOST, why="the cable is out"))
            assert made.engine.scheduler.state.hosts[HOST].why == "the cable is out"
        assert "_on_down failed" in caplog.text

    anyio.run(run)
