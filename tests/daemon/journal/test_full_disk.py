"""A full disk loses no event and ends no running job."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.journal import engine as module
from clusterd.daemon.journal.engine import Engine, Timers
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.types import HostId, HostState, JobId
from tests.core.conftest import facts


def test_events_are_reported_once_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host goes and a timer is due while nothing can be written; requests are refused, facts are not lost."""
    monkeypatch.setattr(module, "REPORT_AGAIN_S", 0.01)
    journal = Journal(tmp_path / "journal.db")
    handled: list[str] = []
    engine = Engine(journal, Scheduler())
    engine.subscribe(lambda events, _: handled.extend(type(event).__name__ for event in events))
    host = HostId("a")
    real = journal.append
    refusals = anyio.Event

    async def run() -> None:
        refused = refusals()

        async def full(*_: object) -> None:
            refused.set()
            raise ClusterError("the journal cannot be written: disk full")

        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=host))
            engine.scheduler.state.timers[Timer(TimerKind.SETTLE, "1")] = time.time()
            monkeypatch.setattr(journal, "append", full)
            async with anyio.create_task_group() as facts:
                facts.start_soon(engine.report, e.HostDisconnected(at_s=2.0, host=host, why="pulled"))
                await refused.wait()
                assert engine.trouble == "the journal cannot be written: disk full", "as clusterd status says"
                with pytest.raises(ClusterError, match="disk full"):
                    await engine.post(e.HostDrained(at_s=3.0, host=host))
                group.start_soon(Timers(engine).run)
                refused = refusals()
                await refused.wait()
                monkeypatch.setattr(journal, "append", real)
            with anyio.fail_after(10):
                while "TimerFired" not in handled:
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()

    anyio.run(run)
    journal.close()
    assert sorted(handled) == ["HostAdded", "HostDisconnected", "TimerFired"]
    assert engine.trouble == ""


def test_a_number_of_another_journal_gets_a_snapshot() -> None:
    """A watcher comes back to a daemon whose state directory was emptied: silence would look like peace."""
    feed = Feed()
    feed.number = 5
    assert feed.after(5) == []
    assert feed.after(6) is None


def test_events_are_reported_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host went while nothing could be written, and came back just when there was room: it is up."""
    monkeypatch.setattr(module, "REPORT_AGAIN_S", 0.2)
    journal = Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler())
    host, real = HostId("a"), journal.append
    connected = e.HostConnected(at_s=2.0, host=host, facts=facts("a", gpus=1), attempts=())

    async def run() -> None:
        refused = anyio.Event()

        async def full(*_: object) -> None:
            refused.set()
            raise ClusterError("the journal cannot be written: disk full")

        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=host))
            await engine.report(connected)
            monkeypatch.setattr(journal, "append", full)
            async with anyio.create_task_group() as reports:
                reports.start_soon(engine.report, e.HostDisconnected(at_s=3.0, host=host, why="pulled"))
                await refused.wait()
                await anyio.wait_all_tasks_blocked()
                monkeypatch.setattr(journal, "append", real)
                reports.start_soon(engine.report, replace(connected, at_s=4.0))
            group.cancel_scope.cancel()

    anyio.run(run)
    journal.close()
    assert engine.scheduler.state.hosts[host].state is HostState.UP


def test_an_event_that_cannot_be_encoded_fails_its_sender_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler())
    host = HostId("a")

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            with pytest.raises(OverflowError):
                await engine.post(
                    e.CompletionPredicted(at_s=1.0, job=JobId("1"), predictable=True, steps=2**70, why="")
                )
            await engine.post(e.HostAdded(at_s=1.0, host=host))
            group.cancel_scope.cancel()

    anyio.run(run)
    assert host in engine.scheduler.state.hosts
    journal.close()
