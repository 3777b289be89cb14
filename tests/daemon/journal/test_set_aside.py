"""An event that raises in the scheduler is set aside; the daemon and the other events of its batch go on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import anyio
import pytest

from clusterd.core import events as e
from clusterd.core import scheduler as core
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.types import HostId, JobId, JobSpec, JobState, Resources
from tests.core.conftest import facts


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler with a bug, which has changed the state when it raises."""

    def on_job_cancelled(ctx: HandlerContext, event: e.JobCancelled) -> None:
        ctx.state.jobs[event.job].reason = "half changed"
        ctx.state.queue.clear()
        raise KeyError("bug")

    monkeypatch.setitem(core._HANDLERS, e.JobCancelled, on_job_cancelled)


def submitted(number: int) -> e.JobSubmitted:
    spec = JobSpec(name="job", command=("true",), resources=Resources(devices=1))
    return e.JobSubmitted(at_s=float(number), job=JobId(str(number)), spec=spec)


def test_an_event_that_raises_is_set_aside_and_all_others_happen(tmp_path: Path, raising: None) -> None:
    journal = Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler())
    held = engine.scheduler.state

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=HostId("a")))
            await engine.post(e.HostConnected(at_s=1.0, host=HostId("a"), facts=facts("a", gpus=1), attempts=()))
            async with anyio.create_task_group() as together:  # one batch
                together.start_soon(engine.post, submitted(2))
                together.start_soon(engine.report, e.JobCancelled(at_s=2.5, job=JobId("2"), by="ann"))
                together.start_soon(engine.post, submitted(3))
            with pytest.raises(ClusterError, match="cannot handle this JobCancelled"):
                await engine.post(e.JobCancelled(at_s=4.0, job=JobId("3"), by="ann"))
            await engine.post(submitted(5))
            group.cancel_scope.cancel()

    anyio.run(run)
    state = engine.scheduler.state
    assert state is held, "others hold this very object"
    assert {job.id: job.state for job in state.jobs.values()} == {
        "2": JobState.STARTING, "3": JobState.QUEUED, "5": JobState.QUEUED,
    }  # fmt: skip
    assert "half changed" not in {job.reason for job in state.jobs.values()}
    assert engine.set_aside == 2
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        assert [kind for (kind,) in db.execute("SELECT kind FROM set_aside")] == ["JobCancelled", "JobCancelled"]
        assert "KeyError: 'bug'" in db.execute("SELECT why FROM set_aside").fetchone()[0]

    assert_restarts(tmp_path, state, set_aside=2)


def test_a_daemon_that_died_before_it_could_set_the_event_aside_starts(tmp_path: Path, raising: None) -> None:
    """Simulates kill -9 between the journal's commit and the exception: every later start would have failed."""
    journal = Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler())

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=HostId("a")))
            await engine.post(submitted(2))
            group.cancel_scope.cancel()

    anyio.run(run)
    event = e.JobCancelled(at_s=3.0, job=JobId("2"), by="ann", id=e.EventId(journal.newest[0] + 1))
    anyio.run(journal.append, [event])
    journal.close()
    assert_restarts(tmp_path, engine.scheduler.state, set_aside=1)
    assert_restarts(tmp_path, engine.scheduler.state, set_aside=1)


def assert_restarts(directory: Path, state: State, set_aside: int) -> None:
    again = Journal(directory / "journal.db")
    restarted = Engine(again, Scheduler())
    restarted.restore()
    again.close()
    assert restarted.scheduler.state == state, "a restart does not meet it again"
    assert restarted.set_aside == set_aside
