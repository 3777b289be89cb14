"""Devices for a queued job that does not fit: those that are being freed, and those of running jobs that shrink for it.

By right (`rights`) a job takes what others have on loan, then what lower priorities hold. By value it takes devices
from jobs of its own priority or below where that saves more than it costs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.rights import least_by_right, may_preempt, requested_devices, right_over
from clusterd.core.allocation.shrink_to_share import shrink_to_share
from clusterd.core.allocation.suspend import may_suspend_by_right, suspendable, suspension_s
from clusterd.core.allocation.victim_search import EvictionPlan, SuspensionCost, VictimSearch
from clusterd.core.booked import Booked, Placement
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, held
from clusterd.core.performance_table import Estimate
from clusterd.core.reservations import Handover
from clusterd.core.state import Job
from clusterd.core.view import Preempt, View
from clusterd.types import AttemptState, Device, DeviceId, JobId
from clusterd.units import counted, duration


def devices_being_freed(view: View) -> list[Device]:
    """Devices that come free once the migrations and stops under way are done."""
    found: list[Device] = []
    in_use = {device for job in view.running for device in _shared_in_use(job)}
    for job in view.running:
        if (leaving := _leaving(job)) and job.attempt is not None:
            hosts = [host for name in sorted(job.attempt.all_hosts) if (host := view.free.hosts.get(name)) is not None]
            found += [device for host in hosts for device in host.devices if device.id in leaving - in_use]
    return found


def _shared_in_use(job: Job) -> tuple[DeviceId, ...]:
    """Devices that a job shares and does not leave."""
    attempt = job.attempt
    stays = job.spec.resources.share > 1 and attempt is not None and attempt.state is not AttemptState.STOPPING
    return attempt.devices if attempt is not None and stays else ()


def _leaving(job: Job) -> set[DeviceId]:
    """Devices that come free once the job's current migration or stop is done."""
    attempt = job.attempt
    if attempt is None or not (attempt.retired or attempt.migration or attempt.state is AttemptState.STOPPING):
        return set()
    going = [rank for retired in attempt.retired.values() for rank in retired.ranks.values()]
    stays: set[DeviceId | None] = set(attempt.reserved_devices)
    if attempt.migration is not None:
        going += attempt.ranks.values()
        stays.update(rank.place.device for rank in attempt.migration.ranks.values())
    elif attempt.state is AttemptState.STOPPING:
        going += attempt.ranks.values()
    else:
        stays.update(attempt.devices)
    return {device for rank in going if (device := rank.place.device) is not None and device not in stays}


def are_being_freed(ctx: PassContext, find: Callable[[Ledger], Placement | None]) -> bool:
    """True where the job starts once the devices under way are free; its place is then no longer offered to others.

    Args:
        find: place for the job in a ledger; None: it does not fit.
    """
    claimed = ctx.view.calendar.to_withhold(ctx.coming, ctx.availability.run_s)
    coming = [device for device in ctx.coming if device not in claimed]
    if not coming:
        return False
    # Their cores and memory come with them; how many is known when they come.
    spare = dict.fromkeys({d.host for d in coming}, 1 << 30)
    ctx.ledger.put(coming, Booked(spare, spare))
    found = find(ctx.ledger)
    ctx.ledger.take(coming, Booked(spare, spare))
    if found is None:
        return False
    taken = held(ctx.view.hosts, ((place.host, place.device) for place in found.ranks))
    ctx.coming = [device for device in ctx.coming if device not in taken]
    ctx.ledger.take(taken, found.booked)
    return True


def evict_by_right(ctx: PassContext, forecast: JobForecast) -> EvictionPlan | None:
    """Shrink jobs that must give devices to a queued one, and suspend them if shrinking does not suffice.

    Loans come first, then the lowest priority.

    Returns:
        None: all that may be taken is not enough.
    """
    lowest = ctx.lowest_holder  # asked by every waiting job, and mostly nobody may be preempted, nor has a loan
    if lowest is None or not (may_preempt(lowest, forecast.job) or ctx.has_loans()):
        return None
    least: dict[JobId, int] = {}
    givers = ctx.able_to_give()
    for victim in givers:
        to = least_by_right(victim, forecast.job)
        if to is not None and to < len(victim.devices):
            least[victim.job.id] = to
    loans = [victim for victim in givers if victim.job.id in least and not may_preempt(victim.job, forecast.job)]
    others = [victim for victim in givers if victim.job.id in least and may_preempt(victim.job, forecast.job)]
    levels = [-inf, *sorted({float(victim.job.priority) for victim in others})]
    for level in levels:
        victims = [*loans, *(victim for victim in others if victim.job.priority <= level)]
        best = _cheapest(ctx, forecast, victims, least, lambda _: None) if victims else None
        if best is not None:
            return _apply(ctx, forecast, best, lambda victim: right_over(victim, forecast.job), may_restart=True)
    stoppable = [victim for victim in ctx.holding if may_suspend_by_right(ctx, victim, forecast)]
    for level in sorted({float(victim.job.priority) for victim in stoppable}):
        lost_s = {victim.job.id: victim.now_s for victim in stoppable if victim.job.priority <= level}
        victims = [victim for victim in ctx.holding if victim.job.id in lost_s or victim.job.id in least]
        best = _cheapest(ctx, forecast, victims, least, _from(lost_s))
        if best is not None:
            return _apply(ctx, forecast, best, lambda victim: right_over(victim, forecast.job), may_restart=True)
    return None


def _from(lost_s: Mapping[JobId, float | None]) -> SuspensionCost:
    """Cost of a suspension, looked up by job."""
    return lambda victim: lost_s.get(victim.job.id)


def _apply(
    ctx: PassContext,
    forecast: JobForecast,
    eviction: EvictionPlan,
    why: Callable[[Job], str],
    may_restart: bool = False,
) -> EvictionPlan:
    """Propose the changes of an eviction; where jobs are suspended, their devices are handed over to the queued job.

    Args:
        may_restart: victims move through host memory if they do not fit beside themselves, whatever that costs.
    """
    for change in eviction.changes:
        victim, reason = change.victim, f"{forecast.job.spec.name}: {why(change.victim.job)}"
        if change.offer is None:
            ctx.moved.add(victim.job.id)
            ctx.proposal.preempts.append(Preempt(victim.job.id, f"suspended for {reason}"))
            continue
        ctx.ledger.take(change.devices)
        given = len(victim.devices) - len(change.devices)
        gives = f"gives {counted(given, 'device')} to" if given else "moves for"
        ctx.migrate(victim, change.offer, change.devices, f"{gives} {reason}", may_restart)
    ctx.ledger.take(eviction.now)
    if suspended := eviction.suspended:
        stopped = tuple(victim.job.id for victim in suspended)
        ctx.proposal.handovers[forecast.job.id] = Handover(
            eviction.offer, dict(eviction.hosts), stopped, ctx.view.now_s
        )
    return eviction


def _cheapest(
    ctx: PassContext,
    forecast: JobForecast,
    victims: Sequence[JobForecast],
    least: Mapping[JobId, int],
    suspension: SuspensionCost,
) -> EvictionPlan | None:
    search = VictimSearch(ctx.ledger, forecast, ctx.unclaimed(victims), suspension)

    def sizes(victim: JobForecast) -> tuple[Estimate, ...]:
        fewest = least.get(victim.job.id)
        if fewest is None:
            return ()
        has_right = may_preempt(victim.job, forecast.job)
        fastest: dict[object, Estimate] = {}
        for x in victim.curve.offers:
            if fewest <= x.devices < len(victim.devices) and (
                has_right or ctx.worth.keeps_guarantee(victim, ctx.costs.then_s(victim, x))
            ):
                fastest.setdefault((x.types, x.shape), x)
        return tuple(fastest.values())

    found = [search.make(offer, sizes, ctx.costs.cost_s) for offer in _by_right(forecast)]
    return min((e for e in found if e is not None and e.changes), key=lambda e: e.lost_s, default=None)


def _by_right(forecast: JobForecast) -> list[Estimate]:
    """Offers for which a queued job may take devices by right: up to its request, largest first."""
    if not forecast.has_model:
        return [x for x in forecast.curve.offers if x.devices][:OFFERS_TRIED]
    most = max(requested_devices(forecast.job), forecast.curve.least)
    sizes = [n for n in sorted(forecast.curve.points, reverse=True) if n <= most]
    return [forecast.curve.points[n] for n in sizes[:OFFERS_TRIED]]


OFFERS_TRIED = 8
"""Offers of a queued job for which evictions by right are searched."""


def evict_by_value(
    ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate], ends_s: float
) -> EvictionPlan | None:
    """Shrink or move other jobs where that saves the job more than it costs them; None: it does not.

    Args:
        ends_s: burden of the best that the job can have without it.
    """
    lowest = ctx.lowest_right  # asked by every waiting job, and mostly nobody may be preempted
    preemptible: set[JobId] = set()
    if lowest is not None and may_preempt(lowest, forecast.job):
        preemptible = {victim.job.id for victim in ctx.running if may_preempt(victim.job, forecast.job)}
    best: tuple[float, float, EvictionPlan] | None = None
    movable = [victim for victim in ctx.migratable() if victim.job.priority <= forecast.job.priority]
    search = VictimSearch(ctx.ledger, forecast, ctx.unclaimed(movable))
    for offer in offers[:3]:
        run_s = ctx.worth.burden_s(forecast, offer)
        if run_s >= ends_s and not preemptible:
            break
        eviction = search.make(
            offer, lambda victim: victim_sizes(ctx, victim, victim.job.id in preemptible), ctx.costs.cost_s
        )
        if eviction is None:
            continue
        lost_s = sum(change.lost_s for change in eviction.changes if change.victim.job.id not in preemptible)
        saved_s = ends_s - run_s - ctx.costs.thresholds.shrink * lost_s
        by_right = bool(preemptible) and all(change.victim.job.id in preemptible for change in eviction.changes)
        if not eviction.changes or not (saved_s > 0 or (by_right and ends_s > run_s)):
            continue
        if best is None or saved_s > best[0]:
            best = (saved_s, ends_s - run_s, eviction)
    if best is None:
        return None
    _, gain_s, eviction = best
    eviction = shrink_to_share(ctx, eviction, preemptible)
    why = f"would be {duration(max(gain_s, 0.0))} worse off otherwise" if ends_s < 1e9 else "cannot start otherwise"
    return _apply(
        ctx,
        forecast,
        eviction,
        lambda victim: right_over(victim, forecast.job) if victim.id in preemptible else f"it {why}",
    )


def suspend_by_value(
    ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate], ends_s: float
) -> EvictionPlan | None:
    """Suspend jobs, and shrink others beside them, where a queued job saves more than they all lose.

    The rule is that of every other move: seconds saved exceed seconds lost by the factor of a shrink.

    Args:
        ends_s: seconds until the job's end if it waits; infinite: it is not known when it could start.
    """
    if ends_s == inf:
        return None
    best: tuple[float, float, EvictionPlan] | None = None
    restart_s = min(suspendable(ctx).values(), default=inf)
    holders = [victim for victim in ctx.holding if victim.job.priority <= forecast.job.priority]
    movable = {victim.job.id for victim in ctx.migratable()}

    def sizes(victim: JobForecast) -> tuple[Estimate, ...]:
        return victim_sizes(ctx, victim, False) if victim.job.id in movable else ()

    for offer in offers[:3]:
        run_s = forecast.left_s(offer)
        if ends_s - run_s <= ctx.costs.thresholds.shrink * (run_s + restart_s):
            continue  # not even one victim would pay
        lost_s = {victim.job.id: suspension_s(ctx, victim, forecast, run_s) for victim in holders}
        if all(one is None for one in lost_s.values()):
            continue
        victims = [victim for victim in holders if lost_s[victim.job.id] is not None or victim.job.id in movable]
        eviction = VictimSearch(ctx.ledger, forecast, ctx.unclaimed(victims), _from(lost_s)).make(
            offer, sizes, ctx.costs.cost_s
        )
        if eviction is None or not eviction.suspended:
            continue
        saved_s = ends_s - run_s - ctx.costs.thresholds.shrink * eviction.lost_s
        if saved_s > 0 and (best is None or saved_s > best[0]):
            best = saved_s, ends_s - run_s, eviction
    if best is None:
        return None
    _, gain_s, eviction = best
    return _apply(ctx, forecast, eviction, lambda _: f"it would be {duration(gain_s)} worse off otherwise")


def victim_sizes(ctx: PassContext, victim: JobForecast, by_right: bool) -> tuple[Estimate, ...]:
    """Offers to which a running job may shrink for others, largest first."""
    least = (
        victim.curve.least if by_right else max(min(ctx.targets.of(victim), len(victim.devices)), victim.curve.least)
    )
    return tuple(
        x
        for x in victim.curve.upto(len(victim.devices))
        if x.devices >= least and (by_right or ctx.worth.may_move_for_others(victim, x))
    )
