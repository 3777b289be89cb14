"""State of one allocation pass: free devices, thresholds, grants so far, and the price of seconds and devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from clusterd.core.allocation.migration_cost import DEFAULT_THRESHOLDS, MigrationCosts, MigrationThresholds, fits_beside
from clusterd.core.allocation.rights import may_preempt
from clusterd.core.estimates.availability import AvailabilityForecast, Hold
from clusterd.core.estimates.backfill import Backfill
from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.estimates.expected_time import Ends, ends_of_modelled, ends_of_request
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, bind, per_host
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.assign import PlannedStart
from clusterd.core.placement.heterogeneous_search import Found, HeterogeneousSearch, as_if_free
from clusterd.core.state import Job
from clusterd.core.view import Move, Proposal, Refusal, View
from clusterd.types import Device, JobId, JobKind


@dataclass
class PassContext:
    """One pass over all jobs; the functions of this package read and change it.

    Attributes:
        running: settled jobs with a performance model.
        holding: all running jobs, those without a performance model and those in the middle of something included.
        coming: devices that migrations and stops under way will free, and that nobody waits for yet.
        backfill: limits of the reservation, once a queued job has one in this pass.
        is_served: True where devices are being freed for the job with the reservation of earlier passes: it stands, and
            the next blocked job has the limits of this pass.
        refused: refusals by what alike requests have in common: of thousands alike one is looked at.
    """

    view: View
    ledger: Ledger
    sizes: dict[JobId, int]
    running: Sequence[JobForecast]
    proposal: Proposal
    thresholds: MigrationThresholds = DEFAULT_THRESHOLDS
    total: int = 1  # devices that this pass may grant
    behind: Mapping[JobId, int] = field(default_factory=dict)  # jobs with more work left
    holding: Sequence[JobForecast] = ()
    coming: list[Device] = field(default_factory=list)
    mixed_search: HeterogeneousSearch | None = None  # where devices of several types can serve one job
    spare: int = 0  # devices beyond all target sizes
    started: list[PlannedStart] = field(default_factory=list)  # in the order of the proposal's starts
    availability: AvailabilityForecast = field(init=False)
    costs: MigrationCosts = field(init=False)
    backfill: Backfill | None = None
    reserved_for: JobId | None = None
    is_served: bool = False
    refused: dict[object, Refusal] = field(default_factory=dict)
    suspendable: dict[JobId, float] | None = None  # see `allocation.suspend`; None: nobody has asked
    considered: int = 0
    moved: set[JobId] = field(default_factory=set)
    _migratable: list[JobForecast] = field(default_factory=list)
    _checked_at: int = -1

    @cached_property
    def lowest_right(self) -> Job | None:
        """The running job with a performance model that more jobs may preempt than any other; None: none runs."""
        jobs = (forecast.job for forecast in self.running)
        return min(jobs, key=lambda job: (job.priority, job.spec.guaranteed), default=None)

    def __post_init__(self) -> None:
        holds = [self._held(forecast) for forecast in self.holding]
        self.availability = AvailabilityForecast(self.ledger, holds, self.view.calendar)
        self.costs = MigrationCosts(self.view, self.thresholds)

    # --- what it is worth ---------------------------------------------------------------------------------------------

    def burden_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds that an offer costs: the job's own time, and the time its devices could save the jobs behind it."""
        return forecast.left_s(offer) * (1.0 + self.price(forecast, self.thresholds.price) * offer.devices)

    def price(self, forecast: JobForecast, each: float) -> float:
        """Price of a device as a share of the time that it is held; `each`: per job behind this one."""
        return each * self.behind.get(forecast.job.id, 0) / self.total

    def max_devices(self, forecast: JobForecast) -> int:
        may = len(forecast.devices) + self.view.quotas.left(forecast.job.spec)
        return min(max(self.sizes.get(forecast.job.id, 0), 1), may)

    def gain_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds that an offer saves, net of the migration and of the price of further devices."""
        price = self.price(forecast, self.thresholds.thrift)
        then_s = self.costs.then_s(forecast, offer) * (1.0 + price * offer.devices)
        return forecast.now_s * (1.0 + price * len(forecast.devices)) - then_s

    def keeps_guarantee(self, forecast: JobForecast, left_s: float) -> bool:
        """True where a running job that needs `left_s` more seconds, standstill included, ends as it was guaranteed.

        A guarantee is a deadline: as long after the first start as the requested plan would take. So every standstill
        counts against it, and what a job was faster counts for it.
        """
        promised, started_s = forecast.curve.promised, forecast.job.started_s
        if promised is None or started_s is None:  # all its offers have the devices that it asked for
            return True
        return self.view.now_s + left_s <= started_s + promised.step_time_s * (
            forecast.job.progress.step + forecast.steps_left
        )

    def may_move_for_others(self, forecast: JobForecast, offer: Estimate) -> bool:
        """True where moving a job to an offer leaves it its guarantee, and is within the budget of its migrations."""
        return self.costs.within_budget(forecast, offer) and self.keeps_guarantee(
            forecast, self.costs.then_s(forecast, offer)
        )

    def max_mixed_devices(self, forecast: JobForecast, most: int) -> int:
        """Largest number of mixed devices: beyond one type's, only those outside every job's target size."""
        size = self.sizes.get(forecast.job.id, 0)
        more = max(self.spare, 0) if size >= max(forecast.curve.points) else 0
        return min(max(most, size + more), len(forecast.devices) + self.view.quotas.left(forecast.job.spec))

    # --- books and moves ----------------------------------------------------------------------------------------------

    def may_backfill(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> bool:
        """True where the job with the reservation starts no later for this grant (backfill)."""
        return self.admits(self.hold_of(forecast, offer, devices))

    def admits(self, hold: Hold) -> bool:
        """True where the job with the reservation starts no later for this grant, or takes it back in time."""
        if self.backfill is None or self.gives_way(hold.job):
            return True
        return self.backfill.admits(hold, self.yields(hold.job))

    def limited(self, job: Job, ends: Ends) -> Iterator[Ledger]:
        """Free resources without those that the job with the reservation needs where this one still runs."""
        if self.backfill is not None:
            yield from self.backfill.limited(self.ledger, ends, self.yields(job))

    def gives_way(self, job: Job) -> bool:
        """True where the job with the reservation takes the devices of `job` by right once all others are free.

        That takes a stop at most, and is worth it where `job` has run for a while by then. A command would begin anew.
        """
        if self.backfill is None or self.reserved_for is None or job.spec.kind is JobKind.COMMAND:
            return False
        is_preemptible = may_preempt(job, self.view.jobs[self.reserved_for]) and not job.spec.guaranteed
        return is_preemptible and self.backfill.at_s > self.thresholds.pause_s(self.costs.restart_s(job))

    def yields(self, job: Job) -> bool:
        """True where a queued job would be stopped in time for the promised start: see `owes`."""
        bound = self.backfill.bound if self.backfill is not None else None
        is_stoppable = job.spec.kind is not JobKind.COMMAND and not job.spec.guaranteed and job.attempt is None
        return bound is not None and is_stoppable and bound.at_s > self.thresholds.pause_s(self.costs.restart_s(job))

    def owes(self, job: Job) -> bool:
        """True for a running job that passed the one with a promised start, for which it is stopped if need be.

        It was to end before. Whoever keeps its state and has no guarantee may pass on these terms.
        """
        promise, attempt = self.view.reservation, job.attempt
        if promise is None or promise.latest_s is None or attempt is None:
            return False
        first = self.view.jobs[promise.job]
        is_stoppable = job.spec.kind is not JobKind.COMMAND and not job.spec.guaranteed
        return is_stoppable and job.priority <= first.priority and attempt.started_s >= first.queued_s

    def occupy(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> None:
        """Record a grant of an offer in the forecast and within the limits of the reservation."""
        self.hold(self.hold_of(forecast, offer, devices))

    def hold(self, hold: Hold) -> None:
        """Record a grant in the forecast and within the limits of the reservation."""
        self.availability.hold(hold)
        if self.backfill is not None and not self.gives_way(hold.job):
            self.backfill.take(hold, self.yields(hold.job))

    def hold_of(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> Hold:
        """Resources that a job would hold under an offer."""
        where = bind(forecast.job, offer, devices)
        ends = ends_of_modelled(forecast.job, forecast.left_s(offer), self.view.now_s)
        return Hold(forecast.job, ends, devices, where.booked)

    def _held(self, forecast: JobForecast) -> Hold:
        """Resources that a running job holds."""
        job, now_s = forecast.job, self.view.now_s
        if not forecast.has_model:
            ends = ends_of_request(job, self.view.run_times, now_s)
        else:
            ends = ends_of_modelled(job, forecast.now_s, now_s)
        promise = self.view.reservation
        if promise is not None and promise.latest_s is not None and self.owes(job):
            ends = replace(ends, latest_s=min(ends.latest_s, max(promise.latest_s - now_s, 0.0)))
        attempt = job.attempt
        return Hold(job, ends, forecast.devices, attempt.booked) if attempt else Hold(job, ends, ())

    def find_with_own(self, forecast: JobForecast, offers: Sequence[Estimate]) -> Found | None:
        """First of these offers that fits, the running job's own devices counting as free; None: none fits."""
        own = {d.id for d in forecast.devices}

        def look() -> Found | None:
            for offer in offers:
                devices = self.ledger.find(forecast.job, offer, per_host(forecast.devices), own)
                if devices is not None and self.may_backfill(forecast, offer, [d for d in devices if d.id not in own]):
                    return offer, devices
            return None

        return as_if_free(self.ledger, forecast, look)

    def migrate(
        self, forecast: JobForecast, offer: Estimate, devices: list[Device], why: str, may_restart: bool = False
    ) -> None:
        where = bind(forecast.job, offer, devices)
        self.moved.add(forecast.job.id)
        reason, crowded = f"{offer.plan}: {why}", may_restart or not fits_beside(forecast, offer)
        self.proposal.moves.append(
            Move(forecast.job.id, offer.plan, where.ranks, where.booked, reason, may_restart=crowded)
        )

    def can_migrate(self, forecast: JobForecast) -> bool:
        return forecast.job.id not in self.moved and self.costs.may_move(forecast)

    def unclaimed(self, victims: Iterable[JobForecast]) -> list[JobForecast]:
        """Those of the running jobs whose devices the queued one could use to its end: no claim begins before."""
        return [
            victim for victim in victims if not self.view.calendar.to_withhold(victim.devices, self.availability.run_s)
        ]

    def able_to_give(self) -> list[JobForecast]:
        """Running jobs that may give devices by right: without the long pauses of migrations that are to pay."""
        return [
            victim
            for victim in self.holding
            if victim.job.id not in self.moved and can_migrate(victim.job, self.view) is not None
        ]

    def migratable(self) -> list[JobForecast]:
        """Running jobs that may migrate now; cached until one migrates, as every waiting job asks."""
        if self._checked_at != len(self.moved):
            self._checked_at = len(self.moved)
            self._migratable = [victim for victim in self.running if self.can_migrate(victim)]
        return self._migratable
