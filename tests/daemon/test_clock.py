"""The wall clock of the daemon's machine is set while it runs."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.types import HostId


@pytest.mark.parametrize("by_s", [3600.0, -3600.0, 0.0])
def test_a_clock_change_precedes_events_dated_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    handled: list[e.Event] = []
    right = time.time
    journal = Journal(tmp_path / "journal.db")

    async def run() -> None:
        engine = Engine(journal, Scheduler())
        engine.subscribe(lambda events, decisions: handled.extend(events))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await engine.post(e.HostAdded(at_s=time.time(), host=HostId("a")))
            monkeypatch.setattr(time, "time", lambda: right() + by_s)
            await engine.post(e.HostAdded(at_s=time.time(), host=HostId("b")))
            tasks.cancel_scope.cancel()

    anyio.run(run)
    journal.close()
    assert [type(event) for event in handled] == [e.HostAdded, *([e.ClockSet] if by_s else []), e.HostAdded]
    assert all(event.by_s == pytest.approx(by_s, abs=0.5) for event in handled if isinstance(event, e.ClockSet))
