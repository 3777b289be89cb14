"""Handlers of host events, of the daemon's start, and of timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import TimerKind
from clusterd.core.host import NO_REASON, Host
from clusterd.core.lifecycle import (
    attempt_events,
    attempts,
    device_claims,
    device_shares,
    idleness,
    jobs,
    stopping,
    trial_events,
)
from clusterd.core.lifecycle.accounts import account_lost, apply_report, lose_attempt, watch_account
from clusterd.core.lifecycle.adoption import adopt
from clusterd.core.lifecycle.context import HandlerContext
from clusterd.core.queueing import bookings
from clusterd.core.state import InspectionState, Job, Outcome, State
from clusterd.job_signals import parse_limit_signal
from clusterd.types import AttemptState, DeviceId, HostId, HostState, JobId
from clusterd.units import duration

RECOVERY_S = 20.0
"""After the daemon's start nothing is placed until each host in use has reported, or for this long."""


def _take_settings(ctx: HandlerContext, event: e.DaemonStarted | e.SettingsReloaded) -> None:
    state = ctx.state
    state.tenants, state.device_limits, state.half_life_s = event.tenants, event.device_limits, event.half_life_s
    state.budgets, state.device_weights = event.budgets, event.device_weights


def on_settings_reloaded(ctx: HandlerContext, event: e.SettingsReloaded) -> None:
    _take_settings(ctx, event)
    ctx.pass_due = True


def on_daemon_started(ctx: HandlerContext, event: e.DaemonStarted) -> None:
    ctx.state.epoch = event.epoch
    _take_settings(ctx, event)
    for host in ctx.state.hosts.values():
        if host.state is not HostState.LOST:
            host.go(HostState.CONNECTING, event.at_s, "the daemon has just started")
        host.orphans.clear()
        host.unknown_attempts.clear()
        host.logins = dict.fromkeys(host.logins, "the daemon has just started")
        _admit_host_again(ctx.state, host.id)
    for claim in [claim for claim in ctx.state.device_claims.values() if claim.unused]:
        # Nobody could submit a job meanwhile: the time to use its devices begins again.
        ctx.state.device_claims[claim.id] = replace(claim, unused=dict.fromkeys(claim.unused))
    for job_id in ctx.state.queue:
        job = ctx.state.jobs[job_id]
        if job.inspection.state is InspectionState.ASKED:  # the answer would go to the previous daemon
            job.inspection.state, job.inspection.host = InspectionState.NEEDED, None
    for job_id in ctx.state.active:  # the previous daemon led these migrations; the source ranks go on
        attempt = attempts.running(ctx.state, job_id)
        if attempt.migration is not None:
            stopping.abandon_migration(ctx, attempt, "the daemon ended in the middle of it")
        attempt.idle_since_s, attempt.over_share = None, ""  # nobody looked at its devices meanwhile
        ctx.cancel_timer(TimerKind.IDLE, job_id)
        ctx.cancel_timer(TimerKind.SHARE, job_id)
    busy = {host for job in ctx.state.active for host in attempts.running(ctx.state, job).all_hosts}
    for host_id in sorted(busy - set(ctx.state.hosts)):
        _restore_host(ctx, host_id)
    ctx.state.recovering = {h for h in busy if ctx.state.hosts[h].state is HostState.CONNECTING}
    if ctx.state.recovering:
        ctx.set_timer(TimerKind.RECOVERY, "", event.at_s + RECOVERY_S, "hosts in use report first")
    for host_id in sorted(ctx.state.recovering):
        until_s = event.at_s + ctx.host_lost_after_s
        ctx.set_timer(TimerKind.HOST_LOST, host_id, until_s, f"{host_id} has ranks of this cluster")
        for account in sorted({ctx.state.jobs[a.job].spec.account for a in ctx.state.attempts_on(host_id)} - {""}):
            watch_account(ctx, host_id, account, event.at_s)
    ctx.pass_due = True


def on_timer_fired(ctx: HandlerContext, event: e.TimerFired) -> None:
    if ctx.state.timers.get(event.timer, event.at_s) > event.at_s:
        return  # it was due by a clock that has been set since
    ctx.state.timers.pop(event.timer, None)
    if (action := _TIMERS.get(event.timer.kind)) is not None:
        action(ctx, event.timer.about)
    ctx.pass_due = True


def _fault_over(ctx: HandlerContext, device: str) -> None:
    for host in ctx.state.hosts.values():
        if (fault := host.faults.get(DeviceId(device))) is not None:
            fault.is_left_out = False


def _recovery_due(ctx: HandlerContext, job_id: str) -> None:
    job = ctx.state.jobs.get(JobId(job_id))
    if job is not None and job.attempt is not None and job.attempt.state is AttemptState.RUNNING:
        attempt_events.survivors_timed_out(ctx, job.attempt)


def _time_limit_reached(ctx: HandlerContext, job_id: str) -> None:
    job = ctx.state.jobs.get(JobId(job_id))
    if job is None or job.attempt is None or job.attempt.state is AttemptState.STOPPING:
        return
    if bookings.ends_s(ctx.state.device_claims, job) <= ctx.now_s:
        device_claims.update_claims(ctx)  # which ends its booking, and the job with it
        return
    limit_s = job.spec.time_limit_s
    limit = f" of {duration(limit_s)}" if limit_s is not None else ""
    stopping.stop(ctx, job.attempt, Outcome.TIME_LIMIT, f"its time limit{limit} is over")


def _signal_due(ctx: HandlerContext, job_id: str) -> None:
    job = ctx.state.jobs.get(JobId(job_id))
    if job is None or job.attempt is None or job.attempt.state is not AttemptState.RUNNING or not job.spec.limit_signal:
        return
    asked = parse_limit_signal(job.spec.limit_signal)
    reason = f"{job.spec.name} reaches its time limit in {duration(asked.before_s)}"
    signal = {"number": asked.number, "first_only": asked.first_only}
    ctx.to_ranks(d.SignalRanks, job.attempt, job.attempt.hosts, reason, **signal)


def _pass_due(ctx: HandlerContext, _: str) -> None:
    ctx.state.passed_s = None


_TIMERS: dict[TimerKind, Callable[[HandlerContext, str], None]] = {
    TimerKind.PASS: _pass_due,
    TimerKind.RECOVERY: lambda ctx, _: ctx.state.recovering.clear(),
    TimerKind.HOST_LOST: lambda ctx, host: _declare_lost(ctx, HostId(host)),
    TimerKind.CLAIM: lambda ctx, _: device_claims.update_claims(ctx),
    TimerKind.ACCOUNT_LOST: account_lost,
    TimerKind.FAULT: _fault_over,
    TimerKind.RECOVER: _recovery_due,
    TimerKind.CHECKPOINT: lambda ctx, job: attempt_events.checkpoint_due(ctx, ctx.state.jobs.get(JobId(job))),
    TimerKind.TRIAL: lambda ctx, job: trial_events.trial_timed_out(ctx, JobId(job)),
    TimerKind.STALL: lambda ctx, job: attempt_events.check_stall(ctx, ctx.state.jobs.get(JobId(job))),
    TimerKind.LIMIT: _time_limit_reached,
    TimerKind.SIGNAL: _signal_due,
    TimerKind.SHARE: lambda ctx, job: device_shares.end_over_share(ctx, ctx.state.jobs.get(JobId(job))),
    TimerKind.IDLE: lambda ctx, job: idleness.reclaim(ctx, ctx.state.jobs.get(JobId(job))),
}
"""Action of each timer; the others only cause a pass."""


def on_clock_set(ctx: HandlerContext, event: e.ClockSet) -> None:
    """Shift every point in time that will be compared with now; times of what is over stay as they were shown."""
    state, by_s = ctx.state, event.by_s
    state.timers = {timer: at_s + by_s for timer, at_s in state.timers.items()}
    state.passed_s = _shifted(state.passed_s, by_s)
    if (promise := state.reservation) is not None:
        latest_s = _shifted(promise.latest_s, by_s)
        state.reservation = replace(promise, at_s=promise.at_s + by_s, latest_s=latest_s)
    state.handovers = {job: replace(h, since_s=h.since_s + by_s) for job, h in state.handovers.items()}
    for used in (each for users in state.used.values() for each in users.values()):
        used.at_s += by_s
    for host in state.hosts.values():
        host.since_s += by_s
    for job in state.jobs.values():
        if not job.state.is_final:
            _shift_job(job, by_s)
    for claim in [claim for claim in state.device_claims.values() if claim.unused]:
        unused = {device: _shifted(since_s, by_s) for device, since_s in claim.unused.items()}
        state.device_claims[claim.id] = replace(claim, unused=unused)
    if state.device_claims:
        device_claims.update_claims(ctx)
    for job in [state.jobs[job] for job in state.active]:
        if job.spec.booking and job.attempt is not None and job.attempt.state is not AttemptState.STOPPING:
            jobs.set_time_limit(ctx, job, job.attempt, asked_before=True)  # bookings are by the wall clock, too


def _shift_job(job: Job, by_s: float) -> None:
    job.submitted_s += by_s
    job.queued_s += by_s
    job.not_before_s += by_s
    job.started_s = _shifted(job.started_s, by_s)
    job.progress.reported_s = _shifted(job.progress.reported_s, by_s)
    job.inspection.ended_s = _shifted(job.inspection.ended_s, by_s)
    for attempt in job.attempts:
        attempt.started_s += by_s
        attempt.ended_s = _shifted(attempt.ended_s, by_s)
        attempt.idle_since_s = _shifted(attempt.idle_since_s, by_s)
        if attempt.migration is not None:
            attempt.migration.started_s += by_s
    if job.attempt is not None and job.attempt.pending_restart is not None:
        job.attempt.pending_restart.started_s += by_s
    for change in job.plan_changes:
        change.started_s += by_s
        change.ended_s = _shifted(change.ended_s, by_s)


def _shifted(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


def on_host_added(ctx: HandlerContext, event: e.HostAdded) -> None:
    if event.host not in ctx.state.hosts:  # of two concurrent requests the first one's host may have jobs by now
        ctx.state.hosts[event.host] = Host(event.host, since_s=event.at_s, why="not connected yet")
        if ctx.state.device_claims:
            device_claims.update_claims(ctx)
        _admit_host_again(ctx.state, event.host)


def on_host_removed(ctx: HandlerContext, event: e.HostRemoved) -> None:
    if any(ctx.state.attempts_on(event.host)):
        return  # it got a job since the request was checked: it stays, and the API reports that
    ctx.state.hosts.pop(event.host, None)
    ctx.state.recovering.discard(event.host)
    reassign_descriptions(ctx.state, event.host)
    _admit_host_again(ctx.state, event.host)
    ctx.pass_due = True


def _restore_host(ctx: HandlerContext, host_id: HostId) -> None:
    """Bring back a host that was removed while ranks ran there, until they are over."""
    host = Host(host_id, since_s=ctx.now_s, why="it was removed while ranks ran there")
    for attempt in ctx.state.attempts_on(host_id):
        cores, memory_bytes = attempts.booked_on(attempt, host_id)
        host.cores_used += cores
        host.memory_used_bytes += memory_bytes
    ctx.state.hosts[host_id] = host


def on_host_drained(ctx: HandlerContext, event: e.HostDrained) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    host.drained = ": ".join(filter(None, (event.by and f"by {event.by}", event.why))) or NO_REASON
    host.jobs_stay = event.jobs_stay
    ctx.pass_due = True


def on_host_undrained(ctx: HandlerContext, event: e.HostUndrained) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    was_drained, host.drained = host.drained is not None, None
    _clear_faults(ctx, host)
    for key in sorted(host.unknown_attempts):
        ctx.stop_ranks(host.id, key, 5.0, f"{event.by or 'an operator'} wants {host.id} clean")
    host.orphans, host.unknown_attempts = host.orphans | host.unknown_attempts, {}
    for attempt in ctx.state.attempts_on(event.host):
        if was_drained and attempt.state is AttemptState.RUNNING:
            ctx.hold(ctx.state.jobs[attempt.job], attempt.reason or f"{event.host} is in use again")
    _admit_host_again(ctx.state, event.host)
    ctx.pass_due = True


def on_host_connected(ctx: HandlerContext, event: e.HostConnected) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    host.go(HostState.UP, event.at_s)
    if host.facts is not None and host.facts.boot_id != event.facts.boot_id:
        _clear_faults(ctx, host)
        host.cleared_faults.clear()  # what the driver reports now came after the reboot
        host.withheld.clear()
    host.facts, host.agent, host.agent_home = event.facts, event.agent, event.agent_home
    ctx.state.recovering.discard(host.id)
    ctx.cancel_timer(TimerKind.HOST_LOST, host.id)
    _admit_host_again(ctx.state, host.id)
    adopt(ctx, host, "", event.adopted, event.attempts)
    apply_report(ctx, host, "", event.attempts)
    ctx.pass_due = True


def _clear_faults(ctx: HandlerContext, host: Host) -> None:
    """Offer all devices of a host again: it was rebooted, or an operator has looked after it."""
    for device in host.faults:
        ctx.cancel_timer(TimerKind.FAULT, device)
    host.clear_faults()


def _admit_host_again(state: State, host: HostId) -> None:
    """Let jobs that failed to start on a host try it again: something changed there, or it was removed."""
    for job in map(state.jobs.__getitem__, (*state.queue, *state.active)):
        job.failures.excluded_hosts.pop(host, None)
        if host in state.hosts and (why := state.hosts[host].without_login(job.spec.account)):
            job.failures.excluded_hosts[host] = why


def on_host_disconnected(ctx: HandlerContext, event: e.HostDisconnected) -> None:
    host = ctx.state.hosts.get(event.host)
    if host is None:
        return
    if host.state is not HostState.UP:
        host.why = event.why
        return
    host.go(HostState.UNREACHABLE, event.at_s, event.why)
    reassign_descriptions(ctx.state, host.id)
    if any(ctx.state.attempts_on(host.id)):
        until_s = event.at_s + ctx.host_lost_after_s
        ctx.set_timer(TimerKind.HOST_LOST, host.id, until_s, f"{host.id} is unreachable: {event.why}")
    for attempt in list(ctx.state.attempts_on(host.id)):
        if attempt.survivors.steps:
            attempt_events.recover(ctx, attempt)
    ctx.pass_due = True


def reassign_descriptions(state: State, host: HostId) -> None:
    """Have models that the host was to inspect inspected elsewhere."""
    for job_id in state.queue:
        job = state.jobs[job_id]
        if job.inspection.host == host and job.inspection.state is InspectionState.ASKED:
            job.inspection.state, job.inspection.host = InspectionState.NEEDED, None
            job.building.pop(host, None)


def on_host_changed(ctx: HandlerContext, event: e.HostChanged) -> None:
    if event.host in ctx.state.hosts:
        ctx.state.hosts[event.host].facts = event.facts
        ctx.pass_due = True


def _declare_lost(ctx: HandlerContext, host_id: HostId) -> None:
    """Give up a host that has been unreachable for too long, and every rank on it."""
    host = ctx.state.hosts.get(host_id)
    if host is None or host.state is HostState.UP:
        return
    host.go(HostState.LOST, ctx.now_s, host.why)
    ctx.state.recovering.discard(host_id)
    for attempt in list(ctx.state.attempts_on(host_id)):
        if attempt.account:  # when the host is back, only the account's own agent can say that its ranks are gone
            host.withheld.update(dict.fromkeys(attempt.held_on(host_id), attempt.account))
        lose_attempt(ctx, attempt, host, f"{host_id} is lost: {host.why}")
