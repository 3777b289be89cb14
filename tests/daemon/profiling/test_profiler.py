"""Work of the profiler waits while a fit takes long, and does not pile up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from clusterd.core import events as e
from clusterd.daemon.profiling import profiler as module
from clusterd.daemon.profiling.profiler import Profiler
from clusterd.protocol.agent import Progress
from clusterd.types import HostId
from tests.core.conftest import Lab, facts
from tests.core.lifecycle.test_trials import running


class Models:
    """Stands in for the models: counts what is asked of it."""

    def __init__(self) -> None:
        self.changes = 0

    def of(self, *_rest: Any) -> None:
        return None

    async def devices_changed(self) -> None:
        self.changes += 1


def test_a_thousand_hosts_that_connect_are_one_change_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INBOX_MAX", 20)
    models, lab = Models(), Lab()
    profiler = Profiler(SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state), models, SimpleNamespace())  # type: ignore[arg-type]

    async def run() -> None:
        for number in range(1000):
            name = f"host{number}"
            profiler.handled([e.HostConnected(at_s=0.0, host=HostId(name), facts=facts(name))])
            profiler.on_progress(HostId(name), Progress("1", 1, 1, number, 1.0, 0.1))
        assert len(profiler._inbox) <= 20, "reports that nobody can keep up with are ignored"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(profiler.run)
            while profiler._inbox:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    anyio.run(run)
    assert models.changes == 1


def test_steps_that_are_reported_again_count_once() -> None:
    """A restarted agent does not know which of its reports the daemon has."""
    lab = Lab()
    lab.host("a", gpus=4)
    job = running(lab)

    async def no_forecast(*_rest: object) -> None: ...

    profiler = Profiler(
        SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state), Models(), SimpleNamespace()
    )  # type: ignore[arg-type]
    profiler._forecast = no_forecast  # type: ignore[assignment]
    report = Progress(job, 1, 1, 8, 1.0, 0.1, steps=tuple((step, 0.1) for step in range(1, 9)))
    for _ in range(2):
        anyio.run(profiler._on_steps, report)
    assert profiler._runs[job].seen == 8
