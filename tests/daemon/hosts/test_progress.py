"""Steps that agents report, on their way to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio

from clusterd.core import events as e
from clusterd.daemon.hosts.reports import Progress
from clusterd.errors import ClusterError
from clusterd.protocol import agent
from clusterd.types import HostId
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running


def test_a_step_that_a_restarted_agent_reports_again_is_not_posted_again() -> None:
    lab = Lab()
    lab.host("a", gpus=4)
    job = running(lab)
    posted: list[e.Event] = []

    async def report(event: e.Event) -> None:
        posted.append(event)
        lab.tell(event)

    async def request(*_: Any, **__: Any) -> Any:
        raise ClusterError("no host here")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            engine: Any = SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state, report=report)
            progress = Progress(engine, tasks, request)
            known, new = (agent.Progress(job, 1, 1, step, 1.0, 0.1) for step in (5, 6))
            for each in (known, new):
                await progress.on_progress(HostId("a"), each)

    anyio.run(main)
    assert [event.step for event in posted] == [6]  # type: ignore[attr-defined]
