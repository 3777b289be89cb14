"""Migrations of running jobs off drained hosts, into idle devices, and back to the size that they asked for."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from clusterd.core.allocation.evacuation import must_leave
from clusterd.core.allocation.migration_cost import fits_beside
from clusterd.core.allocation.migration_targets import book, first_that_works, free_for
from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.estimates.can_migrate import can_migrate, is_idle
from clusterd.core.estimates.job_forecast import WORTHWHILE, JobForecast
from clusterd.core.ledger import Ledger, of_ranks
from clusterd.core.performance_table import Estimate, evenly
from clusterd.core.placement.heterogeneous_search import Found, HeterogeneousSearch, as_if_free, shared_by
from clusterd.core.view import Move, View
from clusterd.types import JobId
from clusterd.units import counted, duration

# --- those who must leave -----------------------------------------------------------------------------------------


def evacuate(ctx: PassContext) -> None:
    """Migrate jobs off drained hosts to their fastest offer that fits elsewhere and is no larger than now."""
    for forecast in ctx.running:
        why = must_leave(forecast.job, ctx.view)
        if not why:
            continue
        offers = forecast.curve.upto(len(forecast.devices))
        if forecast.job.pinned is not None:
            offers = tuple(x for x in offers if forecast.now is not None and x.plan == forecast.now.plan)
        found = _or_mixed_elsewhere(ctx.ledger, ctx.mixed_search, forecast, ctx.find_with_own(forecast, offers))
        if found is not None:
            offer, devices = found
            own = {d.id for d in forecast.devices}
            ctx.ledger.take(devices)
            ctx.reserved.occupy(forecast, offer, [d for d in devices if d.id not in own])
            ctx.migrate(forecast, offer, devices, why)


def _or_mixed_elsewhere(
    ledger: Ledger, mixed_search: HeterogeneousSearch | None, forecast: JobForecast, found: Found | None
) -> Found | None:
    """The offer found for an evacuated job, or mixed devices where these are faster."""
    now = forecast.now
    if mixed_search is None:
        return found

    def look() -> Found | None:
        return mixed_search.best(
            forecast,
            len(forecast.devices),
            lambda step_s, _: step_s,
            (1.0 - WORTHWHILE) * found[0].step_time_s if found is not None else float("inf"),
            lambda x: forecast.job.pinned is None or (now is not None and evenly(x.plan) == evenly(now.plan)),
        )

    return as_if_free(ledger, forecast, look) or found


# --- those who grow -----------------------------------------------------------------------------------------------


def scale_up(ctx: PassContext) -> None:
    """Migrate jobs to larger offers on devices that no queued job waits for."""
    candidates: list[tuple[float, JobId, JobForecast, list[Estimate]]] = []
    mixed = _mix_candidates(ctx)
    for forecast in ctx.running:
        if forecast.job.id in ctx.moved or not ctx.can_migrate(forecast) or is_idle(forecast.job):
            continue
        offers = sorted(
            ((ctx.worth.gain_s(forecast, x), x) for x in forecast.curve.upto(ctx.targets.most(forecast))),
            key=lambda item: -item[0],
        )
        good: list[Estimate] = []
        for gain_s, x in offers:
            if _is_now(forecast, x):
                break  # what follows gains less than staying does: only where steps are slower than is believed
            least_s = ctx.costs.thresholds.grow * ctx.costs.cost_s(forecast, x)
            if gain_s > least_s and ctx.costs.within_budget(forecast, x):
                good.append(x)
        gain_s, best = (offers[0][0], good[0]) if good else (0.0, None)
        if not good and forecast.job.id in mixed and (found := _find_mixed(ctx, forecast, 0.0)) is not None:
            gain_s, best = ctx.worth.gain_s(forecast, found[0]), found[0]
        if best is not None:
            more = max(best.devices - len(forecast.devices), 1)
            candidates.append((gain_s / more, forecast.job.id, forecast, good))
    for _, _, forecast, good in sorted(candidates, key=lambda w: (-w[0], w[1])):
        _scale_up_one(ctx, forecast, good, forecast.job.id in mixed)


def _mix_candidates(ctx: PassContext) -> set[JobId]:
    """Jobs with most time left, for which mixed devices are searched."""
    if ctx.mixed_search is None or ctx.ledger.total == 0:
        return set()
    return {
        forecast.job.id
        for forecast in sorted(ctx.running, key=lambda forecast: (-forecast.now_s, forecast.job.id))[
            : ctx.mixed_search.left
        ]
    }


def _find_mixed(ctx: PassContext, forecast: JobForecast, gain_s: float) -> Found | None:
    """Mixed devices for a running job, where these gain more than the offer found; None: there are none."""
    mixed_search, cost_s = ctx.mixed_search, ctx.costs.move_s(forecast.job)
    assert mixed_search is not None
    price = ctx.worth.price(forecast, ctx.costs.thresholds.thrift)
    now_s = forecast.now_s * (1.0 + price * len(forecast.devices))
    least_s = max(gain_s + WORTHWHILE * forecast.now_s, ctx.costs.thresholds.grow * cost_s)

    def look() -> Found | None:
        return mixed_search.best(
            forecast,
            ctx.targets.most_mixed(forecast, ctx.targets.most(forecast)),
            lambda step_s, devices: (forecast.left.seconds(step_s) + cost_s) * (1.0 + price * devices),
            now_s - least_s,
            lambda x: _is_faster(forecast, x) and fits_beside(forecast, x) and ctx.costs.within_budget(forecast, x),
        )

    found = as_if_free(ctx.ledger, forecast, look)
    own = {d.id for d in forecast.devices}
    if found is None or not ctx.reserved.may_backfill(forecast, found[0], [d for d in found[1] if d.id not in own]):
        return None
    return found


def _scale_up_one(ctx: PassContext, forecast: JobForecast, offers: Sequence[Estimate], may_mix: bool) -> None:
    found = ctx.find_with_own(forecast, offers)
    if may_mix:
        found = _find_mixed(ctx, forecast, ctx.worth.gain_s(forecast, found[0]) if found is not None else 0.0) or found
    if found is None:
        return
    offer, devices = found
    own = {d.id for d in forecast.devices}
    more = [d for d in devices if d.id not in own]
    ctx.ledger.take(more)
    ctx.view.quotas.take(forecast.job.spec, len(more))
    ctx.reserved.occupy(forecast, offer, more)
    ctx.targets.grant(forecast, len(devices))
    saved_s, cost_s = forecast.now_s - forecast.left_s(offer), ctx.costs.cost_s(forecast, offer)
    saved = f"saves {duration(saved_s)} of {duration(forecast.now_s)}, for {duration(cost_s)}{shared_by(offer)}"
    ctx.migrate(forecast, offer, devices, saved)


def _is_now(forecast: JobForecast, offer: Estimate) -> bool:
    now = forecast.now
    return now is not None and (offer.plan, offer.shape, offer.by_type) == (now.plan, now.shape, now.by_type)


def _is_faster(forecast: JobForecast, offer: Estimate) -> bool:
    """True where an offer is predicted faster than the current one; a measured slowness would migrate along."""
    return forecast.now is None or offer.step_time_s < forecast.now.step_time_s


# --- those whose speed is not known -----------------------------------------------------------------------------------


def restore_requested_sizes(view: View, waiting: Iterable[int], skip: Container[JobId] = ()) -> list[Move]:
    """Migrations that give idle devices to jobs that hold fewer than they asked for, oldest job first.

    Args:
        waiting: number of devices that each queued job waits for. A job does not grow while one of them could start
            without the devices that the job holds; a wider one waits for the job's end, which growth brings nearer.
        skip: jobs that another allocator handles.
    """
    moves: list[Move] = []
    total = sum(len(h.devices) for h in view.hosts.values() if h.unusable is None)
    needs = [count for count in waiting if count > 0]
    others = [job for job in view.running if job.id not in skip]
    for job in sorted(others, key=lambda j: (-j.priority, j.submitted_s)):
        table = view.performance_tables.get(job.inspection.model)
        if table is not None and table.is_whole:
            continue
        attempt = can_migrate(job, view)
        asked = max(job.spec.resources.devices, 1)
        if attempt is None or len(attempt.ranks) >= asked or is_idle(job):
            continue
        own = of_ranks(view.hosts, attempt)
        if any(count <= total - len(own) for count in needs):
            continue
        free = free_for(job, own, view.free)[: view.quotas.left(job.spec)]
        if not free:
            continue
        requested = job.spec.resources.plan if len(own) + len(free) >= asked else None
        reason = f"{counted(len(free), 'device')} free, and it asked for {asked}"
        move = first_that_works(
            job, [*own, *free], own, min(len(own) + len(free), asked), requested, reason, view.hosts
        )
        if move is not None and len(move.ranks) > len(own):
            book(view.free, move, attempt)
            view.quotas.take(job.spec, len(move.ranks) - len(own))
            moves.append(move)
    return moves
