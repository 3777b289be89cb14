"""End of attempts and of migrations that fail before their switch.

An attempt is stopped on all its hosts first; a host's devices are free once it reports that nothing is left there; then
the outcome decides what becomes of the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from clusterd.core import decisions as d
from clusterd.core.estimates.can_migrate import SETTLE_AFTER_FAILURE_S
from clusterd.core.events import TimerKind
from clusterd.core.ledger import of_ranks
from clusterd.core.lifecycle import attempts, jobs, migrations, trials
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.state import Attempt, Job, Outcome, Restart, Retired
from clusterd.core.transitions import MigrationState, RestartState, SeriesState
from clusterd.core.view import Start
from clusterd.plans.model_shape import ModelShape
from clusterd.types import AttemptState, HostId, JobKind, JobState

STATE_GRACE_S = 60.0
"""Least time, beside steps and copies, for ranks to leave their state in host memory before they are killed."""

STATE_GRACE_STEPS = 4
"""Steps that may end before every rank has received the request."""

STATE_BYTES_PER_S = 1e9
"""Rate of leaving the whole state in host memory, allocation of that memory included."""

SAVE_BYTES_PER_S = 1e8
"""Rate of writing the whole state to a shared file system before a job ends."""

RESULT_GRACE_S = 600.0
"""Least time for ranks to write the result of the job."""


def settle(ctx: HandlerContext, attempt: Attempt) -> None:
    """Stop the attempt once a rank failed or all ranks exited: stragglers go before devices are free."""
    if attempt.state is AttemptState.STOPPING:
        return
    ends = {r: rank.end for r, rank in attempt.ranks.items() if rank.end is not None}
    failed = [f"rank {r} on {attempt.ranks[r].place.host}: {end}" for r, end in ends.items() if not end.is_success]
    if failed:
        stop(ctx, attempt, None, failed[0])
    elif len(ends) == len(attempt.ranks):
        stop(ctx, attempt, None, "all ranks finished")


def stop(ctx: HandlerContext, attempt: Attempt, outcome: Outcome | None, why: str) -> None:
    """Stop the attempt on all its hosts, and whatever migration or trial it is in.

    Args:
        outcome: None: the exit reports of the ranks decide.
    """
    job = ctx.state.jobs[attempt.job]
    if attempt.migration is not None:
        abandon_migration(ctx, attempt, why)
    if (resuming := job.resuming) is not None:
        resuming.go(MigrationState.INTERRUPTED, ctx.now_s)
    trials.release_devices(ctx.state, attempt)
    job.trials.current = None
    if job.trials.state is SeriesState.RUNNING:
        job.trials.go(SeriesState.IDLE, ctx.now_s)
    attempt.stop.outcome, attempt.stop.why = outcome, why
    attempt.stop.keep = leaves_state(ctx, attempt)
    attempt.stop.save = _save_directory(job, attempt)
    attempt.stop.pending = set(attempt.hosts)
    attempt.go(AttemptState.STOPPING, ctx.now_s)
    job.go(JobState.STOPPING, ctx.now_s)
    job.building.clear()
    job.reason = why
    ctx.cancel_timer(TimerKind.LIMIT, job.id)
    ctx.cancel_timer(TimerKind.SIGNAL, job.id)
    ctx.cancel_timer(TimerKind.IDLE, job.id)
    ctx.cancel_timer(TimerKind.SHARE, job.id)
    attempt.idle_since_s, attempt.over_share = None, ""
    ctx.cancel_timer(TimerKind.RECOVER, job.id)
    ask_to_stop(ctx, attempt, attempt.hosts)
    for host_id in attempt.hosts:
        if ctx.state.hosts[host_id].has_lost(attempt.account):  # while ranks elsewhere were asked for their state
            gone_from(ctx, attempt, host_id)


def ask_to_stop(ctx: HandlerContext, attempt: Attempt, hosts: Iterable[HostId]) -> None:
    """Have hosts stop the ranks of a stopping attempt, once these have left what their job goes on from.

    Also a host that is back, and may have missed it.
    """
    job, stop = ctx.state.jobs[attempt.job], attempt.stop
    keep, save = (stop.keep, stop.save) if not stop.skip_grace else (False, None)
    done = stop.outcome is Outcome.TARGET_REACHED and job.spec.kind is not JobKind.COMMAND
    grace_s = jobs.grace_s(ctx, attempt)
    if keep or done:
        grace_s = max(grace_s, _state_grace_s(job, STATE_BYTES_PER_S) if keep else RESULT_GRACE_S)
    if save is not None:
        # Without a shared directory it is written on each host first, and again on the one that keeps it.
        writes = 2 if not save and len(attempt.hosts) > 1 else 1
        grace_s = max(grace_s, _state_grace_s(job, SAVE_BYTES_PER_S / writes))
    for host_id in hosts:
        key = (attempt.job, attempt.number, attempt.generation)
        ctx.stop_ranks(host_id, key, grace_s, stop.why, keep, done, save)


def skip_grace(ctx: HandlerContext, attempt: Attempt, why: str) -> None:
    """Kill what is being stopped, and what will be, without a grace period."""
    if attempt.stop.skip_grace:
        return
    attempt.stop.skip_grace = True
    for host_id in sorted(attempt.stop.pending):
        ctx.stop_ranks(host_id, (attempt.job, attempt.number, attempt.generation), 0.0, why)
    for generation, retired in attempt.retired.items():
        for host_id in sorted(retired.pending):
            ctx.stop_ranks(host_id, (attempt.job, attempt.number, generation), 0.0, why)


def leaves_state(ctx: HandlerContext, attempt: Attempt) -> bool:
    """True where stopped ranks can leave their state in host memory: the job goes on later, and all of them train."""
    return attempt.stop.outcome is Outcome.PREEMPTED and _has_state(ctx.state.jobs[attempt.job], attempt)


def _has_state(job: Job, attempt: Attempt) -> bool:
    """True for an elastic job while all of its ranks train."""
    trains = attempt.state is AttemptState.RUNNING and not attempt.survivors.steps
    return job.spec.kind is JobKind.ELASTIC and trains


ENDS_EARLY = (Outcome.CANCELLED, Outcome.TIME_LIMIT)
"""Ends of a job before its last step, at which it saves, so that another job can go on from there."""


def _save_directory(job: Job, attempt: Attempt) -> str | None:
    """Directory of the checkpoint that a job writes before it ends early; None: it writes none. See `StopAttempt`.

    So does one that is paused, in which nothing could write it later.
    """
    stop = attempt.stop
    # Also before the first step of an attempt that goes on from a copy in memory, which is gone with the job.
    has_begun = job.progress.step > job.spec.restore_step
    is_asked_for = stop.outcome in ENDS_EARLY or (stop.outcome is Outcome.PREEMPTED and job.held_by is not None)
    if not is_asked_for or stop.skip_grace or not has_begun or not _has_state(job, attempt):
        return None
    return job.spec.checkpoint_path(job.id, "stopped") if job.spec.checkpoint_directory is not None else ""


def _described_end(job: Job, attempt: Attempt) -> str:
    """Reason of an early end or a pause, with the step that was saved, or why none was."""
    stop = attempt.stop
    if stop.saved_step is not None:
        return f"{stop.why}: saved step {stop.saved_step:,}"
    if stop.save is None or stop.skip_grace:
        return f"{stop.why}{what_is_saved(job)}"
    cause = attempts.root_cause(attempt)
    failure = stop.not_saved or (str(cause[1]) if cause is not None else "")
    return f"{stop.why}{what_is_saved(job, f', {failure}' if failure else ' in time')}"


def what_is_saved(job: Job, why_not: str = "") -> str:
    """Words on what is left of the steps of an elastic job that ends; empty: it has made none.

    The state of one that waits, or starts, is in host memory alone, and ends with it.
    """
    if job.spec.kind is not JobKind.ELASTIC or job.progress.step <= job.spec.restore_step:
        return ""
    if job.checkpoint.step >= job.progress.step:
        return f": saved step {job.checkpoint.step:,}"
    newest = f"; the newest checkpoint is of step {job.checkpoint.step:,}" if job.checkpoint.path is not None else ""
    return f": not saved{why_not}{newest}"


def gone_from(ctx: HandlerContext, attempt: Attempt, host_id: HostId) -> None:
    """Free what a stopping attempt held on a host that reported it gone, or that is lost."""
    if attempt.state is not AttemptState.STOPPING or host_id not in attempt.stop.pending:
        return
    attempt.stop.pending.discard(host_id)
    if ctx.state.hosts[host_id].has_lost(attempt.account):
        attempt.stop.unconfirmed_hosts.add(host_id)
    attempts.release(ctx.state, attempt, host_id)
    if not attempt.stop.pending and not attempt.retired:
        _conclude(ctx, attempt)


def retired_gone(ctx: HandlerContext, attempt: Attempt, generation: int, host_id: HostId) -> None:
    """Free what retired ranks held on a host that reported them gone, or that is lost."""
    gone = migrations.gone(ctx.state, attempt, generation, host_id)
    if gone and attempt.state is AttemptState.STOPPING and not attempt.stop.pending and not attempt.retired:
        _conclude(ctx, attempt)


def retire(
    ctx: HandlerContext, attempt: Attempt, generation: int, retired: Retired, grace_s: float, reason: str
) -> None:
    """Stop the ranks of a former generation; lost hosts are not waited for."""
    for host_id in sorted(retired.pending):
        ctx.stop_ranks(host_id, (attempt.job, attempt.number, generation), grace_s, reason)
        if ctx.state.hosts[host_id].has_lost(attempt.account):
            retired_gone(ctx, attempt, generation, host_id)


def _conclude(ctx: HandlerContext, attempt: Attempt) -> None:
    """End an attempt of which nothing is left, and end or requeue its job."""
    trials.release_devices(ctx.state, attempt)
    attempt.go(AttemptState.ENDED, ctx.now_s)
    ctx.state.index(attempt)
    attempt.ended_s = ctx.now_s
    job = ctx.state.jobs[attempt.job]
    devices = of_ranks(ctx.state.hosts, attempt)
    faulty = attempts.faulty_environment(attempt)
    if faulty is not None and jobs.exclude_host(ctx, job, *faulty, devices):
        attempt.stop.outcome, attempt.stop.why = Outcome.REFUSED, f"{faulty[0]} cannot run it: {faulty[1]}"
    if attempt.stop.outcome in ENDS_EARLY or attempt.stop.save is not None:
        attempt.stop.why = _described_end(job, attempt)
    verdict = attempts.judge(job, attempt, devices[0].kind if devices else "cuda")
    if verdict.state is not JobState.QUEUED:
        jobs.end(ctx, job, verdict.state, verdict.reason, verdict.exit_code)
        return
    ctx.state.active.pop(job.id, None)
    ctx.state.queue[job.id] = None
    job.go(JobState.QUEUED, ctx.now_s)
    job.queued_s = ctx.now_s
    if attempt.stop.outcome in (Outcome.PREEMPTED, Outcome.REFUSED):
        job.reason = verdict.reason
    elif verdict.is_infrastructure:
        full = attempt.stop.outcome is Outcome.HOST_FULL
        jobs.requeue_after_loss(ctx, job, verdict.reason, is_full_disk=full)
    elif verdict.memory_cap_bytes is not None:
        job.failures.cap_memory(verdict.memory_cap_bytes)
        job.reason = verdict.reason
    elif verdict.rejected is not None:
        job.failures.reject_plan(*verdict.rejected)
        job.reason = verdict.reason
    else:
        job.failures.of_job += 1
        job.reason = verdict.reason
        jobs.back_off(ctx, job, attempts.retry_delay_s(job.failures.of_job))
    if job.state is JobState.QUEUED:
        again = "starts again at once" if attempt.pending_restart is not None else f"queued again{_resume_point(job)}"
        reason = f"{verdict.reason}; {again}"
        ctx.decide(d.RequeueJob(cause=ctx.cause, reason=reason, job=job.id, attempt=attempt.number))
        if attempt.pending_restart is not None:
            restart, attempt.pending_restart = attempt.pending_restart, None
            _restart(ctx, job, restart)
    ctx.pass_due = True


def _restart(ctx: HandlerContext, job: Job, restart: Restart) -> None:
    """Start the job again under the plan that it was stopped for, before anybody else gets its devices."""
    saved = "it has saved" if job.spec.kind is JobKind.CHECKPOINTABLE else "its state waits in host memory"
    restart.phases.append(("stop", ctx.now_s - restart.started_s, saved))
    job.restarts.append(restart)
    start = Start(job.id, restart.plan, restart.places, restart.booked, restart.reason)
    if (objection := jobs.start(ctx, start)) is None:
        restart.go(RestartState.STARTING, ctx.now_s)
        return
    restart.go(RestartState.FAILED, ctx.now_s)
    restart.failure, restart.ended_s = objection, ctx.now_s
    ctx.hold(job, f"cannot go on under {restart.plan}: {objection}")


def abandon_migration(ctx: HandlerContext, attempt: Attempt, why: str) -> None:
    """Undo a migration before its switch: the source ranks go on, the target ranks are stopped."""
    job = ctx.state.jobs[attempt.job]
    assert attempt.migration is not None
    generation, old_pin = attempt.migration.generation, attempt.migration.old_pin
    retired = migrations.fail(ctx.state, job, attempt, why, ctx.now_s)
    until_s = ctx.now_s + job.back_off_s(SETTLE_AFTER_FAILURE_S)
    ctx.set_timer(TimerKind.SETTLE, job.id, until_s, f"a migration of {job.spec.name} failed")
    pinned = job.pinned  # None: it was unpinned meanwhile
    job.pinned = old_pin if pinned is not None else None
    unpinned = f"; it is no longer pinned to {pinned}" if job.pinned is None and pinned is not None else ""
    reason = f"the migration to {job.migrations[-1].plan} failed ({why}); {attempt.plan} goes on{unpinned}"
    job.reason = reason
    abort_migration(ctx, attempt, generation, attempt.hosts, reason)
    retire(ctx, attempt, generation, retired, 0.0, reason)


def abort_migration(
    ctx: HandlerContext, attempt: Attempt, new_generation: int, hosts: tuple[HostId, ...], reason: str
) -> None:
    """Let source ranks that wait for a switch train on."""
    ctx.to_ranks(d.AbortMigration, attempt, hosts, reason, new_generation=new_generation)


def _resume_point(job: Job) -> str:
    """Message from which state a requeued job goes on: a job never starts over in silence."""
    if job.spec.kind is JobKind.CHECKPOINTABLE:
        return ", to go on from what it saved"
    if not job.progress.step:
        return ""
    saved = job.checkpoint
    if saved.path is not None:
        return f", to go on from a newer snapshot in memory, or from step {saved.step} ({saved.path})"
    return ", to go on from a snapshot in memory if one is left: there is no checkpoint on disk"


def _state_grace_s(job: Job, bytes_per_s: float) -> float:
    """Seconds that ranks get to finish their step and write the state at this rate."""
    state_bytes = ModelShape.from_dict(job.inspection.shape).state_bytes if job.inspection.shape is not None else 0
    return STATE_GRACE_S + STATE_GRACE_STEPS * (job.progress.step_time_s or 0.0) + state_bytes / bytes_per_s
