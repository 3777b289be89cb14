"""Conditions of a queued job beside resources: other jobs, and hosts that hold its data."""

from __future__ import annotations

from collections.abc import Mapping

from clusterd.core import data_locality
from clusterd.core.state import Job, State
from clusterd.types import JobId, JobSpec, JobState

_ENDED = {JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}


def waits_for(spec: JobSpec, state: State) -> str | None:
    """Message about the jobs or data that the job waits for; None: it may start."""
    awaited = [job for job in _before(spec, state.jobs) if job.state is not JobState.FINISHED]
    if awaited:
        return "waits for " + " and ".join(f"{job.spec.name} ({job.id}, {job.state.value})" for job in awaited)
    return data_locality.waits_for(spec, state.hosts)


def in_vain(spec: JobSpec, jobs: Mapping[JobId, Job]) -> str | None:
    """Message about a job that it was to start after and that ended without success; None: there is none."""
    for job in _before(spec, jobs):
        if (how := _ENDED.get(job.state)) is not None:
            return f"it was to start after {job.spec.name} ({job.id}), which {how}"
    return None


def _before(spec: JobSpec, jobs: Mapping[JobId, Job]) -> list[Job]:
    return [jobs[job] for job in spec.after]
