"""First stage: predictability of a job's remaining time (after AITurbo).

A job declares its number of steps or a target loss. The declared number is taken as it stands; the step at which the
loss reaches its target is predicted outside the core and arrives by an event, with a verdict on the loss curve.
"""

from __future__ import annotations

from clusterd.core.estimates.attained_service import total_steps
from clusterd.core.state import Job
from clusterd.types import JobKind

STEPS_TO_TRUST = 10
"""Measured steps after which a job's own speed counts as known."""


def is_predictable(job: Job) -> bool:
    """True where the job's remaining time can be computed.

    Its number of steps is known, some steps were timed, and its loss follows the fitted curve. Jobs that leave their
    curve are mostly explorations that end early.
    """
    known = job.spec.kind is JobKind.ELASTIC and total_steps(job) > 0 and job.step >= STEPS_TO_TRUST
    return known and job.predictable is not False
