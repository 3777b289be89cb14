"""The default pipeline: classify, order, allocate, place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from clusterd.core.allocation.evacuation import evacuations
from clusterd.core.allocation.evict import devices_being_freed
from clusterd.core.allocation.migration_cost import DEFAULT_THRESHOLDS, MigrationCosts, MigrationThresholds
from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.rebalance import rebalance
from clusterd.core.allocation.scale_up import evacuate, restore_requested_sizes, scale_up
from clusterd.core.allocation.start_booked import start_booked
from clusterd.core.allocation.start_waiting import exchange_devices, start_waiting
from clusterd.core.allocation.suspend import next_settled_s, take_handovers
from clusterd.core.allocation.target_sizes import TargetSizes, by_work, shares
from clusterd.core.allocation.worth import Worth
from clusterd.core.estimates.can_migrate import is_settled
from clusterd.core.estimates.expected_time import limit_left_s
from clusterd.core.estimates.job_forecast import Curves, JobForecast, forecast_job, take_inventory
from clusterd.core.estimates.request_forecast import RequestCurves, forecast_request
from clusterd.core.placement.cpu_cores import Cores
from clusterd.core.placement.heterogeneous_search import HeterogeneousEstimates, HeterogeneousSearch
from clusterd.core.queue_order import difference, places
from clusterd.core.queueing.order import order
from clusterd.core.state import Job
from clusterd.core.view import Proposal, View
from clusterd.types import Device, JobId

QUEUE_ROUND_S = 30.0
"""Seconds between two passes while a job waits for devices and nothing happens: rights and pauses depend on time."""


class _Forecasts(dict[JobId, JobForecast]):
    """Forecasts by job; those of jobs without a performance model are made when they are asked for first."""

    def __init__(self, known: Mapping[JobId, JobForecast], make: Callable[[JobId], JobForecast]) -> None:
        super().__init__(known)
        self._make = make

    def __missing__(self, job: JobId) -> JobForecast:
        found = self[job] = self._make(job)
        return found


def _start_before_claims(
    ctx: PassContext, job: Job, forecasts: Mapping[JobId, JobForecast], handovers: Mapping[JobId, list[Device]]
) -> None:
    """Start a queued job, or record what it waits for, without devices that are claimed before it would end."""
    if not ctx.view.calendar:
        start_waiting(ctx, job, forecasts, handovers)
        return
    forecast = forecasts[job.id]
    run_s = forecast.ends(ctx.view).foreseen_s
    if forecast.has_model:
        run_s = min(max(forecast.left_s(offer) for offer in forecast.curve.offers), limit_left_s(job, ctx.view.now_s))
    withheld = ctx.view.calendar.to_withhold([*ctx.ledger.all_devices()], run_s)
    ctx.ledger.take(withheld)
    ctx.ledger.withhold(ctx.view.calendar.kept(0.0, run_s))
    ctx.availability.run_s = run_s
    start_waiting(ctx, job, forecasts, handovers)
    ctx.ledger.put(withheld)


class Default:
    """Policy that minimises the sum of completion times of jobs with a performance model.

    Guaranteed jobs run at least as fast as what they asked for. Jobs without a model get what they ask for. The first
    job that cannot start has a reservation, which nobody delays; devices beyond a request are on loan. Curves are
    remembered between passes, and nothing else: they follow from the state.
    """

    name = "default"
    interval_s: float | None = None

    def __init__(self, thresholds: MigrationThresholds = DEFAULT_THRESHOLDS) -> None:
        self.thresholds = thresholds
        self._curves = Curves()
        self._requests = RequestCurves()
        self._estimates = HeterogeneousEstimates()

    def __deepcopy__(self, memo: object) -> Default:
        """A policy that would decide the same, without what this one remembers to be faster."""
        return Default(self.thresholds)

    def propose(self, view: View) -> Proposal:
        """Evacuate drained hosts, take handovers, start queued jobs in order or free devices for them, then scale up.

        CPU cores come last: they follow the devices, and no job waits for cores that another only borrows.
        """
        proposal = Proposal()
        there = take_inventory(view)
        known: dict[JobId, JobForecast] = {}
        for job in [*view.queued, *view.running]:
            is_due = job.attempt is not None or job.not_before_s <= view.now_s
            curve = self._curves.of(job, view, there) if is_due else None
            if curve is not None:
                known[job.id] = forecast_job(job, curve, view)
        forecasts = _Forecasts(known, lambda job: forecast_request(view.jobs[job], view, there, self._requests))
        running = [known[j.id] for j in view.running if j.id in known and is_settled(j)]
        waiting = [known[j.id] for j in view.queued if j.id in known]
        cores = Cores(view, running)
        start_booked(view, proposal)
        proposal.moves = evacuations(view, skip=known)
        ledger = view.free
        total = ledger.total + sum(len(forecast.devices) for forecast in running)
        ordered = by_work([*running, *waiting])
        sizes = shares(ordered, total)
        mixed_search = HeterogeneousSearch(self._estimates, view, ledger, there)
        behind = {forecast.job.id: rank for rank, forecast in enumerate(ordered)}
        ctx = PassContext(
            view,
            ledger,
            proposal,
            running,
            holding=[forecasts[job.id] for job in view.running],
            targets=TargetSizes(sizes, total - sum(sizes.values()), view.quotas),
            worth=Worth(MigrationCosts(view, self.thresholds), behind, max(total, 1)),
            coming=devices_being_freed(view),
            mixed_search=mixed_search if mixed_search.groups else None,
        )
        evacuate(ctx)
        handovers = take_handovers(ctx)
        keys = order(view, forecasts, handovers)
        proposal.order = difference(view.order, places(keys))
        for job_id in keys:
            _start_before_claims(ctx, view.jobs[job_id], forecasts, handovers)
        if ctx.reserved.limits is None and view.reservation is not None and not ctx.reserved.is_served:
            proposal.ends_reservation = True
        if view.calendar:  # nobody else's end is known: what is to be claimed goes to nobody
            ledger.take(view.calendar.to_withhold([*ledger.all_devices()], inf))
            ledger.withhold(view.calendar.kept(0.0, inf))
            ctx.availability.run_s = inf
        else:
            exchange_devices(ctx)
        short = [refusal.devices for refusal in proposal.refusals if refusal.job not in known]
        if not any(short):
            scale_up(ctx)
            rebalance(ctx)
        proposal.moves += restore_requested_sizes(view, short, skip={*known, *(move.job for move in proposal.moves)})
        ledger.withhold(view.calendar.kept(0.0, 0.0))  # cores are given back when a booking begins
        cores.share_out(proposal)
        if any(refusal.is_shortage for refusal in proposal.refusals):
            again_s = min(QUEUE_ROUND_S, next_settled_s(ctx))
            if view.round_s is None or view.round_s > view.now_s + again_s:
                proposal.again_s = again_s
        return proposal
