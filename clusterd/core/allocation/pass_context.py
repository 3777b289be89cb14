"""One allocation pass: free devices, what is proposed so far, and the values that its stages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from clusterd.core.allocation.migration_cost import MigrationCosts, fits_beside
from clusterd.core.allocation.reserved_start import ReservedStart, held_by
from clusterd.core.allocation.rights import on_loan
from clusterd.core.allocation.target_sizes import TargetSizes
from clusterd.core.allocation.worth import Worth
from clusterd.core.estimates.availability import AvailabilityForecast
from clusterd.core.estimates.can_migrate import can_migrate
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, bind, per_host
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.assign import PlannedStart
from clusterd.core.placement.heterogeneous_search import Found, HeterogeneousSearch, as_if_free
from clusterd.core.state import Job
from clusterd.core.view import Move, Proposal, Refusal, View
from clusterd.types import Device, JobId


@dataclass
class PassContext:
    """One pass over all jobs; the functions of this package read and change it.

    Attributes:
        running: settled jobs with a performance model.
        holding: all running jobs, those without a performance model and those in the middle of something included.
        coming: devices that migrations and stops under way will free, and that nobody waits for yet.
        mixed_search: where devices of several types can serve one job.
        started: in the order of the proposal's starts.
        refused: refusals by what alike requests have in common: of thousands alike one is looked at.
        suspendable: see `allocation.suspend`; None: nobody has asked.
        considered: queued jobs with a performance model that were looked at.
    """

    view: View
    ledger: Ledger
    proposal: Proposal
    running: Sequence[JobForecast]
    holding: Sequence[JobForecast]
    targets: TargetSizes
    worth: Worth
    coming: list[Device]
    mixed_search: HeterogeneousSearch | None
    started: list[PlannedStart] = field(default_factory=list)
    refused: dict[object, Refusal] = field(default_factory=dict)
    suspendable: dict[JobId, float] | None = None
    considered: int = 0
    moved: set[JobId] = field(default_factory=set)
    availability: AvailabilityForecast = field(init=False)
    reserved: ReservedStart = field(init=False)
    _able_to_give: tuple[int, Sequence[JobForecast]] = (-1, ())  # those of a pass with so many moves
    _migratable: tuple[int, Sequence[JobForecast]] = (-1, ())  # likewise

    def __post_init__(self) -> None:
        holds = [held_by(forecast, self.view) for forecast in self.holding]
        self.availability = AvailabilityForecast(self.ledger, holds, self.view.calendar)
        self.reserved = ReservedStart(self.costs, self.availability)

    @property
    def costs(self) -> MigrationCosts:
        """Costs of migrations."""
        return self.worth.costs

    @cached_property
    def lowest_right(self) -> Job | None:
        """The running job with a performance model that more jobs may preempt than any other; None: none runs."""
        return _lowest(self.running)

    @cached_property
    def lowest_holder(self) -> Job | None:
        """The same of all running jobs."""
        return _lowest(self.holding)

    def has_loans(self) -> bool:
        """True where a job that may give devices by right has some beyond its request."""
        return any(on_loan(victim.job, len(victim.devices)) for victim in self.able_to_give())

    def find_with_own(self, forecast: JobForecast, offers: Sequence[Estimate]) -> Found | None:
        """First of these offers that fits, the running job's own devices counting as free; None: none fits."""
        own = {d.id for d in forecast.devices}

        def look() -> Found | None:
            for offer in offers:
                devices = self.ledger.find(forecast.job, offer, per_host(forecast.devices), own)
                more = [d for d in devices or () if d.id not in own]
                if devices is not None and self.reserved.may_backfill(forecast, offer, more):
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

    def able_to_give(self) -> Sequence[JobForecast]:
        """Running jobs that may give devices by right: without the long pauses of migrations that are to pay.

        Cached until one migrates, as every waiting job asks.
        """
        if self._able_to_give[0] != len(self.moved):
            able = [
                victim
                for victim in self.holding
                if victim.job.id not in self.moved and can_migrate(victim.job, self.view) is not None
            ]
            self._able_to_give = len(self.moved), able
        return self._able_to_give[1]

    def migratable(self) -> Sequence[JobForecast]:
        """Running jobs that may migrate now; cached likewise."""
        if self._migratable[0] != len(self.moved):
            self._migratable = len(self.moved), [victim for victim in self.running if self.can_migrate(victim)]
        return self._migratable[1]


def _lowest(forecasts: Iterable[JobForecast]) -> Job | None:
    jobs = (forecast.job for forecast in forecasts)
    return min(jobs, key=lambda job: (job.priority, job.spec.guaranteed), default=None)
