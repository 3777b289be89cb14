"""First stage: is it known how a job will go on? (after AITurbo)"""

from __future__ import annotations

from clusterd.core.state import Job
from clusterd.types import JobKind

STEPS_TO_TRUST = 10
"""Measured steps before a job's own speed is taken for known."""


def is_predictable(job: Job) -> bool:
    """The job's remaining time can be computed: it says how many steps it has, and some were timed."""
    steps = (job.shape or {}).get("steps")
    return job.spec.kind is JobKind.ELASTIC and bool(steps) and job.step >= STEPS_TO_TRUST
