"""Suspension: a running job's offer of size zero, and the handover of its devices to another job.

A suspended job saves its state, stops, and waits until the job that gets its devices has started; then it is queued
like any other. Suspension and handover are one transaction in the state.
"""

from __future__ import annotations

from math import inf

from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.rights import may_preempt
from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.availability import Hold
from clusterd.core.estimates.can_migrate import is_settled
from clusterd.core.estimates.expected_time import UNKNOWN
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import bind
from clusterd.core.reservations import Handover
from clusterd.core.state import Attempt, Outcome
from clusterd.core.view import View
from clusterd.types import Device, HostState, JobId, JobKind, JobState

HANDOVER_S = 900.0
"""A handover that takes longer than this is dropped: what was to be freed does not come free."""


def suspendable(ctx: PassContext) -> dict[JobId, float]:
    """Seconds that a restart costs each running job that may be suspended in this pass; commands begin anew.

    A job is not suspended twice within the pause between migrations, and within the budget of its life for them only.
    """
    if ctx.suspendable is None:
        ctx.suspendable = {}
        costs = ctx.costs
        for v in ctx.holding:
            restart_s = costs.restart_s(v.job)
            if v.job.spec.kind is JobKind.COMMAND and v.job.attempt is not None:
                restart_s += ctx.view.now_s - v.job.attempt.started_s
            preempted = sum(a.outcome is Outcome.PREEMPTED for a in v.job.attempts)
            life_s = executed_s(v.job, ctx.view.now_s) + v.now_s
            if (preempted + 1) * restart_s <= costs.thresholds.budget * life_s and can_stop(ctx, v):
                ctx.suspendable[v.job.id] = restart_s
    return ctx.suspendable


def suspension_s(ctx: PassContext, v: JobForecast, p: JobForecast, for_s: float) -> float | None:
    """Seconds that a running job loses if it is suspended for a queued one; None: it must not be.

    It loses a restart and the time for which the other holds its devices. It is suspended only for a job of no lower
    priority that needs less time than it has left itself, restart included: so two jobs never suspend each other; and a
    guaranteed job only where it keeps its guarantee.

    Args:
        for_s: seconds for which the queued job runs.
    """
    restart_s = suspendable(ctx).get(v.job.id)
    if restart_s is None or v.now_s <= for_s + restart_s or v.job.priority > p.job.priority or v.job.id in ctx.moved:
        return None
    if v.job.spec.guaranteed and v.curve.promised is None:
        return None
    lost_s = for_s + restart_s
    return lost_s if ctx.keeps_guarantee(v, lost_s + v.now_s) else None


def may_suspend_by_right(ctx: PassContext, v: JobForecast, p: JobForecast) -> bool:
    """True where a queued job may have all devices of a running one, whatever that costs it."""
    return may_preempt(v.job, p.job) and not v.job.spec.guaranteed and v.job.id not in ctx.moved and can_stop(ctx, v)


def can_stop(ctx: PassContext, v: JobForecast) -> bool:
    """True where a running job can save its state, or has none to save, and has run long enough since it started."""
    job, attempt = v.job, v.job.attempt
    if attempt is None or not is_settled(job) or not (v.devices or attempt.cores):
        return False
    if job.spec.kind is JobKind.COMMAND and not job.spec.preemptible:
        return False
    if job.spec.kind is JobKind.ELASTIC and job.step < 1:
        return False
    if any(ctx.view.hosts[host].state is not HostState.UP for host in attempt.hosts):
        return False
    return _settles_in_s(ctx, v, attempt) <= 0.0


def _settles_in_s(ctx: PassContext, v: JobForecast, attempt: Attempt) -> float:
    """Seconds until a job has run long enough since its start or its last migration to be stopped."""
    job = v.job
    restart_s = ctx.costs.restart_s(job) if job.spec.kind is not JobKind.COMMAND else 0.0  # it has no state to load
    last = max(attempt.started_s, *(m.ended_s or m.started_s for m in job.plan_changes[-1:]), 0.0)
    return last + ctx.thresholds.pause_s(restart_s) - ctx.view.now_s


def next_settled_s(ctx: PassContext) -> float:
    """Seconds until the next of the running jobs may be stopped that have just started; infinite: there is none."""
    waits = [
        _settles_in_s(ctx, v, v.job.attempt)
        for v in ctx.holding
        if v.job.attempt is not None and (v.job.spec.kind is not JobKind.COMMAND or v.job.spec.preemptible)
    ]
    return min((wait_s for wait_s in waits if wait_s > 0.0), default=inf)


# --- handovers ----------------------------------------------------------------------------------------------------


def take_handovers(ctx: PassContext) -> dict[JobId, list[Device]]:
    """Take devices to be handed over out of the ledger, each once; drop handovers that cannot be completed any more.

    Returns:
        Free devices of each handover; it is complete where these are all.
    """
    found: dict[JobId, list[Device]] = {}
    for job_id, handover in ctx.view.handovers.items():
        if ctx.view.jobs[job_id].state is not JobState.QUEUED or not _can_be_completed(ctx, handover):
            ctx.proposal.ends_handovers.append(job_id)
            continue
        found[job_id] = devices = _handed_over(ctx, handover)
        ctx.ledger.take(devices, {}, {})
        if len(devices) == handover.offer.devices:
            continue
        ctx.forecast.hold(Hold(ctx.view.jobs[job_id], UNKNOWN, devices))
        missing = dict(handover.hosts)
        for device in devices:
            missing[device.host] -= 1
        for device in list(ctx.coming):
            if device.name == handover.offer.device_type and missing.get(device.host, 0) > 0:
                missing[device.host] -= 1
                ctx.coming.remove(device)
    return found


def _handed_over(ctx: PassContext, handover: Handover) -> list[Device]:
    found: list[Device] = []
    for host, count in handover.hosts.items():
        here = ctx.ledger.devices.get(host, {}).get(handover.offer.device_type, {})
        found += sorted(here.values(), key=lambda d: d.id)[:count]
    return found


def _can_be_completed(ctx: PassContext, handover: Handover) -> bool:
    """True while the devices are free or being freed."""
    if ctx.view.now_s - handover.since_s > HANDOVER_S:
        return False
    kind = handover.offer.device_type
    coming = [d.host for d in ctx.coming if d.name == kind]
    return all(
        host in ctx.ledger.devices and len(ctx.ledger.devices[host].get(kind, {})) + coming.count(host) >= count
        for host, count in handover.hosts.items()
    )


def suspended_for(view: View, handover: Handover) -> str:
    """Reason of a job that waits for suspended ones to leave their devices."""
    names = " and ".join(view.jobs[job].spec.name for job in handover.suspended)
    return f"{names} {'are' if len(handover.suspended) > 1 else 'is'} suspended for it"


def awaits_start_of_other(view: View, job: JobId) -> str | None:
    """Reason of a suspended job that waits until the other job has started; None: it is not suspended."""
    for other, handover in view.handovers.items():
        if job in handover.suspended:
            return f"suspended for {view.jobs[other].spec.name}, which is to start first"
    return None


def fits_cores(ctx: PassContext, p: JobForecast, handover: Handover, devices: list[Device]) -> bool:
    """True where the cores and memory beside the devices are free, too."""
    where = bind(p.job, handover.offer, devices)
    ledger = ctx.ledger
    return all(
        ledger.cores.get(host, 0) >= cores and ledger.memory_bytes.get(host, 0) >= where.memory_bytes.get(host, 0)
        for host, cores in where.cores.items()
    )
