"""Adoption of jobs that hosts run and this state does not know, or knows at an older attempt or generation.

A state that was restored from a backup is older than its hosts. Their agents keep a record of each launch, from which
such a job goes on under this daemon, at the very step that it is at.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from clusterd.core.events import TimerKind
from clusterd.core.host import Host
from clusterd.core.lifecycle import attempt_events, attempts, jobs, stopping
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.lifecycle.device_holders import free_device, give_device, stop_sharing
from clusterd.core.lifecycle.reconcile import newest_generation
from clusterd.core.state import Attempt, Job, Survivors
from clusterd.core.transitions import SeriesState
from clusterd.types import AttemptReport, AttemptState, HostId, HostState, JobId, RankEnd, Reason

_OF_JOB = (
    TimerKind.RECOVER, TimerKind.CHECKPOINT, TimerKind.TRIAL, TimerKind.STALL, TimerKind.LIMIT, TimerKind.SIGNAL,
    TimerKind.IDLE, TimerKind.SHARE, TimerKind.RETRY,
)  # fmt: skip


def adopt(
    ctx: HandlerContext, host: Host, account: str, found: Iterable[Job], reports: Iterable[AttemptReport]
) -> None:
    """Take over jobs from the records of an account's agent on `host`.

    A job that cannot be taken over yet goes on as an unknown attempt: one of its hosts is not a member, or a device of
    it on another host is held until that host has reported.
    """
    by_job: dict[JobId, list[AttemptReport]] = {}
    for report in reports:
        by_job.setdefault(report.job, []).append(report)
    for job in found:
        if job.spec.account == account and _may_adopt(ctx, host, job):
            _adopt(ctx, host, deepcopy(job), by_job)


def _may_adopt(ctx: HandlerContext, host: Host, job: Job) -> bool:
    attempt, known = job.attempt, ctx.state.jobs.get(job.id)
    if attempt is None or host.id not in attempt.all_hosts or not attempt.all_hosts <= set(ctx.state.hosts):
        return False
    if known is not None:
        is_same = known.created_s == job.created_s and not known.state.is_final
        return is_same and newest_generation(job) > newest_generation(known)
    return all(where == host.id for where in _conflicts(ctx, job, attempt).values())


def _conflicts(ctx: HandlerContext, job: Job, attempt: Attempt) -> dict[JobId, HostId]:
    """Other jobs that hold the attempt's devices by this state, with a host where they do."""
    held = {device for where in attempt.all_hosts for device in attempt.held_on(where)}
    others = [ctx.state.holders[device] for device in sorted(held) if device in ctx.state.holders]
    return {holder.job: holder.host for holder in others if holder.job != job.id and not _share(ctx, holder.job, job)}


def _share(ctx: HandlerContext, holder: JobId, job: Job) -> bool:
    """True where both jobs share their devices."""
    return min(job.spec.resources.share, ctx.state.jobs[holder].spec.resources.share) > 1


def _adopt(ctx: HandlerContext, host: Host, job: Job, by_job: dict[JobId, list[AttemptReport]]) -> None:
    attempt = job.attempt
    assert attempt is not None
    attempt.reserved_devices.clear()
    if (known := ctx.state.jobs.get(job.id)) is not None:
        _forget(ctx, known)
    for other, where in _conflicts(ctx, job, attempt).items():
        _end_former(ctx, attempts.running(ctx.state, other), ctx.state.hosts[where], by_job.get(other, ()), job)
    job.trials.current, attempt.survivors = None, Survivors()
    if job.trials.state is SeriesState.RUNNING:
        job.trials.go(SeriesState.IDLE, ctx.now_s)
    for rank in attempt.ranks.values():
        rank.end = None  # the agents report again what has ended
    ctx.state.jobs[job.id] = job
    ctx.state.active[job.id] = None
    ctx.state.index(attempt)
    for host_id in sorted(attempt.all_hosts):
        _book(ctx, attempt, ctx.state.hosts[host_id])
    if attempt.migration is not None:
        stopping.abandon_migration(ctx, attempt, "the daemon ended in the middle of it")
    jobs.set_time_limit(ctx, job, attempt)
    attempt_events.goes_on(ctx, job, attempt)
    ctx.hold(job, f"goes on under a restored daemon, from the record that {host.id} kept of its launch")


def _forget(ctx: HandlerContext, job: Job) -> None:
    """Remove the older state of a job, with all that is booked for it."""
    state = ctx.state
    if (attempt := job.attempt) is not None:
        for host_id in attempt.all_hosts & set(state.hosts):
            cores, memory_bytes = attempts.booked_on(attempt, host_id)
            state.hosts[host_id].cores_used -= cores
            state.hosts[host_id].memory_used_bytes -= memory_bytes
        for device in [device for device, holder in state.holders.items() if holder.job == job.id]:
            free_device(state, device)
        for device in [device for device, others in state.sharers.items() if job.id in others]:
            stop_sharing(state, device, job.id)
        attempt.state = AttemptState.ENDED  # of an object that leaves the state: no step of its state machine
        state.index(attempt)
    state.queue.pop(job.id, None)
    state.handovers.pop(job.id, None)
    if state.reservation is not None and state.reservation.job == job.id:
        state.reservation = None
    for kind in _OF_JOB:
        ctx.cancel_timer(kind, job.id)


def _end_former(ctx: HandlerContext, attempt: Attempt, host: Host, reports: Iterable[AttemptReport], job: Job) -> None:
    """End an attempt whose devices on a host have become another job's since the backup, so that it is over there."""
    for report in reports:
        if (report.attempt, report.generation) == (attempt.number, attempt.generation):
            attempts.take_reports(attempt, report.ranks, ctx.state.hosts)
    for rank in attempt.ranks.values():
        if rank.place.host == host.id:
            rank.end = rank.end or RankEnd(reason=Reason.LOST)
    if attempt.state is not AttemptState.STOPPING:
        stopping.stop(ctx, attempt, None, f"its devices on {host.id} are by now those of {job.spec.name} ({job.id})")
    stopping.gone_from(ctx, attempt, host.id)
    for generation in list(attempt.retired):
        stopping.retired_gone(ctx, attempt, generation, host.id)


def _book(ctx: HandlerContext, attempt: Attempt, host: Host) -> None:
    """Book what an adopted attempt holds on a host, and give the host up after a while unless it reports."""
    cores, memory_bytes = attempts.booked_on(attempt, host.id)
    host.cores_used += cores
    host.memory_used_bytes += memory_bytes
    coming = {place.device for place in attempt.migration.places} if attempt.migration is not None else set()
    for device in sorted(attempt.held_on(host.id)):
        is_new = device in coming and device not in attempt.devices
        generation = attempt.last_generation if is_new else attempt.generation
        give_device(ctx.state, attempt, device, host.id, generation)
    for key in [key for key in host.unknown_attempts if key[0] == attempt.job]:
        del host.unknown_attempts[key]
    if host.state is not HostState.UP:
        reason = f"{host.id} has ranks of this cluster"
        ctx.set_timer(TimerKind.HOST_LOST, host.id, ctx.now_s + ctx.host_lost_after_s, reason)
