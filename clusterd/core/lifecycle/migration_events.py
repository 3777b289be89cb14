"""Handlers of migration events: from a user's request to the report of the target ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.request_grant import objection_to_size
from clusterd.core.allocation.requested_migration import requested as requested_migration
from clusterd.core.estimates.can_migrate import SETTLE_S
from clusterd.core.estimates.first_fit import memory_conflict
from clusterd.core.events import TimerKind
from clusterd.core.lifecycle import attempts, jobs, migrations, stopping, trials
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.state import Attempt, Job, Outcome
from clusterd.core.transitions import MigrationState, SeriesState, TrialState
from clusterd.core.view import Move, Refusal, View
from clusterd.types import AttemptState, JobId, JobKind


def on_migration_requested(ctx: HandlerContext, event: e.MigrationRequested) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is None:
        return
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        _restart_under(ctx, job, event)
        return
    answer = requested_migration(job, View(ctx.state, event.at_s), event.plan, event.devices, event.by)
    if isinstance(answer, Refusal):
        ctx.hold(job, answer.reason)
        return
    abandon_trial(ctx, job, f"{event.by or 'its user'} moves it")
    if event.pin and migrations.is_there(job, answer):
        job.pinned = answer.plan
        ctx.hold(job, f"pinned to {answer.plan} where it is, by {event.by or 'its user'}")
        return
    if migrate(ctx, replace(answer, may_restart=True)) and (event.pin or job.pinned is not None):
        job.pinned = answer.plan


def _restart_under(ctx: HandlerContext, job: Job, event: e.MigrationRequested) -> None:
    """Stop a checkpointable job, which cannot migrate live, so that it saves and starts again at another size."""
    attempt = job.attempt
    if attempt is None or attempt.state is not AttemptState.RUNNING or event.plan is None:
        ctx.hold(job, f"{job.spec.name} is {job.state.value}: only a running job can be given another size")
        return
    objection = objection_to_size(job, View(ctx.state, event.at_s), event.plan)
    if objection:
        ctx.hold(job, f"it was not started again as {event.plan}: {objection}")
        return
    job.pinned = event.plan
    reason = f"{event.by or 'its user'} wants it under {event.plan}: it saves, stops"
    stopping.stop(ctx, attempt, Outcome.PREEMPTED, reason)
    ctx.pass_due = True


def abandon_trial(ctx: HandlerContext, job: Job, why: str, is_refused: bool = False) -> None:
    """End the job's series of trials early; the job returns to its own plan.

    Args:
        is_refused: the current trial's plan cannot run: it is not tried again.
    """
    trial = job.trials.current
    if trial is not None:
        trials.fail(job, trial, why, ctx.now_s, is_refused)
    if job.trials.state is SeriesState.RUNNING:
        job.trials.go(SeriesState.RETURNING, ctx.now_s)


def on_job_unpinned(ctx: HandlerContext, event: e.JobUnpinned) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is not None:
        job.pinned = None
        ctx.pass_due = True


def migrate(ctx: HandlerContext, move: Move) -> bool:
    """Begin a migration: live where memory allows it, else through host memory if `move.may_restart`.

    Returns:
        True if it began; otherwise the objection is recorded as the job's reason.
    """
    job = ctx.state.jobs[move.job]
    objection = migrations.objection(ctx.state, job, move, ctx.now_s)
    if objection:
        ctx.hold(job, f"a migration was refused: {objection}")
        return False
    attempt = attempts.running(ctx.state, job.id)
    devices = {place.device for place in move.ranks}
    no_memory = memory_conflict(ctx.state.hosts, job, attempt, move.plan, devices)
    saves = job.spec.kind is JobKind.CHECKPOINTABLE
    if no_memory is None and not saves:
        begin_migration(ctx, job, attempt, move)
    elif move.may_restart:
        why = move.reason if saves else f"{move.reason}; through host memory: {no_memory}"
        stopping.stop(ctx, attempt, Outcome.PREEMPTED, why)
        attempt.pending_restart = migrations.through_memory(ctx.state, job, attempt, move, ctx.now_s)
    else:
        ctx.hold(job, f"a migration was refused: {no_memory}")
        return False
    return True


def begin_migration(
    ctx: HandlerContext,
    job: Job,
    attempt: Attempt,
    move: Move,
    lost: Iterable[int] = (),
    step: int | None = None,
    source_releases_memory: bool = False,
) -> None:
    """Book the target ranks and have the executor prepare them; see `StartMigration` for the arguments."""
    old_plan, old_ranks = attempt.plan, tuple(rank.place for _, rank in sorted(attempt.ranks.items()))
    migration = migrations.begin(ctx.state, job, move, ctx.now_s, lost)
    job.reason = move.reason
    assert old_plan is not None
    ctx.decide(
        d.StartMigration(
            cause=ctx.cause,
            reason=move.reason,
            job=job.id,
            attempt=attempt.number,
            generation=attempt.generation,
            plan=old_plan,
            ranks=old_ranks,
            new_generation=migration.generation,
            new_plan=move.plan,
            new_ranks=migration.places,
            lost=migration.lost,
            step=step,
            source_releases_memory=source_releases_memory,
        )
    )


def resume(ctx: HandlerContext, attempt: Attempt, reason: str) -> None:
    """Let the target ranks of a switched migration train."""
    ctx.to_ranks(d.ResumeAttempt, attempt, attempt.hosts, reason)


def _migrating(ctx: HandlerContext, job: JobId, attempt: int, generation: int) -> Attempt | None:
    """The attempt, if it is migrating to this generation."""
    known = ctx.state.attempt(job, attempt)
    is_it = known is not None and known.migration is not None and known.migration.generation == generation
    return known if is_it else None


def on_migration_advanced(ctx: HandlerContext, event: e.MigrationAdvanced) -> None:
    phase = (event.phase, event.seconds, event.what)
    attempt = _migrating(ctx, event.job, event.attempt, event.generation)
    if attempt is not None and attempt.migration is not None:
        attempt.migration.phases.append(phase)
        return
    job = ctx.state.jobs.get(event.job)
    if job is not None and job.migrations and job.migrations[-1].generation == event.generation:
        job.migrations[-1].phases.append(phase)  # of a phase after the switch


def on_migration_verified(ctx: HandlerContext, event: e.MigrationVerified) -> None:
    attempt = _migrating(ctx, event.job, event.attempt, event.generation)
    if attempt is None or attempt.migration is None or attempt.state is not AttemptState.RUNNING:
        return
    job = ctx.state.jobs[event.job]
    migration = attempt.migration
    migration.step, migration.network_bytes, migration.local_bytes = (
        event.step,
        event.network_bytes,
        event.local_bytes,
    )
    if job.trials.current is None and job.trials.state is SeriesState.RETURNING:
        job.trials.go(SeriesState.IDLE, event.at_s)
    old_generation = attempt.generation
    retired = migrations.switch(ctx.state, job, attempt, event.at_s)
    job.reason += jobs.release_pin(job, migration.plan)
    resume(ctx, attempt, f"the whole state of step {event.step} is there: {migration.reason}")
    reason = f"its state has moved to generation {attempt.generation}"
    stopping.retire(ctx, attempt, old_generation, retired, jobs.grace_s(ctx, attempt), reason)


def on_migration_finished(ctx: HandlerContext, event: e.MigrationFinished) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt, event.generation)
    job = ctx.state.jobs.get(event.job)
    migration = job.resuming if job is not None else None
    if attempt is None or job is None or migration is None:
        return
    migration.go(MigrationState.DONE, event.at_s)
    migration.downtime_s, migration.ended_s = event.downtime_s, event.at_s
    migrations.learn_cost(ctx.state.move_costs_s, job.inspection.model, event.downtime_s)
    if job.trials.current is None:
        trials.release_devices(ctx.state, attempt)
    # A pass at that time considers what the pause after a migration ruled out until then.
    settle_s = event.at_s + SETTLE_S
    ctx.set_timer(TimerKind.SETTLE, job.id, settle_s, f"{job.spec.name} was moved")
    ctx.pass_due = True


def on_migration_failed(ctx: HandlerContext, event: e.MigrationFailed) -> None:
    attempt = _migrating(ctx, event.job, event.attempt, event.generation)
    if attempt is None or attempt.migration is None:
        return
    job, migration = ctx.state.jobs[event.job], attempt.migration
    if event.out_of_memory:
        shared = {place.device for place in migration.places}.intersection(attempt.devices)
        job.failures.needs_exclusive_memory |= bool(shared)
    if event.refused:
        job.failures.reject_plan(migration.plan, event.refused)
    why = event.why
    if event.host is not None:
        why = f"{event.host} did not start it: {event.why}"
        if event.host not in attempt.hosts:
            job.failures.excluded_hosts[event.host] = event.why
    trial = job.trials.current
    stopping.abandon_migration(ctx, attempt, f"{event.phase}: {why}")
    if trial is not None and trial.state is TrialState.MOVING:
        trials.fail(job, trial, job.migrations[-1].failure, ctx.now_s)
    if attempt.survivors.steps:  # no source rank is left to go back to
        loss = f"ranks {list(migration.lost)} died" if migration.lost else f"{attempt.plan} ran out of memory"
        stopping.stop(ctx, attempt, Outcome.HOST_LOST, f"{loss}, and going on failed: {why}")
    ctx.pass_due = True
