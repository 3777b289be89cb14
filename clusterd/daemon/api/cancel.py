"""Ends of jobs that somebody asks for, one or many at a moment."""

from __future__ import annotations

import time
from typing import Any

import anyio

from clusterd import projection
from clusterd.core import events as e
from clusterd.core.queueing import admission
from clusterd.core.state import Job
from clusterd.daemon.api.server import Peer
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.unexpected import first_of
from clusterd.errors import ClusterError
from clusterd.types import JobId, JobState


async def one(engine: Engine, peer: Peer, job: str, now: bool) -> dict[str, Any]:
    """The job's row, cancelled; `now`: without time to save what it did.

    Raises:
        ClusterError: it is over, or not the peer's.
    """
    known = _cancellable(engine, peer, job)
    await engine.post(e.JobCancelled(at_s=time.time(), job=known.id, by=peer.user, now=now))
    return projection.job_row(known, engine.scheduler.state)


async def several(engine: Engine, peer: Peer, jobs: list[str], now: bool) -> dict[str, Any]:
    """Rows of the jobs that are cancelled, and what was in the way of the others."""
    found: dict[JobId, Job] = {}
    refused = []
    for text in jobs:
        try:
            known = _cancellable(engine, peer, text)
            found[known.id] = known
        except ClusterError as error:
            refused.append({"job": text, "message": str(error), "exit_code": error.exit_code})
    now_s = time.time()
    try:
        async with anyio.create_task_group() as group:
            # First what waits: of more than one batch holds, the first must not make room for what the next would end.
            for known in sorted(found.values(), key=lambda job: job.state is not JobState.QUEUED):
                group.start_soon(engine.post, e.JobCancelled(at_s=now_s, job=known.id, by=peer.user, now=now))
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    rows = [projection.job_row(known, engine.scheduler.state) for known in found.values()]
    return {"jobs": rows, "refused": refused}


def _cancellable(engine: Engine, peer: Peer, job: str) -> Job:
    known = admission.find_own_job(engine.scheduler.state, job, peer.user, peer.is_operator)
    admission.refuse_if_over(known)
    return known
