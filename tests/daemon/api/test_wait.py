"""Waiting for a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio

from clusterd.core import events as e
from clusterd.daemon.api.jobs import JobVerbs
from clusterd.daemon.api.watch import Feed
from clusterd.types import HostId
from tests.core.conftest import Lab


def test_the_last_row_is_that_of_a_job_that_is_over() -> None:
    """Regression: the job ended while an earlier row was being sent, and `run` returned a running job's exit code."""
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    api: Any = SimpleNamespace(_state=lab.scheduler.state, _feed=Feed())
    peer: Any = SimpleNamespace(user="")

    async def wait() -> list[str]:
        rows = JobVerbs.wait(api, peer, job)
        states = [(await anext(rows)).state]
        lab.exit(job)
        attempt = lab.attempt(job)
        lab.tell(e.AttemptStopped(**lab.at(), job=job, attempt=1, generation=attempt.generation, host=HostId("a")))
        api._feed.add(lab.log[-1:], [])
        return [*states, *[row.state async for row in rows]]

    assert anyio.run(wait) == ["running", "finished"]
