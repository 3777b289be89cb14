"""Promises that a simulation checks after each batch of events, and at its end."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from clusterd.core.invariants import violations
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import Job, State
from clusterd.daemon.journal import codec, job_table
from clusterd.daemon.journal.journal import Journal
from clusterd.types import DeviceId, HostId, HostState, JobId, JobKind, JobState
from tests.core.properties import broken
from tests.soak.host import Machine


def after_batch(state: State, machines: Iterable[Machine]) -> Iterator[str]:
    """Promises about the state, and about what runs on the machines, that are broken."""
    yield from violations(state)
    yield from broken(state)
    for machine in machines:
        host = state.hosts.get(HostId(machine.name))
        if host is None or host.state is not HostState.UP:
            continue
        for key, process in machine.live():
            job, attempt, generation = key
            asked = (JobId(job), attempt, generation)
            if asked in host.orphans or asked in host.unknown_attempts:
                continue
            for device in machine.device_names(process):
                holder = state.holders.get(DeviceId(device))
                if holder is None:
                    yield f"{device} counts as free, and {key} runs on it"
                elif (holder.job, holder.attempt) != (job, attempt):
                    yield f"{device} is held by {holder.job}.{holder.attempt}, and {key} runs on it"


def all_jobs(state: State, directory: Path) -> dict[JobId, Job]:
    """Jobs of the state and archived ones."""
    with closing(sqlite3.connect(directory / "journal.db")) as db:
        archived = [job_table.decoded(row) for row in db.execute(f"SELECT {job_table.COLUMNS} FROM archived_jobs")]
    return {job.id: job for job in archived} | state.jobs


def accepted_jobs(jobs: Mapping[JobId, Job], accepted: Iterable[str]) -> Iterator[str]:
    """Jobs whose submission was acknowledged and that are neither in the state nor archived."""
    for job in accepted:
        if JobId(job) not in jobs:
            yield f"job {job} was accepted, and is lost"


def at_end(
    state: State, jobs: Mapping[JobId, Job], machines: Iterable[Machine], cancelled: Iterable[str]
) -> Iterator[str]:
    """Promises that are broken after all faults are over."""
    for job in jobs.values():
        if not job.state.is_final:
            yield f"job {job.id} is {job.state.value} ({job.reason}) long after the last fault"
    for job_id in cancelled:
        ended = jobs[JobId(job_id)]
        if ended.state not in (JobState.CANCELLED, JobState.FINISHED, JobState.FAILED):
            yield f"job {job_id} was cancelled, and is {ended.state.value}"
    yield from (f"{device} is still held by {holder.job}" for device, holder in state.holders.items())
    for machine in machines:
        yield from (f"{machine.name}: a process of {key} is left" for key, _ in machine.live())
    for host in state.hosts.values():
        if host.unusable is not None:
            yield f"{host.id} is not usable: {host.unusable}"


def trained_to_the_end(jobs: Mapping[JobId, Job], trained: set[str]) -> Iterator[str]:
    """Elastic jobs that count as finished, and of which no ranks made the last step."""
    for job in jobs.values():
        if job.spec.kind is JobKind.ELASTIC and job.state is JobState.FINISHED and job.id not in trained:
            yield f"job {job.id} counts as finished, and steps of it are missing"


def replay_equals(state: State, directory: Path) -> Iterator[str]:
    """Compare the state with a replay of the whole journal in a copy of the state directory."""
    copy = directory.with_name(f"{directory.name}-replayed")
    shutil.copytree(directory, copy)
    journal = Journal(copy / "journal.db")
    scheduler = Scheduler()
    for batch in journal.replay_after(0):
        scheduler.replay(batch)
    journal.close()
    if codec.encode(scheduler.state) != codec.encode(state):
        yield "a replay of the journal leads to another state"
