"""What a job has got so far, and what it still needs: attained service and remaining work."""

from __future__ import annotations

from clusterd.core.queueing.predictability import steps_in_all
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.types import JobKind


def attained_s(job: Job, now_s: float) -> float:
    """Device-seconds that a job has held, moves and launches included."""
    return sum(_of_attempt(job, attempt, now_s) for attempt in job.attempts)


def _of_attempt(job: Job, attempt: Attempt, now_s: float) -> float:
    end_s = attempt.ended_s if attempt.ended_s is not None else now_s
    moves = [m for m in job.migrations if not m.failure and m.started_s >= attempt.started_s and m.started_s <= end_s]
    if not moves:
        return (end_s - attempt.started_s) * max(len(attempt.ranks), 1)
    total, since_s, size = 0.0, attempt.started_s, moves[0].old_plan.ranks
    for move in moves:
        total += (move.started_s - since_s) * size
        since_s, size = move.started_s, len(move.ranks)
    return total + (end_s - since_s) * size


def executed_s(job: Job, now_s: float) -> float:
    """Seconds for which it held devices."""
    return sum((a.ended_s if a.ended_s is not None else now_s) - a.started_s for a in job.attempts)


def time_left_s(job: Job) -> float | None:
    """How long its next attempt may run; None: no limit.

    What a job had until it was moved through host memory, or made way, counts where it keeps its state. After a fault
    the clock starts anew: what was done may have to be done again.
    """
    limit_s = job.spec.time_limit_s
    if limit_s is None or job.spec.kind is JobKind.COMMAND:
        return limit_s
    had_s = 0.0
    for attempt in reversed(job.attempts):
        if attempt.ended_s is None:
            continue  # the one that has just begun
        if attempt.outcome not in (Outcome.PREEMPTED, Outcome.REFUSED):
            break
        had_s += attempt.ended_s - attempt.started_s if attempt.outcome is Outcome.PREEMPTED else 0.0
    return max(limit_s - had_s, 0.0)


def steps_left(job: Job) -> float | None:
    """Steps still to train; None: nobody knows how many there are."""
    steps = steps_in_all(job)
    return max(float(steps - job.step), 0.0) if steps else None


def likely_steps_left(job: Job) -> float:
    """Steps still to train; of a job that does not say how many there are, as many as it has made, and at least 100.

    Lifetimes of training jobs have heavy tails: what has lasted long lasts long (after Tiresias's observation).
    """
    left = steps_left(job)
    return left if left is not None else max(float(job.step), 100.0)
