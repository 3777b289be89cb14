"""Rebalancing between running jobs: one shrinks for another's growth where that saves more than both lose.

Growth into free devices comes first (`scale_up`). The grower takes the devices in the pass in which they are free.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterd.core.allocation.evict import victim_sizes
from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.shrink_to_share import shrink_to_share
from clusterd.core.allocation.start_waiting import MOST_CONSIDERED
from clusterd.core.allocation.victim_search import EvictionPlan, VictimSearch
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.heterogeneous_search import as_if_free

OFFERS_TRIED = 3
"""Offers examined for each job that would grow."""


def rebalance(ctx: PassContext) -> None:
    """Shrink jobs for those below their target size, first for the job that gains most per device."""
    candidates: list[tuple[float, JobForecast, list[Estimate]]] = []
    for forecast in ctx.running:
        if ctx.targets.of(forecast) <= len(forecast.devices) or not ctx.can_migrate(forecast):
            continue
        wider = [x for x in forecast.curve.upto(ctx.targets.most(forecast)) if x.devices > len(forecast.devices)]
        gains = sorted(((_surplus_s(ctx, forecast, x), x) for x in wider), key=lambda item: -item[0])
        good = [(s, x) for s, x in gains if s > 0 and ctx.costs.within_budget(forecast, x)]
        if good:
            per_device_s = good[0][0] / (good[0][1].devices - len(forecast.devices))
            candidates.append((per_device_s, forecast, [x for _, x in good[:OFFERS_TRIED]]))
    candidates.sort(key=lambda w: (-w[0], w[1].job.id))
    for _, forecast, offers in candidates[:MOST_CONSIDERED]:
        if forecast.job.id not in ctx.moved:
            _rebalance_one(ctx, forecast, offers)


def _surplus_s(ctx: PassContext, forecast: JobForecast, offer: Estimate) -> float:
    """Seconds gained by an offer beyond the threshold of any growth."""
    return ctx.worth.gain_s(forecast, offer) - ctx.costs.thresholds.grow * ctx.costs.cost_s(forecast, offer)


def _rebalance_one(ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate]) -> None:
    best: tuple[float, EvictionPlan] | None = None
    for offer in offers:
        eviction = _search(ctx, forecast, offer)
        if eviction is not None:
            saved_s = _surplus_s(ctx, forecast, offer) - ctx.costs.thresholds.shrink * eviction.lost_s
            if saved_s > 0 and (best is None or saved_s > best[0]):
                best = (saved_s, eviction)
    if best is None:
        return
    eviction = shrink_to_share(ctx, best[1])
    for change in eviction.changes:
        assert change.offer is not None, "nobody is suspended for the growth of another"
        ctx.ledger.take(change.devices)
        ctx.migrate(
            change.victim, change.offer, change.devices, f"gives devices to {forecast.job.spec.name}, which is to grow"
        )
    ctx.ledger.take(eviction.now)
    ctx.moved.add(forecast.job.id)


def _search(ctx: PassContext, forecast: JobForecast, offer: Estimate) -> EvictionPlan | None:
    """Cheapest evictions for an offer, the job's own devices counting as free but going to nobody else."""
    movable = [
        victim for victim in ctx.migratable() if victim is not forecast and victim.job.priority <= forecast.job.priority
    ]
    search = VictimSearch(ctx.ledger, forecast, ctx.unclaimed(movable))
    eviction = as_if_free(
        ctx.ledger,
        forecast,
        lambda: search.make(offer, lambda victim: victim_sizes(ctx, victim, False), ctx.costs.cost_s),
    )
    own = {d.id for d in forecast.devices}
    if eviction is None or not eviction.changes:
        return None
    if any(d.id in own for change in eviction.changes for d in change.devices):
        return None
    more = [d for d in eviction.now if d.id not in own]
    return eviction if ctx.reserved.may_backfill(forecast, offer, more) else None
