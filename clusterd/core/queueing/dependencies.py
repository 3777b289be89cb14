"""Conditions of a queued job beside resources: other jobs, and hosts that hold its data."""

from __future__ import annotations

from collections.abc import Mapping

from clusterd.core import data_locality
from clusterd.core.state import Job, State
from clusterd.types import JobId, JobSpec, JobState

_ENDED = {JobState.FINISHED: "finished", JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}

_SATISFYING = {
    "ok": {JobState.FINISHED},
    "failed": {JobState.FAILED},
    "any": {JobState.FINISHED, JobState.FAILED, JobState.CANCELLED},
}
"""Final states of an awaited job that let the other start, by condition."""

CONDITIONS = tuple(_SATISFYING)

CORRESPONDING, SINGLETON = "corr", "singleton"
"""Words of requests for the task of the same index, and for earlier jobs of the same name; see `find_awaited`."""

SHOWN_MAX = 3
"""Awaited jobs that a message names."""


def split(after: str) -> tuple[JobId, str]:
    """Job and condition of ``12``, ``12:ok``, ``12:any`` and ``12:failed``; the condition is "ok" by default."""
    job, _, condition = after.partition(":")
    return JobId(job), condition or "ok"


def is_satisfied(job: Job, condition: str) -> bool:
    """True where the end of the job lets the other start."""
    return job.state in _SATISFYING[condition]


def waits_for(spec: JobSpec, state: State) -> str | None:
    """Message about the jobs or data that the job waits for; None: it may start."""
    awaited = [job for job, condition in _before(spec, state.jobs) if not is_satisfied(job, condition)]
    if awaited:
        named = [f"{job.spec.name} ({job.id}, {job.state.value})" for job in awaited[:SHOWN_MAX]]
        more = [f"{len(awaited) - SHOWN_MAX} more"] if len(awaited) > SHOWN_MAX else []
        return "waits for " + " and ".join([*named, *more])
    return data_locality.waits_for(spec, state.hosts)


def in_vain(spec: JobSpec, jobs: Mapping[JobId, Job]) -> str | None:
    """Message about a job that it was to start after and that ended in another way; None: there is none."""
    for job, condition in _before(spec, jobs):
        if (how := _ENDED.get(job.state)) is not None and not is_satisfied(job, condition):
            kind = " fails" if condition == "failed" else ""
            return f"it was to start after {job.spec.name} ({job.id}){kind}, which {how}"
    return None


def awaits(spec: JobSpec, job: JobId, jobs: Mapping[JobId, Job]) -> str | None:
    """Name of a job that `spec` is to start after and that itself waits for `job`; None: there is none."""
    for first, _ in _before(spec, jobs):
        seen, ahead = set(), [first]
        while ahead:
            other = ahead.pop()
            if other.id == job:
                return f"{first.spec.name} ({first.id})"
            if other.id not in seen and not other.state.is_final:
                seen.add(other.id)
                ahead += [awaited for awaited, _ in _before(other.spec, jobs)]
    return None


def _before(spec: JobSpec, jobs: Mapping[JobId, Job]) -> list[tuple[Job, str]]:
    # A job adopted from its hosts may name jobs that were submitted after the backup; they had ended before it started.
    return [(jobs[job], condition) for job, condition in map(split, spec.after) if job in jobs]
