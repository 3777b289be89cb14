"""Attained service, remaining work, and its predictability: the first stage of a pass (after AITurbo)."""

from __future__ import annotations

from clusterd.core.state import Attempt, Job, Outcome
from clusterd.types import JobKind

STEPS_TO_TRUST = 10
"""Measured steps after which a job's own speed counts as known."""


def attained_s(job: Job, now_s: float) -> float:
    """Device-seconds that a job has held, launches and migrations included."""
    return sum(_of_attempt(job, attempt, now_s) for attempt in job.attempts)


def _of_attempt(job: Job, attempt: Attempt, now_s: float) -> float:
    end_s = attempt.ended_s if attempt.ended_s is not None else now_s
    changes = job.plan_changes
    moves = [m for m in changes if not m.failure and m.started_s >= attempt.started_s and m.started_s <= end_s]
    if not moves:
        return (end_s - attempt.started_s) * max(len(attempt.ranks), 1)
    total, since_s, size = 0.0, attempt.started_s, moves[0].old_plan.ranks
    for move in moves:
        total += (move.started_s - since_s) * size
        since_s, size = move.started_s, len(move.ranks)
    return total + (end_s - since_s) * size


def executed_s(job: Job, now_s: float) -> float:
    """Seconds for which a job has held devices."""
    return sum((a.ended_s if a.ended_s is not None else now_s) - a.started_s for a in job.attempts)


def time_left_s(job: Job) -> float | None:
    """Seconds that the job's next attempt may run; None: no limit.

    Time before a preemption counts, as the job keeps its state. After a fault the limit starts anew, as work may be
    repeated.
    """
    limit_s = job.spec.time_limit_s
    if limit_s is None or job.spec.kind is JobKind.COMMAND:
        return limit_s
    used_s = 0.0
    for attempt in reversed(job.attempts):
        if attempt.ended_s is None:
            continue  # the attempt that has just begun
        if attempt.stop.outcome not in (Outcome.PREEMPTED, Outcome.REFUSED):
            break
        used_s += attempt.ended_s - attempt.started_s if attempt.stop.outcome is Outcome.PREEMPTED else 0.0
    return max(limit_s - used_s, 0.0)


def total_steps(job: Job) -> int:
    """Steps that the job trains from start to end; 0: unknown.

    The smaller of the declared number and the step at which a trusted loss curve reaches the job's target.
    """
    declared = int((job.inspection.shape or {}).get("steps") or 0)
    if job.progress.predicted_steps is None or job.progress.predictable is False:
        return declared
    return min(declared, job.progress.predicted_steps) if declared else job.progress.predicted_steps


def steps_left(job: Job) -> float | None:
    """Steps still to train; None: unknown."""
    steps = total_steps(job)
    return max(float(steps - job.progress.step), 0.0) if steps else None


def likely_steps_left(job: Job) -> float:
    """Expected steps still to train; for an unknown number, as many as the job has made, and at least 100.

    Lifetimes of training jobs are heavy-tailed: a job that has run long is expected to run long (after Tiresias).
    """
    left = steps_left(job)
    return left if left is not None else max(float(job.progress.step), 100.0)


def is_predictable(job: Job) -> bool:
    """True where the job's remaining time can be computed.

    Its number of steps is known, some steps were timed, and its loss follows the fitted curve. Jobs that leave their
    curve are mostly explorations that end early.
    """
    known = job.spec.kind is JobKind.ELASTIC and total_steps(job) > 0 and job.progress.step >= STEPS_TO_TRUST
    return known and job.progress.predictable is not False
