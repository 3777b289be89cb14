"""Steps of a job that several handlers share: launch, end, requeue, back-off, exclusion of a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from clusterd.core import decisions as d
from clusterd.core.estimates.attained_service import executed_s, time_left_s
from clusterd.core.estimates.expected_time import run_key
from clusterd.core.events import Timer, TimerKind
from clusterd.core.lifecycle import attempts
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.performance_table import evenly
from clusterd.core.placement.place import holds
from clusterd.core.queueing import bookings
from clusterd.core.queueing.admission import hosts_without_login
from clusterd.core.state import Attempt, Job
from clusterd.core.view import CoreGrant, Start
from clusterd.job_signals import parse_limit_signal
from clusterd.plans.plan import Plan
from clusterd.types import Device, HostId, JobKind, JobState

RUN_TIMES_MAX = 16
"""Run times remembered of each name and user, newest last."""

RUN_TIME_KEYS = 2000
"""Names and users of which run times are remembered."""


def launch(ctx: HandlerContext, attempt: Attempt, reason: str) -> None:
    """Have the hosts start all ranks of an attempt."""
    ctx.decide(
        d.LaunchAttempt(
            cause=ctx.cause,
            reason=reason,
            job=attempt.job,
            attempt=attempt.number,
            generation=attempt.generation,
            plan=attempt.plan,
            ranks=tuple(rank.place for rank in attempt.ranks.values()),
            restore=ctx.state.jobs[attempt.job].checkpoint.path,
        )
    )


def start(ctx: HandlerContext, wanted: Start) -> str | None:
    """Begin an attempt of a queued job.

    Returns:
        The objection if it must not start, whichever policy proposed it: no device is ever held twice.
    """
    job = ctx.state.jobs[wanted.job]
    if (objection := attempts.objection(ctx.state, job, wanted, ctx.now_s)) is not None:
        return objection
    wanted = replace(wanted, reason=f"{wanted.reason}{release_pin(job, wanted.plan)}")
    attempt = attempts.begin(ctx.state, job, wanted, ctx.now_s)
    bookings.note_used(ctx.state, job, attempt)
    set_time_limit(ctx, job, attempt)
    launch(ctx, attempt, wanted.reason)
    return None


def set_time_limit(ctx: HandlerContext, job: Job, attempt: Attempt, *, asked_before: bool = False) -> None:
    """Set the timer that ends the attempt by the job's time limit, or with its booking.

    Args:
        asked_before: the timer of its signal was set, and one that was sent is sent again before a later end alone.
    """
    limit_s, ends_s = time_left_s(job), bookings.ends_s(ctx.state.device_claims, job)
    left_s = min(limit_s if limit_s is not None else inf, ends_s - attempt.started_s)
    was_signalled = asked_before and Timer(TimerKind.SIGNAL, job.id) not in ctx.state.timers
    ctx.cancel_timer(TimerKind.SIGNAL, job.id)
    if left_s == inf:
        ctx.cancel_timer(TimerKind.LIMIT, job.id)
        return
    reason = f"{job.spec.name} may run for {left_s:.0f} s"
    ctx.set_timer(TimerKind.LIMIT, job.id, max(attempt.started_s + left_s, ctx.now_s), reason)
    if job.spec.limit_signal:
        at_s = attempt.started_s + left_s - parse_limit_signal(job.spec.limit_signal).before_s
        if at_s > ctx.now_s or not was_signalled:
            reason = f"{job.spec.name} is to be signalled before its time limit"
            ctx.set_timer(TimerKind.SIGNAL, job.id, max(at_s, ctx.now_s), reason)


def release_pin(job: Job, plan: Plan | None) -> str:
    """Unpin an elastic job that runs under another plan from now on.

    Returns:
        The sentence to add to the reason; empty where the pin stands or there was none.
    """
    if job.pinned is None or plan is None or evenly(job.pinned) == evenly(plan):
        return ""
    pinned, job.pinned = job.pinned, None
    return f"; it is no longer pinned to {pinned}"


def grant_cores(ctx: HandlerContext, grant: CoreGrant) -> None:
    """Book another number of CPU cores for a running attempt and send it to its ranks."""
    attempt = attempts.running(ctx.state, grant.job)
    for host, count in grant.cores.items():
        ctx.state.hosts[host].cores_used += count - attempt.booked.cores.get(host, 0)
    attempt.booked, attempt.announced_cores = replace(attempt.booked, cores=dict(grant.cores)), grant.each
    ctx.to_ranks(d.UseCores, attempt, attempt.hosts, grant.reason, each=grant.each)


def grace_s(ctx: HandlerContext, attempt: Attempt) -> float:
    """Seconds that the attempt's ranks get between SIGTERM and SIGKILL."""
    return 0.0 if attempt.stop.skip_grace else ctx.state.jobs[attempt.job].spec.grace_s


def end(ctx: HandlerContext, job: Job, state: JobState, reason: str, exit_code: int | None) -> None:
    """Bring a job to a final state."""
    job.go(state, ctx.now_s)
    job.reason, job.exit_code, job.ended_s = reason, exit_code, ctx.now_s
    job.building.clear()
    ctx.state.queue.pop(job.id, None)
    ctx.state.active.pop(job.id, None)
    if ctx.state.reservation is not None and ctx.state.reservation.job == job.id:
        ctx.state.reservation = None
    ctx.state.handovers.pop(job.id, None)
    if state is JobState.FINISHED:
        _record_run_time(ctx, job)
    ctx.cancel_timer(TimerKind.RETRY, job.id)
    ctx.cancel_timer(TimerKind.STALL, job.id)
    ctx.decide(d.EndJob(cause=ctx.cause, reason=reason, job=job.id, state=state.value, exit_code=exit_code))
    ctx.pass_due = True


def _record_run_time(ctx: HandlerContext, job: Job) -> None:
    """Record how long a finished job ran, for the forecast of its like."""
    run_times, ran_s = ctx.state.run_times, executed_s(job, ctx.now_s)
    for key in (run_key(job), job.spec.user):
        run_times[key] = [*run_times.pop(key, ()), ran_s][-RUN_TIMES_MAX:]  # the key moves to the end
    while len(run_times) > RUN_TIME_KEYS:
        del run_times[next(iter(run_times))]


def requeue_after_loss(ctx: HandlerContext, job: Job, why: str, *, is_full_disk: bool) -> None:
    """Back off after a fault that was not the job's; fail the job after too many without a step between them.

    A full disk is no reason to fail: it would take the whole queue of a night with it.
    """
    if is_full_disk:
        job.reason = why
        back_off(ctx, job, attempts.RETRY_DELAY_MOST_S)
        return
    last = job.attempts[-1] if job.attempts else None
    if last is not None and job.spec.kind is not JobKind.ELASTIC and attempts.made_progress(last, ctx.now_s):
        job.failures.of_hosts = 0
    job.failures.of_hosts += 1
    if job.failures.of_hosts > attempts.CONSECUTIVE_LOSSES_MAX:
        reason = f"lost {job.failures.of_hosts} times in a row without a step: {why}"
        end(ctx, job, JobState.FAILED, reason, exit_code=1)
        return
    job.reason = why
    back_off(ctx, job, attempts.retry_delay_s(job.failures.of_hosts))


def back_off(ctx: HandlerContext, job: Job, delay_s: float) -> None:
    """Keep a requeued job from starting for a while."""
    if delay_s:
        job.not_before_s = ctx.now_s + delay_s
        reason = f"{job.spec.name} is tried again after {delay_s:.0f} s"
        ctx.set_timer(TimerKind.RETRY, job.id, job.not_before_s, reason)


def exclude_host(ctx: HandlerContext, job: Job, host: HostId, why: str, devices: Sequence[Device] = ()) -> bool:
    """Keep a job off a host that failed to start it.

    Args:
        devices: that the job was to have.
    Returns:
        True if other hosts can hold it. Otherwise no host is excluded: the fault may be the job's.
    """
    job.failures.excluded_hosts[host] = why.removeprefix(f"{host}: ")
    kinds = {d.kind for d in devices}
    left = [h for h in ctx.state.hosts.values() if h.unusable is None and job.admits(h)]
    counts = [sum(not kinds or d.kind in kinds for d in h.devices) for h in left]
    enough = holds(job, counts) if job.spec.kind is JobKind.COMMAND else sum(counts) >= len(devices)
    if not left or not enough:
        job.failures.excluded_hosts = hosts_without_login(ctx.state, job.spec.account)
        return False
    return True
