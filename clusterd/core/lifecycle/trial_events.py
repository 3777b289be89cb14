"""Handlers of trial events and of speeds learned, and the part of a pass that runs trials."""

from __future__ import annotations

from dataclasses import replace

from clusterd.core import events as e
from clusterd.core.estimates.first_fit import memory_conflict
from clusterd.core.events import TimerKind
from clusterd.core.lifecycle import migrations, trials
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.lifecycle.migration_events import abandon_trial, migrate
from clusterd.core.state import Attempt, Job, Trial
from clusterd.core.transitions import SeriesState, TrialState
from clusterd.core.view import Move
from clusterd.types import JobId

TRIAL_S = 120.0
"""A trial that has not been measured after this is abandoned."""

RESTART_MAX_S = 600.0
"""Additional time for a trial that the job has to restart for."""


def on_speed_learned(ctx: HandlerContext, event: e.SpeedLearned) -> None:
    ctx.state.performance_tables[event.model] = event.table
    ctx.pass_due = True


def on_completion_predicted(ctx: HandlerContext, event: e.CompletionPredicted) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is not None:
        job.progress.predictable, job.progress.predicted_steps = event.predictable, event.steps
        ctx.pass_due = True


def on_trial_proposed(ctx: HandlerContext, event: e.TrialProposed) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is None or job.attempt is None:
        return
    if event.plan is None:
        job.trials.current = None
        if job.trials.is_running:
            job.trials.go(SeriesState.RETURNING, event.at_s)
    elif job.pinned is None:  # it may have been pinned since the profiler looked at it
        job.trials.current = Trial(event.plan, event.steps, event.why)
        job.trials.go(SeriesState.RUNNING, event.at_s)
        ctx.set_timer(TimerKind.TRIAL, job.id, event.at_s + TRIAL_S, f"{event.plan} is tried with {job.spec.name}")
    ctx.pass_due = True


def on_trial_measured(ctx: HandlerContext, event: e.TrialMeasured) -> None:
    job = ctx.state.jobs.get(event.job)
    if job is None:
        return
    trial = job.trials.current
    if trial is not None and trial.plan == event.plan:
        job.trials.current = None
    else:
        trial = Trial(event.plan, event.steps, "as it ran")
    trial.go(TrialState.MEASURED, event.at_s)
    trial.step_time_s, trial.predicted_s = event.step_time_s, event.predicted_s
    job.trials.finished.append(trial)


def run_trials(ctx: HandlerContext) -> None:
    """Migrate jobs to the plans to be tried on them, and back to their own plans afterwards."""
    for job_id in ctx.state.active:
        job = ctx.state.jobs[job_id]
        returns = job.trials.state is SeriesState.RETURNING or _has_reserved_devices(job)
        attempt = trials.ready(job) if job.trials.current is not None or returns else None
        if attempt is None:
            continue
        if job.trials.current is not None:
            _start_trial(ctx, job, attempt, job.trials.current)
        elif not job.trials.is_running:
            _return_from_trials(ctx, job, attempt)


def _start_trial(ctx: HandlerContext, job: Job, attempt: Attempt, trial: Trial) -> None:
    """Bring the job to the trial's plan, or fail the trial."""
    if trial.state is TrialState.RUNNING:
        return
    if attempt.plan == trial.plan:
        trial.go(TrialState.RUNNING, ctx.now_s)
        trial.from_step = job.progress.step
        return
    failures = (change.failure for change in job.plan_changes if change.number == trial.migration)
    if failure := next(failures, ""):
        trials.fail(job, trial, failure, ctx.now_s, is_refused=True)
        return
    answer = trials.move_for(job, attempt, trial.plan, ctx.state.hosts, f"trial of {trial.plan}: {trial.why}")
    if isinstance(answer, str):
        trials.fail(job, trial, answer, ctx.now_s, is_refused=True)
        return
    used = {place.device for place in answer.ranks}
    no_memory = memory_conflict(ctx.state.hosts, job, attempt, trial.plan, used)
    if no_memory is not None and used != {*attempt.devices, *attempt.reserved_devices}:
        # During a restart through host memory nothing would reserve the devices that the trial leaves idle.
        trials.fail(job, trial, no_memory, ctx.now_s)
        return
    trial.migration = migrations.next_number(job)
    if migrate(ctx, replace(answer, may_restart=True)) and trial.state is TrialState.PROPOSED:
        trial.go(TrialState.MOVING, ctx.now_s)
    if attempt.pending_restart is not None:
        job.trials.current = trial  # it goes on with the next attempt
        job.trials.go(SeriesState.RUNNING, ctx.now_s)
        until_s = ctx.now_s + RESTART_MAX_S + TRIAL_S
        ctx.set_timer(TimerKind.TRIAL, job.id, until_s, f"{job.spec.name} starts again with {trial.plan}")
    if attempt.migration is not None:
        trials.reserve_devices(attempt, answer)


def _return_from_trials(ctx: HandlerContext, job: Job, attempt: Attempt) -> None:
    """Migrate the job to the fastest known plan for its devices, or give back those that it does not need."""
    job.trials.go(SeriesState.IDLE, ctx.now_s)
    best = trials.best_plan(job, attempt, ctx.state) if job.pinned is None else None
    if best is not None:
        plan, why = best
        answer = trials.move_for(job, attempt, plan, ctx.state.hosts, f"{plan}: {why}")
        if isinstance(answer, Move):
            migrate(ctx, replace(answer, may_restart=True))
            if attempt.migration is not None or attempt.pending_restart is not None:
                return
    trials.release_devices(ctx.state, attempt)


def _has_reserved_devices(job: Job) -> bool:
    return job.attempt is not None and bool(job.attempt.reserved_devices)


def trial_timed_out(ctx: HandlerContext, job_id: JobId) -> None:
    """Abandon a trial that was not measured in time, or a series to which the profiler adds nothing."""
    job = ctx.state.jobs.get(job_id)
    if job is None:
        return
    if job.trials.current is not None:
        trials.fail(job, job.trials.current, f"not measured within {TRIAL_S:.0f} s", ctx.now_s)
    elif job.trials.is_running:
        job.trials.go(SeriesState.RETURNING, ctx.now_s)


def waits_for_trial(ctx: HandlerContext, move: Move) -> bool:
    """True if a policy's migration waits for the job's trials, which take seconds.

    A migration off a drained host or a claimed device, or onto fewer devices, does not wait: it ends the trials.
    """
    job = ctx.state.jobs[move.job]
    attempt = job.attempt
    if not job.trials.is_running or attempt is None:
        return False
    hosts = [ctx.state.hosts[h] for h in attempt.hosts if h in ctx.state.hosts]
    leaves_drained = any(host.drained is not None or host.claimed.keys() & set(attempt.devices) for host in hosts)
    shrinks = len(move.ranks) < len({*attempt.devices, *attempt.reserved_devices})
    if attempt.migration is not None or not (leaves_drained or shrinks):
        return True
    abandon_trial(ctx, job, move.reason)
    return False
