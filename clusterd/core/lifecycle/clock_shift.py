"""The wall clock of the head node is set: what is counted by it goes on as if it had always been right."""

from __future__ import annotations

from dataclasses import replace

from clusterd.core.state import Job, State


def shift(state: State, by_s: float) -> None:
    """Move every point in time that is still to be compared with now; what is over keeps the time that was shown."""
    state.timers = {timer: at_s + by_s for timer, at_s in state.timers.items()}
    state.leases = {
        device: lease if lease.until_s is None else replace(lease, until_s=lease.until_s + by_s)
        for device, lease in state.leases.items()
    }
    for host in state.hosts.values():
        host.since_s += by_s
    for job in state.jobs.values():
        if not job.state.is_final:
            _shift_job(job, by_s)


def _shift_job(job: Job, by_s: float) -> None:
    job.submitted_s += by_s
    job.queued_s += by_s
    job.not_before_s += by_s
    job.started_s = _later(job.started_s, by_s)
    job.progressed_s = _later(job.progressed_s, by_s)
    for attempt in job.attempts:
        attempt.started_s += by_s
        attempt.ended_s = _later(attempt.ended_s, by_s)
        if attempt.migration is not None:
            attempt.migration.started_s += by_s
    if job.attempt is not None and job.attempt.onward is not None:
        job.attempt.onward.started_s += by_s
    for migration in job.migrations:
        migration.started_s += by_s
        migration.ended_s = _later(migration.ended_s, by_s)


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s
