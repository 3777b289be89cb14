"""Jobs whose devices do nothing: what the lab lets become of them, after its people were warned."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.allocation.migration_targets import first_that_works
from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.events import TimerKind
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import attempts, stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.lifecycle.migration_events import migrate
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.core.view import View
from clusterd.types import AttemptState, JobKind, JobSpec, Reclaim
from clusterd.units import duration

AWAY_S = 60.0
"""Time until devices of a host that does not answer are looked at again."""


def step(spec: JobSpec, devices: int, reclaim: Reclaim) -> Reclaim | None:
    """Next thing done to an idle job that holds so many devices, of what the lab allows; None: nothing."""
    if spec.is_reservation:
        return Reclaim.END
    if reclaim is Reclaim.SHELLS:
        return None
    if spec.kind is JobKind.ELASTIC and devices > 1:
        return Reclaim.SHRINK
    if reclaim is Reclaim.SUSPEND and spec.kind is JobKind.COMMAND and not spec.preemptible:
        return None  # it would begin anew
    return reclaim if reclaim is not Reclaim.SHRINK else None


def described(spec: JobSpec, devices: int, reclaim: Reclaim) -> str:
    """Sentence about the next thing done to an idle job, in the present; empty: nothing."""
    match step(spec, devices, reclaim):
        case None:
            return ""
        case Reclaim.SHRINK:
            return "it shrinks to 1 device"
        case Reclaim.SUSPEND:
            return "it is suspended"
    return "it ends"


def on_idleness_observed(ctx: HandlerContext, event: e.IdlenessObserved) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        return
    attempt.idle_since_s, attempt.reclaim = event.since_s, event.reclaim
    ctx.cancel_timer(TimerKind.IDLE, event.job)
    if event.since_s is not None and event.reclaim_at_s is not None:
        _await(ctx, ctx.state.jobs[event.job], attempt, event.reclaim_at_s)
    ctx.pass_due |= event.since_s is None  # it may grow again


def _await(ctx: HandlerContext, job: Job, attempt: Attempt, at_s: float) -> None:
    """Set the timer of the next thing that is done to an idle job, if anything is."""
    coming = attempt.migration.places if attempt.migration is not None else attempt.devices
    if next_step := described(job.spec, len(coming), attempt.reclaim):
        ctx.set_timer(TimerKind.IDLE, job.id, at_s, f"the devices of {job.spec.name} do nothing: {next_step} then")


def reclaim(ctx: HandlerContext, job: Job | None) -> None:
    """Take devices of a job that have done nothing for too long; its person was warned."""
    attempt = job.attempt if job is not None else None
    if job is None or attempt is None or attempt.state is not AttemptState.RUNNING or attempt.idle_since_s is None:
        return
    idle_s = ctx.now_s - attempt.idle_since_s
    if attempts.is_away(ctx.state, attempt):  # nobody knows whether they do nothing still
        _await(ctx, job, attempt, ctx.now_s + AWAY_S)
        return
    why = f"its devices did nothing for {duration(idle_s)}"
    match step(job.spec, len(attempt.devices), attempt.reclaim):
        case Reclaim.SHRINK:
            _shrink(ctx, job, why)
            if attempt.state is AttemptState.RUNNING:  # the device that is left has as long again
                _await(ctx, job, attempt, ctx.now_s + idle_s)
        case Reclaim.SUSPEND:
            job.held_by = ""
            stopping.stop(ctx, attempt, Outcome.PREEMPTED, f"suspended: {why}")
        case Reclaim.END:
            stopping.stop(ctx, attempt, Outcome.TIME_LIMIT, f"{why}: they are free")


def _shrink(ctx: HandlerContext, job: Job, why: str) -> None:
    view = View(ctx.state, ctx.now_s)
    if (attempt := can_migrate(job, view, forced=True)) is None:
        return
    own = of_ranks(view.hosts, attempt)
    if (move := first_that_works(job, own, own, 1, None, why, view.hosts)) is not None:
        migrate(ctx, move)
