"""Handlers of attempt and rank events: launch, progress, exit, recovery from survivors, stop."""

from __future__ import annotations

from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.estimates.can_migrate import SETTLE_S
from clusterd.core.events import TimerKind
from clusterd.core.host import Host
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import attempts, jobs, migrations, recovery, stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.lifecycle.migration_events import abandon_trial, begin_migration
from clusterd.core.state import Attempt, Checkpoint, Job, Outcome, Restart
from clusterd.core.transitions import MigrationState, RestartState
from clusterd.core.view import Refusal, View
from clusterd.types import AttemptState, HostId, JobKind, JobState, RankEnd, RankReport, Reason
from clusterd.units import duration

TARGET_TIMES = 3
"""Consecutive reports with the loss on target that end a job; one lucky batch is not enough."""

STALL_STEPS = 20
"""A job never counts as stalled within this many of its step times."""

START_STALL_S = 1800.0
"""Nor within this time of its launch, before its first step: it imports, reads data, and compares plans."""


def on_environment_build_started(ctx: HandlerContext, event: e.EnvironmentBuildStarted) -> None:
    job = ctx.state.jobs.get(event.job)
    attempt = ctx.state.attempt(event.job, event.attempt, event.generation)
    is_described = job is not None and job.state is JobState.QUEUED and job.inspection.host == event.host
    if job is not None and (is_described or (attempt is not None and attempt.state is AttemptState.LAUNCHING)):
        job.building.setdefault(event.host, event.at_s)


def on_environment_built(ctx: HandlerContext, event: e.EnvironmentBuilt) -> None:
    if (job := ctx.state.jobs.get(event.job)) is not None:
        job.building.pop(event.host, None)
    if (attempt := ctx.state.attempt(event.job, event.attempt)) is not None:
        attempt.build_times_s[event.host] = event.seconds


def on_attempt_launched(ctx: HandlerContext, event: e.AttemptLaunched) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt, event.generation)
    if attempt is None or attempt.state is not AttemptState.LAUNCHING:
        return
    attempt.go(AttemptState.RUNNING, ctx.now_s)
    attempt.versions = dict(event.versions)
    job = ctx.state.jobs[event.job]
    job.go(JobState.RUNNING, ctx.now_s)
    job.building.clear()
    restart = job.restarting
    if restart is not None:
        restart.step = event.restored_step if event.restored_step is not None else job.checkpoint.step
        if job.spec.kind is JobKind.CHECKPOINTABLE:  # its script may never report a step
            _restart_completed(ctx, job, restart)
    if event.restored_step is not None:
        lost = f"; steps {event.restored_step + 1} to {job.progress.step} are done again" * (
            job.progress.step > event.restored_step
        )
        ctx.hold(job, f"goes on from the snapshot of step {event.restored_step} in memory{lost}")
    _schedule_checkpoint(ctx, job)
    _watch_for_stall(ctx, job, ctx.now_s)
    stopping.settle(ctx, attempt)


def goes_on(ctx: HandlerContext, job: Job, attempt: Attempt) -> None:
    """Watch an attempt again that has run for a while, under another daemon."""
    if attempt.state is AttemptState.LAUNCHING:
        attempt.go(AttemptState.RUNNING, ctx.now_s)
    if job.state is JobState.STARTING:
        job.go(JobState.RUNNING, ctx.now_s)
    _schedule_checkpoint(ctx, job)
    _watch_for_stall(ctx, job, ctx.now_s)


def _restart_completed(ctx: HandlerContext, job: Job, restart: Restart) -> None:
    """Record that a job trains again after a restart."""
    restart.go(RestartState.DONE, ctx.now_s)
    restart.downtime_s, restart.ended_s = ctx.now_s - restart.started_s, ctx.now_s
    stopped_s = sum(seconds for _, seconds, _ in restart.phases)
    started = f"{len(restart.ranks)} new ranks go on from it"
    restart.phases.append(("start", restart.downtime_s - stopped_s, started))
    if job.inspection.model:  # the time that one script takes to save says nothing about others
        migrations.learn_cost(ctx.state.restart_costs_s, job.inspection.model, restart.downtime_s)
    ctx.set_timer(TimerKind.SETTLE, job.id, ctx.now_s + SETTLE_S, f"{job.spec.name} was moved")


def _stop_at_target(ctx: HandlerContext, job: Job, attempt: Attempt) -> None:
    """Stop a job whose loss has been on target for some reports."""
    target = job.spec.target_loss
    if target is None or attempt.state is not AttemptState.RUNNING:
        return
    progress = job.progress
    progress.target_hits = progress.target_hits + 1 if progress.loss is not None and progress.loss <= target else 0
    if progress.target_hits >= TARGET_TIMES:
        stopping.stop(ctx, attempt, Outcome.TARGET_REACHED, f"its loss reached {target:g} by step {progress.step}")


def _watch_for_nan(ctx: HandlerContext, job: Job, attempt: Attempt, is_nan: bool) -> None:
    """Report, or stop, a job whose loss is not a number."""
    progress = job.progress
    if not is_nan:
        progress.nan_step = None
        return
    if progress.nan_step is not None:
        return
    progress.nan_step = progress.step
    why = f"its loss is not a number by step {progress.step}"
    if job.spec.stops_on_nan and attempt.state is AttemptState.RUNNING:
        stopping.stop(ctx, attempt, Outcome.NOT_A_NUMBER, f"{why}, and it is to stop then (on_nan)")
    else:
        ctx.hold(job, why)


def _schedule_checkpoint(ctx: HandlerContext, job: Job) -> None:
    every_s, directory = job.spec.checkpoint_every_s, job.spec.checkpoint_directory
    if every_s is not None and directory is not None:
        reason = f"{job.spec.name} is saved every {every_s:g} s"
        ctx.set_timer(TimerKind.CHECKPOINT, job.id, ctx.now_s + every_s, reason)


def checkpoint_due(ctx: HandlerContext, job: Job | None) -> None:
    """Take the periodic checkpoint, except in the middle of a migration: then the next one will do."""
    attempt = job.attempt if job is not None else None
    if job is None or attempt is None or attempt.state is not AttemptState.RUNNING:
        return
    if attempt.migration is None and job.resuming is None and job.progress.step > job.checkpoint.step:
        # Two directories take turns: while one is being written the other is whole.
        turn = 1 - int((job.checkpoint.path or "").endswith("/1"))
        path = job.spec.checkpoint_path(job.id, str(turn))
        reason = f"every {job.spec.checkpoint_every_s:g} s"
        ctx.to_ranks(d.TakeCheckpoint, attempt, attempt.hosts, reason, path=path)
    _schedule_checkpoint(ctx, job)


def on_launch_failed(ctx: HandlerContext, event: e.LaunchFailed) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt, event.generation)
    if attempt is None or attempt.state is AttemptState.STOPPING:
        return
    outcome = Outcome.LAUNCH_FAILED
    if event.is_infrastructure:
        devices = of_ranks(ctx.state.hosts, attempt)
        job = ctx.state.jobs[event.job]
        if jobs.exclude_host(ctx, job, event.host, event.why, devices):
            outcome = Outcome.REFUSED
        elif event.is_full_disk:
            outcome = Outcome.HOST_FULL
        elif not event.is_permanent or job.progress.step:  # where it trained before it may train again
            outcome = Outcome.HOST_LOST
    stopping.stop(ctx, attempt, outcome, f"{event.host} did not start it: {event.why}")


def on_rank_exited(ctx: HandlerContext, event: e.RankExited) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is None:
        return
    if attempt.generation != event.generation:
        _target_rank_exited(ctx, attempt, event)
        return
    rank = attempt.ranks.get(event.rank)
    if rank is None or rank.end is not None:
        return
    attempts.take_reports(attempt, [RankReport(rank=event.rank, end=event.end)], ctx.state.hosts)
    quarantine_devices(ctx, event.host)
    if any(r.end is not None and r.end.reason is Reason.CROWDED for r in attempt.ranks.values()):
        ctx.state.jobs[event.job].failures.needs_exclusive_memory = True
    rank_ended(ctx, attempt)


def _target_rank_exited(ctx: HandlerContext, attempt: Attempt, event: e.RankExited) -> None:
    """Record what a target rank's exit says about its device and plan; the executor reports the failed migration."""
    migration = attempt.migration
    if migration is not None and migration.generation == event.generation:
        for place in migration.places:
            if place.rank != event.rank:
                continue
            attempts.note_fault(place, event.end, ctx.state.hosts)
            if event.end.reason is Reason.PLAN:
                ctx.state.jobs[event.job].failures.reject_plan(migration.plan, str(event.end))
        quarantine_devices(ctx, event.host)


def quarantine_devices(ctx: HandlerContext, host_id: HostId) -> None:
    """Set the timers after which the host's faulty devices are offered again."""
    host = ctx.state.hosts.get(host_id)
    for device, fault in host.faults.items() if host is not None else ():
        if fault.is_left_out and not ctx.has_timer(TimerKind.FAULT, device):
            until_s = ctx.now_s + attempts.fault_s(fault.times)
            ctx.set_timer(TimerKind.FAULT, device, until_s, f"{device} is left out until then: {fault.why}")


def on_rank_orphaned(ctx: HandlerContext, event: e.RankOrphaned) -> None:
    attempt = ctx.state.attempt(event.job, event.attempt, event.generation)
    if attempt is None or attempt.state is not AttemptState.RUNNING or event.rank not in attempt.ranks:
        return
    attempt.survivors.steps[event.rank] = event.step
    if event.can_finish_step:
        attempt.survivors.can_finish_step.add(event.rank)
    attempt.survivors.out_of_memory |= event.out_of_memory
    if not ctx.has_timer(TimerKind.RECOVER, event.job):
        until_s = ctx.now_s + recovery.NOTICE_S
        ctx.set_timer(TimerKind.RECOVER, event.job, until_s, f"rank {event.rank} lost its peers")
    recover(ctx, attempt)


def rank_ended(ctx: HandlerContext, attempt: Attempt) -> None:
    """Wait for the survivors of a rank that ended, or end the attempt."""
    job = ctx.state.jobs[attempt.job]
    ends = [rank.end for rank in attempt.ranks.values() if rank.end is not None]
    if not any(recovery.may_recover(job, attempt, end) for end in ends) or job.progress.step < 1:
        stopping.settle(ctx, attempt)
        return
    if attempt.migration is not None and not attempt.migration.lost:
        stopping.abandon_migration(ctx, attempt, "a source rank died")
    if not ctx.has_timer(TimerKind.RECOVER, job.id):
        cause = next(end for end in ends if not end.is_success)
        job.reason = f"a rank died ({cause}); its peers are asked for their state"
        ctx.set_timer(TimerKind.RECOVER, job.id, ctx.now_s + recovery.NOTICE_S, job.reason)
    recover(ctx, attempt)


def survivors_timed_out(ctx: HandlerContext, attempt: Attempt) -> None:
    """Abort the collectives of silent ranks; the second time, end the attempt without their state."""
    silent = sorted(recovery.undecided(attempt, ctx.state.hosts))
    if attempt.survivors.collectives_aborted:
        reason = f"ranks died, and ranks {silent} did not report their state"
        stopping.stop(ctx, attempt, Outcome.HOST_LOST, reason)
        return
    reason = f"ranks {silent} have not noticed that peers are gone" if silent else "ranks died"
    _abort_collectives(ctx, attempt, reason)
    ctx.set_timer(TimerKind.RECOVER, attempt.job, ctx.now_s + recovery.WAIT_FOR_SURVIVORS_S, reason)


def _abort_collectives(ctx: HandlerContext, attempt: Attempt, reason: str) -> None:
    """Tell reachable ranks, once, that peers are gone."""
    attempt.survivors.collectives_aborted = True
    up = tuple(h for h in attempt.hosts if ctx.state.hosts[h].reaches(attempt.account))
    ctx.to_ranks(d.AbortCollectives, attempt, up, reason)


def survives_host_loss(ctx: HandlerContext, attempt: Attempt, host: Host) -> bool:
    """Ask the ranks on other hosts for their state after a host was lost; False: they cannot have all of it."""
    job = ctx.state.jobs[attempt.job]
    end = RankEnd(reason=Reason.LOST)
    others = [h for h in attempt.hosts if ctx.state.hosts[h].reaches(attempt.account)]
    if not others or job.progress.step < 1 or not recovery.may_recover(job, attempt, end):
        return False
    if attempt.migration is not None:
        stopping.abandon_migration(ctx, attempt, f"{host.id} is lost")
    job.reason = f"{host.id} is lost ({host.why}); ranks on {', '.join(others)} are asked for their state"
    _abort_collectives(ctx, attempt, job.reason)
    ctx.set_timer(TimerKind.RECOVER, job.id, ctx.now_s + recovery.WAIT_FOR_SURVIVORS_S, job.reason)
    recover(ctx, attempt)
    return True


def recover(ctx: HandlerContext, attempt: Attempt) -> None:
    """Migrate from the survivors once every rank is known to be dead or waiting; end the attempt where that fails."""
    job = ctx.state.jobs[attempt.job]
    survivors = attempt.survivors
    if attempt.state is not AttemptState.RUNNING or attempt.migration is not None:
        return
    if recovery.undecided(attempt, ctx.state.hosts):
        return
    lost = recovery.dead(attempt, ctx.state.hosts)
    if not (lost or survivors.out_of_memory) or attempt.retired:
        return  # tried again once the retired ranks are gone: their devices are not free before
    ctx.cancel_timer(TimerKind.RECOVER, job.id)
    if (resuming := job.resuming) is not None:  # no rank is left to report the end of this migration
        resuming.go(MigrationState.DONE, ctx.now_s)
        resuming.ended_s = ctx.now_s
    abandon_trial(ctx, job, "out of memory" if survivors.out_of_memory else "ranks died", survivors.out_of_memory)
    step = max((survivors.steps[rank] for rank in set(survivors.steps) - lost), default=0)
    view = View(ctx.state, ctx.now_s)
    if lost:
        lost = set(attempt.ranks) - (recovery.usable_survivors(attempt, step) - lost)
        answer = recovery.migrate_survivors(job, attempt, view, sorted(lost))
    else:
        answer = recovery.migrate_back(job, attempt, view)
    if isinstance(answer, Refusal):
        stopping.stop(ctx, attempt, Outcome.HOST_LOST, answer.reason)
    elif objection := migrations.objection(ctx.state, job, answer, ctx.now_s, after_loss=True):
        stopping.stop(ctx, attempt, Outcome.HOST_LOST, objection)
    else:
        lacks_memory = recovery.lacks_memory(job, attempt, answer, view.hosts)
        begin_migration(ctx, job, attempt, answer, lost, step, lacks_memory)


def on_attempt_stopped(ctx: HandlerContext, event: e.AttemptStopped) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is not None:
        key = (event.job, event.attempt, event.generation)
        host.orphans.pop(key, None)
        host.unknown_attempts.pop(key, None)
        if (former := ctx.state.past_attempt(event.job, event.attempt)) is not None:
            former.stop.unconfirmed_hosts.discard(host.id)
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is not None and attempt.generation == event.generation:
        attempts.take_reports(attempt, event.ranks, ctx.state.hosts)
        quarantine_devices(ctx, event.host)
        stopping.gone_from(ctx, attempt, event.host)
    elif attempt is not None:
        stopping.retired_gone(ctx, attempt, event.generation, event.host)
        if ctx.has_timer(TimerKind.RECOVER, event.job):
            recover(ctx, attempt)
    ctx.pass_due = True


def on_checkpoint_taken(ctx: HandlerContext, event: e.CheckpointTaken) -> None:
    job = ctx.state.jobs.get(event.job)
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is not None and attempt.state is AttemptState.STOPPING:
        attempt.stop.saved_step = event.step
    if job is not None and event.step >= job.checkpoint.step:
        job.checkpoint = Checkpoint(event.path, event.step)


def on_checkpoint_failed(ctx: HandlerContext, event: e.CheckpointFailed) -> None:
    job = ctx.state.jobs.get(event.job)
    attempt = ctx.state.attempt(event.job, event.attempt)
    if attempt is not None and attempt.state is AttemptState.STOPPING:
        attempt.stop.not_saved = event.why
    if job is not None and event.step >= job.checkpoint.step:
        job.checkpoint = replace(job.checkpoint, failure=event.why)


INPUT_WEIGHT = 0.2
"""Weight of a timed step in the mean of the time for which steps wait for input: single ones wait at an epoch's end."""


def on_attempt_progressed(ctx: HandlerContext, event: e.AttemptProgressed) -> None:
    job = ctx.state.jobs.get(event.job)
    attempt = ctx.state.attempt(event.job, event.attempt)
    if job is None or attempt is None or event.step < attempt.step:
        return  # a report that was delayed on its way
    if not attempt.step:
        ctx.cancel_timer(TimerKind.STALL, job.id)  # the start is over, which may take longer
    attempt.step = event.step
    attempt.start = attempt.start or _start_phases(job, attempt, event.start)
    restart = job.restarting
    if restart is not None and restart.step is not None and event.step > restart.step:
        _restart_completed(ctx, job, restart)
    progress = job.progress
    had_loss = progress.loss is not None or progress.nan_step is not None
    progress.step, progress.loss, progress.step_time_s = event.step, event.loss, event.step_time_s
    progress.reported_s = event.at_s
    if event.input_share is not None:
        before = progress.input_share or 0.0  # the first steps of a job say little
        progress.input_share = before + INPUT_WEIGHT * (event.input_share - before)
    _watch_for_stall(ctx, job, event.at_s)
    if progress.first_loss is None:
        progress.first_loss = event.first_loss
    job.failures.of_hosts = 0
    _stop_at_target(ctx, job, attempt)
    is_nan = event.is_nan if event.is_nan is not None else had_loss and progress.loss is None
    _watch_for_nan(ctx, job, attempt, is_nan)
    if job.trials.current is not None and job.trials.current.from_step is None:
        ctx.pass_due = True


def _start_phases(job: Job, attempt: Attempt, of_rank: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    """Phases up to the first step, in seconds: from the submit for a job's first attempt, else from its start.

    Args:
        of_rank: "began_s" of rank 0's process, by its host's clock, and its own phases; empty: not known.
    """
    if not of_rank:
        return ()
    (_, began_s), *own = of_rank
    phases = [("launch", began_s - attempt.started_s), *own]
    if attempt.number == 1:
        inspected_s = job.inspection.ended_s or job.submitted_s
        phases = [("inspect", inspected_s - job.submitted_s), ("queue", attempt.started_s - inspected_s), *phases]
    return tuple((phase, max(seconds, 0.0)) for phase, seconds in phases)


def _watch_for_stall(ctx: HandlerContext, job: Job, since_s: float) -> None:
    """Set the job's stall timer, unless it is set: one timer for all steps; the newest counts when it fires."""
    if job.spec.stall_s is not None and not ctx.has_timer(TimerKind.STALL, job.id):
        limit_s = _stalled_after_s(job, job.spec.stall_s)
        reason = f"{job.spec.name} may be without a step for {duration(limit_s)}"
        ctx.set_timer(TimerKind.STALL, job.id, since_s + limit_s, reason)


def check_stall(ctx: HandlerContext, job: Job | None) -> None:
    """Restart a job that has made no step for too long, unless something explains it."""
    attempt = job.attempt if job is not None else None
    if job is None or attempt is None or job.spec.stall_s is None:
        return
    if attempt.state is not AttemptState.RUNNING:
        return  # the launch of the next attempt sets the timer again
    changing = attempt.migration is not None or job.resuming is not None or attempt.survivors.steps
    since_s = (
        ctx.now_s
        if changing or attempts.is_away(ctx.state, attempt)
        else max(job.progress.reported_s or 0.0, attempt.started_s)
    )
    silent_s = ctx.now_s - since_s
    if silent_s >= _stalled_after_s(job, job.spec.stall_s):
        after = f"after step {attempt.step}" if attempt.step else "since it was launched"
        reason = f"no step for {duration(silent_s)} {after}; its log shows where its ranks were"
        stopping.stop(ctx, attempt, Outcome.HOST_LOST, reason)
    else:
        _watch_for_stall(ctx, job, since_s)


def _stalled_after_s(job: Job, asked_s: float) -> float:
    at_start_s = START_STALL_S if job.attempt is None or not job.attempt.step else 0.0
    return max(asked_s, STALL_STEPS * (job.progress.step_time_s or 0.0), at_start_s)
