"""First stage: is it known how a job will go on? (after AITurbo)

A job says how many steps it trains, or at which loss it is done. The first is believed as it stands; the second is
worth what the loss curve fitted so far is worth, which is judged outside the core, told by an event, and may change.
"""

from __future__ import annotations

from clusterd.core.state import Job
from clusterd.types import JobKind

STEPS_TO_TRUST = 10
"""Measured steps before a job's own speed is taken for known."""


def steps_in_all(job: Job) -> int:
    """Steps that the job will have trained when it is over; 0: nobody knows.

    The sooner of what it declares and what its loss curve foretells for its target, where that curve can be believed.
    """
    declared = int((job.shape or {}).get("steps") or 0)
    if job.foreseen_steps is None or job.predictable is False:
        return declared
    return min(declared, job.foreseen_steps) if declared else job.foreseen_steps


def is_predictable(job: Job) -> bool:
    """The job's remaining time can be computed: the number of its steps is known, some were timed, and it goes on as
    its loss curve foretold; jobs that do not are mostly explorations that end early."""
    known = job.spec.kind is JobKind.ELASTIC and steps_in_all(job) > 0 and job.step >= STEPS_TO_TRUST
    return known and job.predictable is not False
