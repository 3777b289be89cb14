"""Third stage: start queued jobs with a performance model, or preempt and reserve for them.

A job starts now unless waiting for a better offer ends sooner; else other jobs shrink for it where that saves more than
it costs; else the first blocked job gets a reservation. A migration is proposed only if it saves more than it costs, by
a margin, and within a budget for the whole life of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.shrink_to_share import shrink_to_share
from clusterd.core.allocation.victim_search import EvictionPlan, VictimSearch
from clusterd.core.estimates.availability import EarliestStart, Reservation
from clusterd.core.estimates.job_forecast import WORTHWHILE, JobForecast
from clusterd.core.ledger import bind
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.assign import PlannedStart, assign
from clusterd.core.placement.heterogeneous_search import Found, shared_by
from clusterd.core.state import Job
from clusterd.core.view import Refusal, Start
from clusterd.types import Device
from clusterd.units import duration

MOST_CONSIDERED = 12
"""Queued jobs per pass for which later starts and victims are searched."""


# --- those who wait -----------------------------------------------------------------------------------------------


def start_waiting(ctx: PassContext, p: JobForecast) -> bool:
    """Start the job, preempt for it, or record what it waits for; True: it starts now."""
    if ctx.ledger.total < p.curve.least and ctx.considered >= MOST_CONSIDERED:
        return _refuse(ctx, p, None)
    tenant = p.job.spec.tenant
    beyond = ctx.view.quotas.why_not(tenant, p.curve.least)
    if beyond is not None:
        ctx.proposal.refusals.append(Refusal(p.job.id, beyond))
        return False
    want = min(max(ctx.sizes.get(p.job.id, 0), p.curve.least), ctx.view.quotas.left(tenant))
    offers = p.curve.upto(want)
    offers = tuple(sorted(offers, key=lambda x: ctx.burden_s(p, x)))
    found = _or_mixed(ctx, p, want, _find(ctx, p, offers))
    if found is not None and _is_best(ctx, p, found[0], offers[0]) and ctx.may_backfill(p, *found):
        return _start(ctx, p, *found)
    if ctx.considered >= MOST_CONSIDERED:
        if found is not None and ctx.may_backfill(p, *found):
            return _start(ctx, p, *found)
        return _refuse(ctx, p, None)
    ctx.considered += 1
    earliest_start = ctx.forecast.earliest_start(p.job, offers, lambda x: ctx.burden_s(p, x))
    if found is not None and not ctx.may_backfill(p, *found):
        found = None
    if found is not None and not _better_later(ctx, p, found[0], earliest_start):
        ends_s = _grown_s(ctx, p, found[0], earliest_start)
    else:
        found, ends_s = None, float("inf")
        if earliest_start is not None:
            ends_s = earliest_start.at_s + ctx.burden_s(p, earliest_start.offer)
    if _preempt(ctx, p, offers, ends_s):
        return False
    return _start(ctx, p, *found) if found is not None else _refuse(ctx, p, earliest_start)


def _is_best(ctx: PassContext, p: JobForecast, offer: Estimate, single: Estimate) -> bool:
    """True where an offer is as good as the best one on a single device type."""
    return offer == single or (bool(offer.device_types) and ctx.burden_s(p, offer) <= ctx.burden_s(p, single))


def _or_mixed(ctx: PassContext, p: JobForecast, want: int, found: Found | None) -> Found | None:
    """The offer found for a queued job, or mixed devices where these are better."""
    if ctx.mixed_search is None or ctx.mixed_search.left <= 0:
        return found
    # Every device is somebody's share: a mix that is a little faster takes what others are to have.
    if found is not None and ctx.spare <= 0:
        return found
    ctx.mixed_search.left -= 1
    price = ctx.price(p, ctx.thresholds.price)
    mixed = ctx.mixed_search.best(
        p,
        ctx.max_mixed_devices(p, want),
        lambda step_s, devices: p.steps_left * step_s * (1.0 + price * devices),
        (1.0 - WORTHWHILE) * ctx.burden_s(p, found[0]) if found is not None else float("inf"),
    )
    if mixed is None or not ctx.may_backfill(p, *mixed):
        return found
    return mixed


def _find(ctx: PassContext, p: JobForecast, offers: Sequence[Estimate]) -> Found | None:
    for offer in offers:
        if offer.devices <= ctx.ledger.total:
            devices = ctx.ledger.find(p.job, offer)
            if devices is not None:
                return offer, devices
    return None


def _better_later(ctx: PassContext, p: JobForecast, offer: Estimate, earliest_start: EarliestStart | None) -> bool:
    """True where waiting for a better offer ends sooner than starting now, later growth included."""
    if earliest_start is None:
        return False
    return earliest_start.at_s + ctx.burden_s(p, earliest_start.offer) < _grown_s(ctx, p, offer, earliest_start)


def _grown_s(ctx: PassContext, p: JobForecast, offer: Estimate, earliest_start: EarliestStart | None) -> float:
    """Burden of starting now: staying, or migrating to the better offer once it is free, whichever is less."""
    now_s = ctx.burden_s(p, offer)
    if earliest_start is None:
        return now_s
    best_s = ctx.burden_s(p, earliest_start.offer)
    meanwhile_s = earliest_start.at_s * now_s / max(p.left_s(offer), 1e-9)  # its devices paid for
    grown_s = meanwhile_s + ctx.costs.move_s(p.job) + best_s * max(1.0 - earliest_start.at_s / max(now_s, 1e-9), 0.0)
    return min(now_s, grown_s)


def _start(ctx: PassContext, p: JobForecast, offer: Estimate, devices: list[Device]) -> bool:
    where = bind(p.job, offer, devices)
    ctx.occupy(p.left_s(offer), devices)
    ctx.ledger.take(devices, where.cores, where.memory_bytes)
    ctx.view.quotas.take(p.job.spec.tenant, len(devices))
    ctx.spare -= max(len(devices) - ctx.sizes.get(p.job.id, 0), 0)
    if ctx.mixed_search is not None:
        ctx.started.append(PlannedStart(p, offer, devices, len(ctx.proposal.starts)))
    ctx.proposal.starts.append(started_as(p, offer, devices))
    return True


def exchange_devices(ctx: PassContext) -> None:
    """Exchange devices of different types between jobs that start in this pass where the sum of times falls.

    Not where a place is kept for somebody: how long each device is held was weighed for that.
    """
    if ctx.mixed_search is None or ctx.reservation is not None:
        return
    found = assign(ctx.started, ctx.view, ctx.mixed_search, ctx.ledger)
    for one, (offer, devices) in zip(ctx.started, found or [], strict=False):
        ctx.proposal.starts[one.number] = started_as(one.p, offer, devices)


def _refuse(ctx: PassContext, p: JobForecast, earliest_start: EarliestStart | None) -> bool:
    least = p.curve.points[p.curve.least]
    offer = least if earliest_start is None else earliest_start.offer
    if earliest_start is not None:
        if ctx.reservation is None:
            spare = ctx.forecast.free_at(offer.device_type, earliest_start.at_s)
            for host, count in earliest_start.hosts.items():
                spare[host] = spare.get(host, 0) - count
            ctx.reservation = Reservation(earliest_start.at_s, offer.device_type, spare)
        ctx.forecast.take(offer.device_type, earliest_start.hosts)
    reason = f"waits for {offer.devices} free device{'s' * (offer.devices > 1)}, on which {offer.plan} is worth it"
    ctx.proposal.refusals.append(Refusal(p.job.id, reason, devices=offer.devices))
    return False


# --- those who make room ------------------------------------------------------------------------------------------


def _preempt(ctx: PassContext, p: JobForecast, offers: Sequence[Estimate], ends_s: float) -> bool:
    """Shrink or move other jobs where that saves the job more than it costs them; True: devices will come free."""
    least = offers[-1].devices if ends_s == float("inf") else offers[0].devices
    if ctx.leaving > 0 and ctx.ledger.total + ctx.leaving >= least > ctx.ledger.total:
        ctx.leaving -= least - ctx.ledger.total
        ctx.proposal.refusals.append(Refusal(p.job.id, "devices for it are being freed", devices=least))
        return True
    claims = {v.job.id for v in ctx.running if _yields(v.job, p.job)}
    best: tuple[float, EvictionPlan] | None = None
    search = VictimSearch(ctx.ledger, p, ctx.migratable())
    for offer in offers[:3]:
        run_s = ctx.burden_s(p, offer)
        if run_s >= ends_s and not claims:
            break
        eviction = search.make(offer, lambda v: victim_sizes(ctx, v, v.job.id in claims), ctx.costs.cost_s)
        if eviction is None:
            continue
        lost_s = sum(change.lost_s for change in eviction.changes if change.v.job.id not in claims)
        saved_s = ends_s - run_s - ctx.thresholds.shrink * lost_s
        by_right = bool(claims) and all(change.v.job.id in claims for change in eviction.changes)
        if not eviction.changes or not (saved_s > 0 or (by_right and ends_s > run_s)):
            continue
        if best is None or saved_s > best[0]:
            best = (saved_s, eviction)
    if best is None:
        return False
    eviction = shrink_to_share(best[1], ctx.sizes, ctx.costs, claims)
    why = f"would be {duration(max(best[0], 0.0))} worse off otherwise" if ends_s < 1e9 else "cannot start otherwise"
    for change in eviction.changes:
        ctx.ledger.take(change.devices, {}, {})
        claim = _claim(p.job) if change.v.job.id in claims else why
        ctx.migrate(change.v, change.offer, change.devices, f"makes room for {p.job.spec.name}, which {claim}")
    ctx.ledger.take(eviction.now, {}, {})
    reason = f"its {eviction.offer.devices} devices are being freed"
    ctx.proposal.refusals.append(Refusal(p.job.id, reason, devices=eviction.offer.devices))
    return True


def victim_sizes(ctx: PassContext, v: JobForecast, by_right: bool) -> tuple[Estimate, ...]:
    """Offers to which a running job may shrink for others, largest first."""
    least = v.curve.least if by_right else max(min(ctx.sizes.get(v.job.id, 0), len(v.devices)), v.curve.least)
    return tuple(
        x for x in v.curve.upto(len(v.devices)) if x.devices >= least and (by_right or ctx.costs.within_budget(v, x))
    )


def started_as(p: JobForecast, offer: Estimate, devices: Sequence[Device]) -> Start:
    """Start of a job under an offer on these devices."""
    where = bind(p.job, offer, devices)
    reason = (
        f"{offer.plan} on {_names(devices)}{shared_by(offer)}: {duration(p.left_s(offer))} to go, by what is known of "
        "its speed"
    )
    return Start(p.job.id, offer.plan, where.ranks, where.cores, where.memory_bytes, reason)


def _yields(victim: Job, job: Job) -> bool:
    """True where a queued job has a right to a victim's devices by priority or guarantee."""
    return job.priority > victim.priority or (
        job.spec.guaranteed and not victim.spec.guaranteed and job.priority >= victim.priority
    )


def _claim(job: Job) -> str:
    return "is guaranteed" if job.spec.guaranteed else f"has priority {job.priority}"


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(dict.fromkeys(str(d.host) for d in devices))
