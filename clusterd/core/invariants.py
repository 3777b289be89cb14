"""Invariants of the state. Tests check them after every event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from clusterd.core import transitions
from clusterd.core.booked import Booked
from clusterd.core.state import Job, State
from clusterd.types import AttemptState, HostState, JobState


def violations(state: State) -> list[str]:
    """Messages about every violated invariant; empty: none."""
    return [*_holders(state), *_jobs(state), *_bookings(state), *_index(state), *_steps(state)]


def _holders(state: State) -> list[str]:
    wrong: list[str] = []
    for device, holder in state.holders.items():
        attempt = state.attempt(holder.job, holder.attempt)
        if attempt is None or device not in attempt.held_on(holder.host):
            wrong.append(f"{device} is held by attempt {holder.job}.{holder.attempt}, which does not hold it")
    for device, others in state.sharers.items():
        if device not in state.holders:
            wrong.append(f"{device} is shared by {', '.join(others)} without a holder")
            continue
        jobs, allowed = state.jobs_on(device), state.share_limit(device)
        if not others or len(jobs) > allowed or any(state.jobs[job].attempt is None for job in jobs):
            wrong.append(f"{device} is shared by {', '.join(jobs)}, of whom {allowed} may share it")
    for job_id in state.active:
        attempt = state.jobs[job_id].attempt
        if attempt is None:
            continue
        if len(set(attempt.devices)) != len(attempt.devices):
            wrong.append(f"attempt {job_id}.{attempt.number} holds a device twice")
        for rank in attempt.ranks.values():
            place = rank.place
            held = place.device is None or job_id in state.jobs_on(place.device)
            released = attempt.state is AttemptState.STOPPING and place.host not in attempt.stop.pending
            if not held and not released:
                wrong.append(f"rank {place.rank} of {job_id} runs on {place.device} without a holder")
    return wrong


def _jobs(state: State) -> list[str]:
    wrong: list[str] = []
    for job in state.jobs.values():
        active = job.attempt is not None
        if active != (job.id in state.active):
            wrong.append(
                f"job {job.id} has {'an' if active else 'no'} attempt and is{' not' if active else ''} listed active"
            )
        if (job.state is JobState.QUEUED) != (job.id in state.queue):
            wrong.append(
                f"job {job.id} is {job.state.value} and is{'' if job.id in state.queue else ' not'} in the queue"
            )
        if job.id in state.handovers and job.state is not JobState.QUEUED:
            wrong.append(f"job {job.id} is {job.state.value} and devices are handed over to it")
        if job.state.is_final and (active or job.ended_s is None):
            wrong.append(f"job {job.id} is {job.state.value} but not over")
        if [a.number for a in job.attempts] != list(range(1, len(job.attempts) + 1)):
            wrong.append(f"job {job.id} has attempts out of order")
    return wrong


def _bookings(state: State) -> list[str]:
    wrong: list[str] = []
    for host in state.hosts.values():
        booked: list[Booked] = []
        for attempt in state.attempts_on(host.id):
            if attempt.state is not AttemptState.STOPPING or host.id in attempt.stop.pending:
                booked.append(attempt.booked)
            if attempt.migration is not None:
                booked.append(attempt.migration.booked.beyond(attempt.booked))
            booked += [retired.booked for retired in attempt.retired.values() if host.id in retired.pending]
        here = [each.on(host.id) for each in booked]
        cores, memory = sum(cores for cores, _ in here), sum(memory for _, memory in here)
        if (cores, memory) != (host.cores_used, host.memory_used_bytes):
            wrong.append(f"{host.id} books {host.cores_used} cores, its attempts use {cores}")
        if host.state is HostState.UP and host.facts is None:
            wrong.append(f"{host.id} is up but has not reported its facts")
    return wrong


def _index(state: State) -> list[str]:
    attempts = {job: state.jobs[job].attempt for job in state.active}
    hosts = {job: attempt.all_hosts for job, attempt in attempts.items() if attempt is not None}
    wrong = [] if hosts == state.hosts_by_job else ["the hosts of active jobs are not those of the index"]
    listed = {(host, job) for host, jobs in state.jobs_by_host.items() for job in jobs}
    if listed != {(host, job) for job, some in hosts.items() for host in some}:
        wrong.append("the index of attempts by host differs from the attempts")
    return wrong


_Machine = tuple[str, Mapping[Any, frozenset[Any]], Any]
"""Name of an object with a state, the table of its kind, and the object."""


def _steps(state: State) -> list[str]:
    """Changes of state that are not in the table of their object's kind, by its history."""
    machines: list[_Machine] = [(f"host {host.id}", transitions.HOST, host) for host in state.hosts.values()]
    machines += [each for job in state.jobs.values() for each in _machines_of(job)]
    wrong: list[str] = []
    for name, table, machine in machines:
        past = [was for was, _ in machine.history] + [machine.state.value]
        steps = {(here.value, there.value) for here, nexts in table.items() for there in nexts}
        begins = len(machine.history) == transitions.HISTORY_MAX or past[0] == next(iter(table)).value
        if not begins or any(step not in steps for step in pairwise(past)):
            wrong.append(f"{name} went {' -> '.join(past)}, which is not in its table")
    return wrong


def _machines_of(job: Job) -> Iterator[_Machine]:
    """A job, its attempts, and what changes them."""
    yield f"job {job.id}", transitions.JOB, job
    yield f"trials of job {job.id}", transitions.TRIAL_SERIES, job.trials
    for trial in [*job.trials.finished, *filter(None, [job.trials.current])]:
        yield f"trial of {trial.plan} by job {job.id}", transitions.TRIAL, trial
    for migration in [*job.migrations, *filter(None, [attempt.migration for attempt in job.attempts])]:
        yield f"migration {migration.number} of job {job.id}", transitions.MIGRATION, migration
    for restart in [*job.restarts, *filter(None, [attempt.pending_restart for attempt in job.attempts])]:
        yield f"restart {restart.number} of job {job.id}", transitions.RESTART, restart
    for attempt in job.attempts:
        yield f"attempt {job.id}.{attempt.number}", transitions.ATTEMPT, attempt
