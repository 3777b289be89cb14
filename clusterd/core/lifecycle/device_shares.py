"""Memory of devices that several jobs share: each may hold its part, and who goes on holding more is stopped.

No driver divides a GPU's memory between processes of any program. What they hold is measured instead.
"""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.events import TimerKind
from clusterd.core.lifecycle import attempts, stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.types import AttemptState
from clusterd.units import size

GRACE_S = 60.0
"""Time in which a job that was warned may give memory back: a peak between two phases passes."""


def on_memory_observed(ctx: HandlerContext, event: e.DeviceMemoryObserved) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        return
    if event.used_bytes <= event.part_bytes:
        attempt.over_share = ""
        ctx.cancel_timer(TimerKind.SHARE, event.job)
        return
    attempt.over_share = described(event)
    if not ctx.has_timer(TimerKind.SHARE, event.job):
        _await(ctx, ctx.state.jobs[event.job], attempt)


def _await(ctx: HandlerContext, job: Job, attempt: Attempt) -> None:
    ctx.set_timer(TimerKind.SHARE, job.id, ctx.now_s + GRACE_S, f"{job.spec.name} {attempt.over_share}")


def described(event: e.DeviceMemoryObserved) -> str:
    """Sentence about a job that holds more than its part."""
    return f"holds {size(event.used_bytes)} of the memory of {event.device}, and its part is {size(event.part_bytes)}"


def end_over_share(ctx: HandlerContext, job: Job | None) -> None:
    """End a job that was warned and still holds more than its part: those beside it would run out of memory."""
    attempt = job.attempt if job is not None else None
    if job is None or attempt is None or attempt.state is not AttemptState.RUNNING or not attempt.over_share:
        return
    if attempts.is_away(ctx.state, attempt):
        _await(ctx, job, attempt)
    else:
        stopping.stop(ctx, attempt, Outcome.OVER_SHARE, f"it {attempt.over_share}")
