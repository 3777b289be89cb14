"""Scheduling passes over many jobs run on a thread; the daemon answers meanwhile, and its end waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from clusterd.core import events as e
from clusterd.core.policies.default import Default
from clusterd.core.scheduler import Scheduler
from clusterd.core.view import Proposal, View
from clusterd.daemon.journal import engine as module
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.types import HostId, JobId, JobSpec, JobState, Resources
from tests.core.conftest import facts
from tests.hang import HANG_S


class Gated(Default):
    """The default policy, which waits for the test in each pass over a job."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = threading.Event(), threading.Event()

    def propose(self, view: View) -> Proposal:
        self.asked.set()
        assert self.gate.wait(HANG_S)
        return super().propose(view)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_others_are_served_during_a_pass_and_no_half_of_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """With `is_cancelled` the daemon is stopped in the middle of the pass."""
    monkeypatch.setattr(module, "THREAD_JOBS", 1)
    policy, journal = Gated(), Journal(tmp_path / "journal.db")
    engine = Engine(journal, Scheduler(policy))

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=1.0, host=HostId("a")))
            await engine.post(e.HostConnected(at_s=1.0, host=HostId("a"), facts=facts("a", gpus=1), attempts=()))
            spec = JobSpec(name="job", command=("true",), resources=Resources(devices=1))
            group.start_soon(engine.report, e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=spec))
            with anyio.fail_after(HANG_S):
                await anyio.to_thread.run_sync(policy.asked.wait)  # the loop goes on while the pass waits
            assert engine.scheduler.state.jobs[JobId("1")].state is JobState.QUEUED
            if is_cancelled:
                group.cancel_scope.cancel()
            policy.gate.set()
            if not is_cancelled:
                await engine.post(e.JobHeld(at_s=3.0, job=JobId("1"), by="ann"))
                group.cancel_scope.cancel()

    anyio.run(run)
    assert engine.scheduler.state.jobs[JobId("1")].state is JobState.STARTING
    journal.close()
    again = Journal(tmp_path / "journal.db")
    restarted = Engine(again, Scheduler())
    restarted.restore()
    again.close()
    assert restarted.scheduler.state == engine.scheduler.state
