"""A journal as a year of use leaves it: jobs one after the other on one host, written by the daemon's own engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.decisions import Decision
from clusterd.core.events import Event
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.types import HostId, JobId, JobSpec, Resources
from tests.core.conftest import OK, facts

ARCHIVE_AFTER_S = 30 * 86400.0
EVENTS_PER_JOB = 25
"""A job of an hour: how it started and ended, and its progress every few minutes."""

AT_ONCE = 64
YEAR_S = 365 * 86400.0
JOBS_PER_ARCHIVING = 1000
SPEC = JobSpec(name="job", command=("true",), resources=Resources(devices=1))


def write(directory: Path, count: int) -> None:
    """Write a journal of about so many events into a new state directory."""
    journal = Journal(directory / "journal.db")
    try:
        anyio.run(_write, journal, count)
    finally:
        journal.close()


async def _write(journal: Journal, count: int) -> None:
    launches: dict[JobId, d.LaunchAttempt] = {}

    def handled(_events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        launches.update({made.job: made for made in decisions if isinstance(made, d.LaunchAttempt)})

    engine = Engine(journal, Scheduler())
    engine.subscribe(handled)
    engine.restore()
    archived = ArchivedJobs(engine, ARCHIVE_AFTER_S)
    begin_s, posted = time.time() - YEAR_S, itertools.count()

    def now_s() -> float:
        return begin_s + YEAR_S * next(posted) / count

    host = HostId("past")
    numbers = iter(range(1, count // EVENTS_PER_JOB + 1))

    async def user() -> None:
        for number in numbers:
            if number % JOBS_PER_ARCHIVING == 0:
                await archived.archive()
            job = JobId(str(number))
            await engine.post(e.JobSubmitted(at_s=now_s(), job=job, spec=SPEC))
            launch = launches.pop(job)
            which = {"job": job, "attempt": launch.attempt}
            generation = launch.generation
            await engine.post(e.AttemptLaunched(at_s=now_s(), generation=generation, **which))
            for step in range(1, EVENTS_PER_JOB - 3):
                loss = 2.0 + 1.0 / step
                await engine.post(e.AttemptProgressed(at_s=now_s(), step=step, loss=loss, step_time_s=0.1, **which))
            await engine.post(e.RankExited(at_s=now_s(), generation=generation, host=host, rank=0, end=OK, **which))
            await engine.post(e.AttemptStopped(at_s=now_s(), generation=generation, host=host, **which))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        await engine.post(e.DaemonStarted(at_s=now_s(), epoch=1))
        await engine.post(e.HostAdded(at_s=now_s(), host=host))
        found = facts(host, gpus=AT_ONCE, cores=4 * AT_ONCE)
        await engine.post(e.HostConnected(at_s=now_s(), host=host, facts=found, attempts=()))
        async with anyio.create_task_group() as users:
            for _ in range(AT_ONCE):
                users.start_soon(user)
        await archived.archive()
        tasks.cancel_scope.cancel()
