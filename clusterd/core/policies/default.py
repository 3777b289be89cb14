"""The default pipeline: classify, order, allocate, place."""

from __future__ import annotations

from clusterd.core.allocation import evacuate_by_restart, preempt_for, resize_unmodelled
from clusterd.core.allocation.migration_cost import DEFAULT_THRESHOLDS, MigrationThresholds
from clusterd.core.allocation.pass_context import PassContext
from clusterd.core.allocation.rebalance import rebalance
from clusterd.core.allocation.scale_up import evacuate, scale_up
from clusterd.core.allocation.start_waiting import exchange_devices, start_waiting
from clusterd.core.allocation.target_sizes import by_work, shares
from clusterd.core.allocation.unmodelled import Grant, allocate
from clusterd.core.estimates.can_migrate import is_settled
from clusterd.core.estimates.job_forecast import Curves, JobForecast, forecast_job, take_inventory
from clusterd.core.ledger import Ledger
from clusterd.core.placement.cpu_cores import Cores
from clusterd.core.placement.heterogeneous_search import HeterogeneousEstimates, HeterogeneousSearch
from clusterd.core.queueing.order import order
from clusterd.core.state import Job
from clusterd.core.view import Proposal, Refusal, Start, View
from clusterd.types import JobId, JobKind, Resources

Alike = tuple[Resources, str, bool, int] | None
"""Properties that decide about a command besides the free resources; None: others matter, too."""


class Default:
    """Policy that minimises the sum of completion times of jobs with a performance model.

    Guaranteed jobs run at least as fast as what they asked for. Others are black boxes and get what they ask for, as
    soon as it is there; who does not fit lets smaller ones pass. Curves are remembered between passes, and nothing
    else: they follow from the state.
    """

    name = "default"
    interval_s: float | None = None

    def __init__(self, thresholds: MigrationThresholds = DEFAULT_THRESHOLDS) -> None:
        self.thresholds = thresholds
        self._curves = Curves()
        self._estimates = HeterogeneousEstimates()

    def propose(self, view: View) -> Proposal:
        """Evacuate drained hosts, start or preempt for queued jobs in order, then scale up and rebalance.

        Last the cores, which hold nobody up: they follow the devices.
        """
        there = take_inventory(view)
        known: dict[JobId, JobForecast] = {}
        for job in [*view.queued, *view.running]:
            curve = self._curves.of(job, view, there)
            if curve is not None:
                known[job.id] = forecast_job(job, curve, view)
        running = [known[j.id] for j in view.running if j.id in known and is_settled(j)]
        waiting = [known[j.id] for j in view.queued if j.id in known and j.not_before_s <= view.now_s]
        cores = Cores(view, running)
        proposal = Proposal(moves=evacuate_by_restart.evacuations(view, skip=known))
        ledger = view.free
        total = ledger.total + sum(len(p.devices) for p in running)
        ordered = by_work([*running, *waiting])
        sizes = shares(ordered, total)
        mixed_search = HeterogeneousSearch(self._estimates, view, ledger, there)
        ctx = PassContext(
            view=view,
            ledger=ledger,
            sizes=sizes,
            running=running,
            proposal=proposal,
            thresholds=self.thresholds,
            total=max(total, 1),
            behind={p.job.id: rank for rank, p in enumerate(ordered)},
            leaving=sum(len(preempt_for.leaving(job)) for job in view.running),
            mixed_search=mixed_search if mixed_search.groups else None,
            spare=total - sum(sizes.values()),
        )
        evacuate(ctx)
        black: list[int] = []
        refused: dict[Alike, Refusal] = {}
        for job in order(view, known):
            p = known.get(job.id)
            if p is None or job.not_before_s > view.now_s:
                black += self._start_unmodelled(job, view, ledger, proposal, refused)
            else:
                start_waiting(ctx, p)
        exchange_devices(ctx)
        if not any(black):
            scale_up(ctx)
            rebalance(ctx)
        proposal.moves += resize_unmodelled.growth(view, black, skip={*known, *(move.job for move in proposal.moves)})
        cores.share_out(proposal)
        return proposal

    def _start_unmodelled(
        self, job: Job, view: View, ledger: Ledger, proposal: Proposal, refused: dict[Alike, Refusal]
    ) -> list[int]:
        """Start a job without a performance model as requested; returns the devices that it waits for instead.

        Args:
            refused: in this pass, in which there is only ever less to be had: of thousands alike one is looked at.
        """
        alike = _alike(job, view)
        if (same := refused.get(alike)) is not None:
            proposal.refusals.append(Refusal(job.id, same.reason, same.is_permanent, same.devices))
            return [same.devices]
        answer = allocate(job, view)
        if isinstance(answer, Refusal):
            if alike is not None:
                refused[alike] = answer
            if answer.devices and not proposal.moves:
                proposal.moves += preempt_for.preempt_for(job, view, answer.devices)
            proposal.refusals.append(answer)
            return [answer.devices]
        assert isinstance(answer, Grant)
        where = answer.placement
        view.quotas.take(job.spec.tenant, sum(place.device is not None for place in where.ranks))
        ledger.take_places(where.ranks, where.cores, where.memory_bytes)
        proposal.starts.append(Start(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, answer.reason))
        return []


def _alike(job: Job, view: View) -> Alike:
    if job.spec.kind is not JobKind.COMMAND or job.excluded_hosts or job.not_before_s > view.now_s:
        return None
    return job.spec.resources, job.spec.tenant, job.spec.guaranteed, job.priority
