"""Third stage: start queued jobs in order, or free devices for them; the first that cannot start gets a reservation.

A job without a performance model starts on what it requests. One with a model starts now unless waiting for a better
offer ends sooner. Who does not fit waits for devices that are being freed, gets those that others have on loan or hold
at a lower priority, or, with a model, those whose loss costs others less than it saves. After that nobody passes the
first blocked job unless that does not delay it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from clusterd.core.allocation.evict import are_being_freed, evict_by_right, evict_by_value, suspend_by_value
from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.request_grant import Grant, allocate, place_again
from clusterd.core.allocation.reserved_start import owes
from clusterd.core.allocation.suspend import awaits_start_of_other, can_stop, fits_cores, suspendable, suspended_for
from clusterd.core.allocation.victim_search import EvictionPlan
from clusterd.core.booked import Placement
from clusterd.core.estimates.availability import AvailabilityForecast, EarliestStart, Hold
from clusterd.core.estimates.backfill import Backfill
from clusterd.core.estimates.expected_time import Ends, ends_of_modelled
from clusterd.core.estimates.job_forecast import WORTHWHILE, JobForecast
from clusterd.core.ledger import Ledger, bind, held
from clusterd.core.performance_table import Estimate, evenly
from clusterd.core.placement.assign import PlannedStart, assign
from clusterd.core.placement.heterogeneous_search import Found, shared_by
from clusterd.core.reservations import Reservation
from clusterd.core.state import Job
from clusterd.core.view import Preempt, Refusal, Start, View
from clusterd.types import Device, JobId, JobKind
from clusterd.units import counted, duration

AT_ONCE_S = 1.0
"""A promised start is not recorded anew for less than this."""

LOAN_WAIT = 0.25
"""Share of its own run time that a job with a model waits before it takes back loans whatever that costs: before
that, others give devices for it where they lose less than it saves."""

MOST_CONSIDERED = 12
"""Queued jobs per pass for which later starts and victims are searched."""


def start_waiting(
    ctx: PassContext, job: Job, forecasts: Mapping[JobId, JobForecast], handovers: Mapping[JobId, list[Device]]
) -> None:
    """Start a queued job, free devices for it, or record what it waits for.

    Args:
        handovers: see `take_handovers`.
    """
    if job.id in handovers:
        refusal = _start_handed_over(ctx, forecasts[job.id], handovers[job.id])
    elif (suspended := awaits_start_of_other(ctx.view, job.id)) is not None:
        refusal = Refusal(job.id, suspended)
    elif job.inspection.model and forecasts[job.id].has_model:
        refusal = _start_modelled(ctx, forecasts[job.id])
    else:
        refusal = _start_request_like_others(ctx, forecasts[job.id])
    if refusal is not None:
        ctx.proposal.refusals.append(refusal)


def _start_handed_over(ctx: PassContext, forecast: JobForecast, devices: list[Device]) -> Refusal | None:
    """Start a job on the devices of its handover, or refuse while these, or cores or memory beside them, are busy."""
    job, handover = forecast.job, ctx.view.handovers[forecast.job.id]
    refusal = Refusal(job.id, suspended_for(ctx.view, handover), devices=handover.offer.devices)
    if len(devices) < handover.offer.devices:
        return refusal
    ctx.ledger.put(devices)
    # Without a model the handover may be of devices whose cores alone it needs.
    answer = allocate(job, ctx.view) if not forecast.has_model else None
    if isinstance(answer, Grant):
        _grant(ctx, job, answer, forecast.ends(ctx.view))
    elif answer is None and fits_cores(ctx.ledger, job, handover, devices):
        _start(ctx, forecast, handover.offer, devices)
    else:
        ctx.ledger.take(devices)
        return refusal
    return None


# --- jobs without a performance model -----------------------------------------------------------------------------


def _start_request_like_others(ctx: PassContext, forecast: JobForecast) -> Refusal | None:
    """Start the job on what it requests, or refuse; one that asks for what another was refused is refused alike."""
    job = forecast.job
    ends = forecast.ends(ctx.view)
    alike = _alike(job, ctx.view, ends)
    if alike is not None and (same := ctx.refused.get(alike)) is not None:
        return replace(same, job=job.id)
    refusal = _start_request(ctx, forecast, ends)
    if alike is not None and refusal is not None:
        ctx.refused[alike] = refusal
    return refusal


def _start_request(ctx: PassContext, forecast: JobForecast, ends: Ends) -> Refusal | None:
    """Start the job on what it requests, or refuse."""
    job = forecast.job
    answer = allocate(job, ctx.view)
    if isinstance(answer, Grant) and not ctx.reserved.admits(hold := _hold_of(ctx.view, job, answer, ends)):
        answer = _grant_within_limits(ctx, job, answer, ends) or _may_not_pass(ctx, job, len(hold.devices))
    if isinstance(answer, Refusal):
        return _free_for_request(ctx, forecast, answer, ends) if answer.is_shortage else answer
    _grant(ctx, job, answer, ends)
    return None


def _grant_within_limits(ctx: PassContext, job: Job, grant: Grant, ends: Ends) -> Grant | None:
    """Grant beside the place of the job with the reservation; None: there is none."""
    may_differ = (
        job.spec.resources.share > 1 or job.spec.kind is JobKind.CHECKPOINTABLE
    )  # a joined device, another size
    for free in ctx.reserved.limited(job, ends, ctx.ledger):
        if may_differ or place_again(job, grant, free) is not None:
            answer = allocate(job, ctx.view, free)
            if isinstance(answer, Grant):
                return answer
    return None


def _hold_of(view: View, job: Job, grant: Grant, ends: Ends) -> Hold:
    """Resources that a job without a performance model would hold."""
    where = grant.placement
    devices = held(view.hosts, ((place.host, place.device) for place in where.ranks))
    return Hold(job, ends, devices, where.booked)


def _grant(ctx: PassContext, job: Job, grant: Grant, ends: Ends) -> None:
    """Start a job without a performance model on what it was granted."""
    where, hold = grant.placement, _hold_of(ctx.view, job, grant, ends)
    ctx.reserved.hold(hold)
    ctx.view.quotas.take(job.spec, len(hold.devices))
    ctx.ledger.take_places(where.ranks, where.booked, job.spec.resources.share)
    start = Start(job.id, grant.plan, where.ranks, where.booked, grant.reason)
    ctx.proposal.starts.append(start)


def _free_for_request(ctx: PassContext, forecast: JobForecast, shortage: Refusal, ends: Ends) -> Refusal:
    """Free devices for a job without a performance model, or reserve what it will get."""

    def look(free: Ledger) -> Grant | None:
        answer = allocate(forecast.job, ctx.view, free)
        return answer if isinstance(answer, Grant) else None

    def find(free: Ledger) -> Placement | None:
        answer = look(free)
        return (
            answer.placement
            if answer is not None and ctx.reserved.admits(_hold_of(ctx.view, forecast.job, answer, ends))
            else None
        )

    if are_being_freed(ctx, find):
        return _served(ctx, replace(shortage, reason="devices for it are being freed"))
    if (eviction := evict_by_right(ctx, forecast)) is not None:
        return _served(ctx, _given_up(forecast, eviction))
    may_suspend = ends.foreseen_s < inf and bool(suspendable(ctx))
    found = ctx.availability.first(look) if ctx.reserved.limits is None or may_suspend else None
    if found is not None and may_suspend:
        eviction = suspend_by_value(ctx, forecast, forecast.curve.offers, found[0] + forecast.now_s)
        if eviction is not None:
            return _served(ctx, _given_up(forecast, eviction))
    if ctx.reserved.limits is None and found is not None:
        at_s, grant = found
        reserve(ctx, forecast, at_s, lambda free: place_again(forecast.job, grant, free))
    return shortage


def _given_up(forecast: JobForecast, eviction: EvictionPlan) -> Refusal:
    """Refusal of a job for which others give up devices in this pass."""
    names = [change.victim.job.spec.name for change in eviction.changes]
    verb = ("gives" if len(names) == 1 else "give") + " up devices for it"
    return Refusal(forecast.job.id, f"{' and '.join(names)} {verb}", devices=eviction.offer.devices)


def _served(ctx: PassContext, refusal: Refusal) -> Refusal:
    """The refusal of a job for which devices are being freed: its reservation stands until it starts."""
    reservation = ctx.view.reservation
    ctx.reserved.is_served = ctx.reserved.is_served or (reservation is not None and reservation.job == refusal.job)
    return refusal


def _alike(job: Job, view: View, ends: Ends) -> object:
    """Properties that decide about a command besides the free resources; None: others matter, too."""
    if job.spec.kind is not JobKind.COMMAND or job.failures.excluded_hosts or job.not_before_s > view.now_s:
        return None
    spec = job.spec
    runtime = spec.runtime if spec.container else ""
    who = spec.tenant, view.quotas.limited_user(spec)
    return spec.resources, runtime, who, spec.guaranteed, job.priority, ends.foreseen_s, ends.latest_s


def _may_not_pass(ctx: PassContext, job: Job, devices: int) -> Refusal:
    """Refusal of a job that would fit but would delay the first one."""
    assert ctx.reserved.job is not None
    first = ctx.view.jobs[ctx.reserved.job].spec.name
    what = "devices" if devices else "CPU cores"
    reason = f"the free {what} are reserved for {first}, which comes first"
    return Refusal(job.id, reason, devices=devices, is_shortage=True)


# --- jobs with a performance model --------------------------------------------------------------------------------


def _start_modelled(ctx: PassContext, forecast: JobForecast) -> Refusal | None:
    """Start the job on the best offer for it, free devices for it, or refuse."""
    job, curve, is_late = forecast.job, forecast.curve, ctx.considered >= MOST_CONSIDERED
    if is_late and ctx.ledger.total < curve.least:
        return _shortage(forecast, curve.points[curve.least])
    if (beyond := ctx.view.quotas.why_not(job.spec, curve.least)) is not None:
        return Refusal(job.id, beyond)
    want = min(max(ctx.targets.of(forecast), curve.least), ctx.view.quotas.left(job.spec))
    offers = sorted(curve.upto(want), key=lambda x: ctx.worth.burden_s(forecast, x))
    found = _or_mixed(ctx, forecast, want, _find(ctx.ledger, job, offers))
    if found is not None and not ctx.reserved.may_backfill(forecast, *found):
        found = _find_within_limits(ctx, forecast, offers)
    if found is not None and (is_late or _is_best(ctx, forecast, found[0], offers[0])):
        _start(ctx, forecast, *found)
        return None
    if is_late:
        return _shortage(forecast, curve.points[curve.least])
    ctx.considered += 1
    return _start_now_or_later(ctx, forecast, offers, found)


def _start_now_or_later(
    ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate], found: Found | None
) -> Refusal | None:
    """Start the job on what was found unless a later start, or freeing devices of others, is better."""
    earliest_start = ctx.availability.earliest_start(forecast.job, offers, lambda x: ctx.worth.burden_s(forecast, x))
    if found is not None and not _better_later(ctx, forecast, found[0], earliest_start):
        ends_s = _grown_s(ctx, forecast, found[0], earliest_start)
    else:
        found, ends_s = None, inf
        if earliest_start is not None:
            ends_s = earliest_start.at_s + ctx.worth.burden_s(forecast, earliest_start.offer)
    refusal = _free_for_modelled(ctx, forecast, offers, ends_s, earliest_start if found is None else None)
    if refusal is not None:
        return _served(ctx, refusal)
    if found is None:
        return _wait(ctx, forecast, earliest_start)
    _start(ctx, forecast, *found)
    return None


def _free_for_modelled(
    ctx: PassContext,
    forecast: JobForecast,
    offers: Sequence[Estimate],
    ends_s: float,
    earliest_start: EarliestStart | None,
) -> Refusal | None:
    """Free devices for a job with a performance model; None: it is not worth it, or cannot be.

    Args:
        earliest_start: its start without that; None: it can start now, or never.
    """
    least = offers[-1] if ends_s == inf else offers[0]

    def find(free: Ledger) -> Placement | None:
        devices = free.find(forecast.job, least)
        return (
            bind(forecast.job, least, devices)
            if devices is not None and ctx.reserved.may_backfill(forecast, least, devices)
            else None
        )

    if ctx.ledger.total < least.devices and are_being_freed(ctx, find):
        return Refusal(forecast.job.id, "devices for it are being freed", devices=least.devices)
    if (eviction := evict_by_value(ctx, forecast, offers, ends_s)) is not None:
        devices = eviction.offer.devices
        return Refusal(forecast.job.id, f"its {devices} devices are being freed", devices=devices)
    waits_s = earliest_start.at_s if earliest_start is not None else ends_s
    waited_s = ctx.view.now_s - forecast.job.queued_s
    if waits_s > ctx.costs.move_s(forecast.job) and waited_s > LOAN_WAIT * forecast.left_s(least):
        eviction = evict_by_right(ctx, forecast)
    if eviction is None:
        eviction = suspend_by_value(ctx, forecast, offers, ends_s)
    return _given_up(forecast, eviction) if eviction is not None else None


def _is_best(ctx: PassContext, forecast: JobForecast, offer: Estimate, single: Estimate) -> bool:
    """True where an offer is as good as the best one on a single device type."""
    return offer == single or (
        bool(offer.device_types) and ctx.worth.burden_s(forecast, offer) <= ctx.worth.burden_s(forecast, single)
    )


def _or_mixed(ctx: PassContext, forecast: JobForecast, want: int, found: Found | None) -> Found | None:
    """The offer found for a queued job, or mixed devices where these are better."""
    if ctx.mixed_search is None or ctx.mixed_search.left <= 0:
        return found
    # Every device is somebody's share: a mix that is a little faster takes what others are to have.
    if found is not None and ctx.targets.spare <= 0:
        return found
    ctx.mixed_search.left -= 1
    price = ctx.worth.price(forecast, ctx.costs.thresholds.price)
    mixed = ctx.mixed_search.best(
        forecast,
        ctx.targets.most_mixed(forecast, want),
        lambda step_s, devices: forecast.left.seconds(step_s) * (1.0 + price * devices),
        (1.0 - WORTHWHILE) * ctx.worth.burden_s(forecast, found[0]) if found is not None else float("inf"),
    )
    if mixed is None or not ctx.reserved.may_backfill(forecast, *mixed):
        return found
    return mixed


def _find(ledger: Ledger, job: Job, offers: Sequence[Estimate]) -> Found | None:
    """First of these offers that the ledger has devices for."""
    for offer in offers:
        if offer.devices <= ledger.total:
            devices = ledger.find(job, offer)
            if devices is not None:
                return offer, devices
    return None


def _find_within_limits(ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate]) -> Found | None:
    """First of these offers that fits beside the place of the job with the reservation."""
    for offer in offers:
        ends = ends_of_modelled(forecast.job, forecast.left_s(offer), ctx.view.now_s)
        for free in ctx.reserved.limited(forecast.job, ends, ctx.ledger):
            if (found := _find(free, forecast.job, [offer])) is not None:
                return found
    return None


def _better_later(
    ctx: PassContext, forecast: JobForecast, offer: Estimate, earliest_start: EarliestStart | None
) -> bool:
    """True where waiting for a better offer ends sooner than starting now, later growth included."""
    if earliest_start is None:
        return False
    return earliest_start.at_s + ctx.worth.burden_s(forecast, earliest_start.offer) < _grown_s(
        ctx, forecast, offer, earliest_start
    )


def _grown_s(ctx: PassContext, forecast: JobForecast, offer: Estimate, earliest_start: EarliestStart | None) -> float:
    """Burden of starting now: staying, or migrating to the better offer once it is free, whichever is less."""
    now_s = ctx.worth.burden_s(forecast, offer)
    if earliest_start is None:
        return now_s
    best_s = ctx.worth.burden_s(forecast, earliest_start.offer)
    meanwhile_s = earliest_start.at_s * now_s / max(forecast.left_s(offer), 1e-9)  # its devices paid for
    grown_s = (
        meanwhile_s + ctx.costs.move_s(forecast.job) + best_s * max(1.0 - earliest_start.at_s / max(now_s, 1e-9), 0.0)
    )
    return min(now_s, grown_s)


def _start(ctx: PassContext, forecast: JobForecast, offer: Estimate, devices: list[Device]) -> None:
    where = bind(forecast.job, offer, devices)
    ctx.reserved.occupy(forecast, offer, devices)
    ctx.ledger.take(devices, where.booked)
    ctx.view.quotas.take(forecast.job.spec, len(devices))
    ctx.targets.grant(forecast, len(devices))
    if ctx.mixed_search is not None:
        ctx.started.append(PlannedStart(forecast, offer, devices, len(ctx.proposal.starts)))
    ctx.proposal.starts.append(started_as(forecast, offer, devices))


def exchange_devices(ctx: PassContext) -> None:
    """Exchange devices of different types between jobs that start in this pass where the sum of times falls.

    Not where a place is kept for somebody: how long each device is held was weighed for that.
    """
    if ctx.mixed_search is None or ctx.reserved.limits is not None:
        return
    found = assign(ctx.started, ctx.view, ctx.mixed_search, ctx.ledger)
    for one, (offer, devices) in zip(ctx.started, found or [], strict=False):
        ctx.proposal.starts[one.number] = started_as(one.forecast, offer, devices)


def _wait(ctx: PassContext, forecast: JobForecast, earliest_start: EarliestStart | None) -> Refusal:
    """Keep the devices of the job's earliest start for it; returns what it waits for."""
    if earliest_start is None:
        return _shortage(forecast, forecast.curve.points[forecast.curve.least])
    offer = earliest_start.offer
    if ctx.reserved.limits is None:
        reserve(ctx, forecast, earliest_start.at_s, lambda free: _place_of(forecast, offer, free))
    ctx.availability.take(offer.device_type, earliest_start.hosts)
    return _shortage(forecast, offer)


def _shortage(forecast: JobForecast, offer: Estimate) -> Refusal:
    reason = f"waits for {counted(offer.devices, 'free device')}, on which {offer.plan} is worth it"
    return Refusal(forecast.job.id, reason, devices=offer.devices, is_shortage=True)


def _place_of(forecast: JobForecast, offer: Estimate, free: Ledger) -> Placement | None:
    """Placement of a job under an offer on free devices; None: it does not fit."""
    devices = free.find(forecast.job, offer)
    return bind(forecast.job, offer, devices) if devices is not None else None


def reserve(ctx: PassContext, forecast: JobForecast, at_s: float, find: Callable[[Ledger], Placement | None]) -> None:
    """Give the first blocked job its reservation.

    Args:
        at_s: expected start, in seconds from now.
        find: place of the job in a ledger.
    """
    now_s, before = ctx.view.now_s, ctx.view.reservation
    if before is not None and before.job != forecast.job.id:
        before = None
    soonest_s = min(at_s, max(before.at_s - now_s, 0.0)) if before is not None else at_s
    backfill = Backfill(at_s, soonest_s, ctx.availability.ledger_at(at_s), find)
    if backfill.place is None:
        return
    # The offers of a job with a model change as its speed is learned: nothing is promised to it.
    if not forecast.job.inspection.model:
        promised_s = before.latest_s - now_s if before is not None and before.latest_s is not None else inf
        backfill.bound = _bound(ctx.availability, backfill.place, promised_s, find)
    awaited = ctx.availability.awaited(at_s, backfill.place)
    promise = Reservation(
        forecast.job.id,
        now_s + at_s if before is None else min(now_s + at_s, before.at_s),
        now_s + backfill.bound.at_s if backfill.bound is not None else None,
        tuple(sorted(hold.job.id for hold in awaited)),
        all(hold.ends.foreseen_s < inf for hold in awaited),
    )
    # Once the expected start has passed, devices are idle for the promised one only.
    is_past = backfill.bound is not None and soonest_s <= 0.0
    ctx.reserved.limits, ctx.reserved.job = backfill.bound if is_past else backfill, forecast.job.id
    if backfill.bound is not None:
        _stop_who_owes(ctx, forecast, backfill.bound)
    if not ctx.reserved.is_served and (before is None or _differs(promise, before)):
        ctx.proposal.reservation = promise


def _bound(
    availability: AvailabilityForecast, place: Placement, promised_s: float, find: Callable[[Ledger], Placement | None]
) -> Backfill | None:
    """Limits of the promised start: the first at which the job fits on the hosts of a place by time limits alone.

    Args:
        promised_s: start that was promised before, in seconds from now: it is kept where hosts and claims allow it.
    """
    by_limits = availability.by_limits()
    found = by_limits.first(find, place.booked.cores)
    for at_s in sorted({promised_s, found[0] if found is not None else inf}):
        if 0.0 <= at_s < inf:
            bound = Backfill(at_s, 0.0, by_limits.ledger_at(at_s), find)
            if bound.place is not None:
                return bound
    return None


def _stop_who_owes(ctx: PassContext, forecast: JobForecast, bound: Backfill) -> None:
    """Stop the jobs at the place of a promised one that were to end before, in time for its start."""
    for victim in ctx.holding:
        is_near = bound.at_s <= ctx.costs.thresholds.pause_s(ctx.costs.restart_s(victim.job))
        if (
            is_near
            and owes(victim.job, ctx.view)
            and victim.job.id not in ctx.moved
            and bound.needs(victim.devices)
            and can_stop(ctx, victim)
        ):
            ctx.moved.add(victim.job.id)
            ctx.proposal.preempts.append(
                Preempt(victim.job.id, f"suspended for {forecast.job.spec.name}: its start was promised")
            )


def _differs(promise: Reservation, before: Reservation) -> bool:
    """True where a reservation is to be recorded anew."""
    latest_s, was_s = promise.latest_s, before.latest_s
    is_same_bound = latest_s == was_s or (latest_s and was_s and abs(latest_s - was_s) <= AT_ONCE_S)
    is_same = (promise.after, promise.is_foreseen) == (before.after, before.is_foreseen) and is_same_bound
    return not is_same or before.at_s - promise.at_s > AT_ONCE_S


def started_as(forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> Start:
    """Start of a job under an offer on these devices."""
    where = bind(forecast.job, offer, devices)
    left = duration(forecast.left_s(offer))
    reason = f"{offer.plan} on {_names(devices)}{shared_by(offer)}: {left} to go, by what is known of its speed"
    asked = forecast.job.spec.resources.plan
    if asked is not None and evenly(offer.plan) != evenly(asked):
        reason += f", in place of {asked}, which it asks for (clusterd migrate --pin keeps a plan)"
    return Start(forecast.job.id, offer.plan, where.ranks, where.booked, reason)


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(str(d.host) for d in devices))
