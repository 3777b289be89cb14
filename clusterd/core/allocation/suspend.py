"""Suspension: a running job's offer of size zero, and the handover of its devices to another job.

A suspended job saves its state, stops, and waits until the job that gets its devices has started; then it is queued
like any other. Suspension and handover are one transaction in the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.rights import may_preempt, requested_devices
from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.availability import Hold
from clusterd.core.estimates.can_migrate import is_settled
from clusterd.core.estimates.expected_time import UNKNOWN
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, bind
from clusterd.core.reservations import Handover
from clusterd.core.state import Attempt, Job, Outcome
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
        for victim in ctx.holding:
            restart_s = costs.restart_s(victim.job)
            if victim.job.spec.kind is JobKind.COMMAND and victim.job.attempt is not None:
                restart_s += ctx.view.now_s - victim.job.attempt.started_s
            preempted = sum(a.stop.outcome is Outcome.PREEMPTED for a in victim.job.attempts)
            life_s = executed_s(victim.job, ctx.view.now_s) + victim.now_s
            if (preempted + 1) * restart_s <= costs.thresholds.budget * life_s and can_stop(ctx, victim):
                ctx.suspendable[victim.job.id] = restart_s
    return ctx.suspendable


def suspension_s(ctx: PassContext, victim: JobForecast, forecast: JobForecast, for_s: float) -> float | None:
    """Seconds that a running job loses if it is suspended for a queued one; None: it must not be.

    It loses a restart and the time for which the other holds its devices. It is suspended only for a job of no lower
    priority that needs less time than it has left itself, restart included: so two jobs never suspend each other; and a
    guaranteed job only where it keeps its guarantee.

    Args:
        for_s: seconds for which the queued job runs.
    """
    restart_s = suspendable(ctx).get(victim.job.id)
    if (
        restart_s is None
        or victim.now_s <= for_s + restart_s
        or victim.job.priority > forecast.job.priority
        or victim.job.id in ctx.moved
    ):
        return None
    lost_s = for_s + restart_s
    if not victim.job.spec.guaranteed:
        return lost_s
    if victim.curve.promised is None:
        return None
    # It may come back to no more than it asked for: what it has on loan is others' by then. And the other starts, too.
    asked = requested_devices(victim.job)
    back_s = min(victim.left_s(x) for x in (victim.curve.promised, *victim.curve.offers) if x.devices <= asked)
    left_s = max(victim.now_s, back_s) + ctx.costs.restart_s(forecast.job)
    return lost_s if ctx.worth.keeps_guarantee(victim, lost_s + left_s) else None


def may_suspend_by_right(ctx: PassContext, victim: JobForecast, forecast: JobForecast) -> bool:
    """True where a queued job may have all devices of a running one, whatever that costs it."""
    return (
        may_preempt(victim.job, forecast.job)
        and not victim.job.spec.guaranteed
        and victim.job.id not in ctx.moved
        and can_stop(ctx, victim)
    )


def can_stop(ctx: PassContext, victim: JobForecast) -> bool:
    """True where a running job can save its state, or has none to save, and has run long enough since it started."""
    job, attempt = victim.job, victim.job.attempt
    if attempt is None or not is_settled(job) or not (victim.devices or attempt.booked.cores):
        return False
    if job.spec.kind is JobKind.COMMAND and not job.spec.preemptible:
        return False
    if job.spec.kind is JobKind.ELASTIC and job.progress.step < 1:
        return False
    if any(ctx.view.hosts[host].state is not HostState.UP for host in attempt.hosts):
        return False
    return _settles_in_s(ctx, victim, attempt) <= 0.0


def _settles_in_s(ctx: PassContext, victim: JobForecast, attempt: Attempt) -> float:
    """Seconds until a job has run long enough since its start or its last migration to be stopped."""
    job = victim.job
    restart_s = ctx.costs.restart_s(job) if job.spec.kind is not JobKind.COMMAND else 0.0  # it has no state to load
    last = max(attempt.started_s, *(m.ended_s or m.started_s for m in job.plan_changes[-1:]), 0.0)
    return last + ctx.costs.thresholds.pause_s(restart_s) - ctx.view.now_s


def next_settled_s(ctx: PassContext) -> float:
    """Seconds until the next of the running jobs may be stopped that have just started; infinite: there is none."""
    waits = [
        _settles_in_s(ctx, victim, victim.job.attempt)
        for victim in ctx.holding
        if victim.job.attempt is not None
        and (victim.job.spec.kind is not JobKind.COMMAND or victim.job.spec.preemptible)
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
        is_waiting = ctx.view.jobs[job_id].state is JobState.QUEUED and ctx.view.now_s - handover.since_s <= HANDOVER_S
        if not is_waiting or not _can_be_completed(ctx.ledger, ctx.coming, handover):
            ctx.proposal.ends_handovers.append(job_id)
            continue
        found[job_id] = devices = _handed_over(ctx.ledger, handover)
        ctx.ledger.take(devices)
        if len(devices) == handover.offer.devices:
            continue
        ctx.availability.hold(Hold(ctx.view.jobs[job_id], UNKNOWN, devices))
        missing = dict(handover.hosts)
        for device in devices:
            missing[device.host] -= 1
        for device in list(ctx.coming):
            if device.name == handover.offer.device_type and missing.get(device.host, 0) > 0:
                missing[device.host] -= 1
                ctx.coming.remove(device)
    return found


def _handed_over(ledger: Ledger, handover: Handover) -> list[Device]:
    """Free devices among those that suspended jobs left."""
    found: list[Device] = []
    for host, count in handover.hosts.items():
        here = ledger.devices.get(host, {}).get(handover.offer.device_type, {})
        found += sorted(here.values(), key=lambda d: d.id)[:count]
    return found


def _can_be_completed(ledger: Ledger, coming: Iterable[Device], handover: Handover) -> bool:
    """True while the devices are free or being freed."""
    kind = handover.offer.device_type
    freed_on = [d.host for d in coming if d.name == kind]
    return all(
        host in ledger.devices and len(ledger.devices[host].get(kind, {})) + freed_on.count(host) >= count
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


def fits_cores(ledger: Ledger, job: Job, handover: Handover, devices: list[Device]) -> bool:
    """True where the cores and memory beside the devices are free, too."""
    where = bind(job, handover.offer, devices)
    return all(
        ledger.cores.get(host, 0) >= cores
        and ledger.memory_bytes.get(host, 0) >= where.booked.memory_bytes.get(host, 0)
        for host, cores in where.booked.cores.items()
    )
