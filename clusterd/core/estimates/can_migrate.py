"""Conditions under which a running job may be migrated now, and the pauses between its migrations."""

from __future__ import annotations

from math import inf

from clusterd.core.state import Attempt, Job
from clusterd.core.view import View
from clusterd.types import AttemptState, JobKind

WORTH_MOVING_S = 10.0
"""A job with less time left stays where it is."""

SETTLE_S = 2.0
"""Pause between two migrations of a job: the effect of one must be measured before the next is considered."""

SETTLE_AFTER_FAILURE_S = 30.0
"""Pause after a failed migration; doubled for each further failure in a row."""


def is_settled(job: Job) -> bool:
    """True while the job runs and is in the middle of nothing else: it may be migrated or stopped.

    Never for a job of a booking, which stays where it is to the end of the booking.
    """
    attempt = job.attempt
    return (
        attempt is not None
        and not job.spec.booking
        and attempt.state is AttemptState.RUNNING
        and attempt.migration is None
        and job.resuming is None
        and not attempt.retired
        and not attempt.survivors.steps
        and job.trials.current is None
    )


def may_change(job: Job, view: View) -> bool:
    """True for a settled job with all hosts up whose last migration did not fail a moment ago."""
    attempt = job.attempt
    if attempt is None or not is_settled(job) or not _all_up(attempt, view):
        return False
    last = job.last_plan_change
    if last is None or last.ended_s is None:
        return True
    return view.now_s - last.ended_s >= job.back_off_s(SETTLE_AFTER_FAILURE_S)


def can_migrate(job: Job, view: View, forced: bool = False) -> Attempt | None:
    """The attempt of an elastic job, if it may be migrated now and enough of the job is left to pay for it.

    Args:
        forced: pins, pauses and the time left do not count, as when a host is drained.
    """
    attempt = job.attempt
    if attempt is None or attempt.plan is None or job.spec.kind is not JobKind.ELASTIC or job.spec.booking:
        return None
    if attempt.state is not AttemptState.RUNNING or attempt.migration or job.resuming or attempt.retired:
        return None
    if job.progress.step < 1 or not _all_up(attempt, view):
        return None
    last = job.last_plan_change
    since_s = view.now_s - last.ended_s if last is not None and last.ended_s is not None else inf
    if since_s < job.back_off_s(SETTLE_AFTER_FAILURE_S):
        return None
    if forced:
        return attempt
    # Trials follow one another; a job that needs the devices does not wait for the last of them.
    settling = (
        last is not None and view.now_s - (last.ended_s or last.started_s) < SETTLE_S and not job.trials.is_running
    )
    if job.pinned is not None or settling:
        return None
    left = (job.inspection.shape or {}).get("steps", 0) - job.progress.step
    return attempt if left * (job.progress.step_time_s or 0.0) >= WORTH_MOVING_S else None


def is_idle(job: Job) -> bool:
    """True while a running job's devices have done nothing for long: more of them would not either."""
    return job.attempt is not None and job.attempt.idle_since_s is not None


def _all_up(attempt: Attempt, view: View) -> bool:
    return all(host in view.hosts and view.hosts[host].reaches(attempt.account) for host in attempt.hosts)
