"""The reservation within one pass: what may be granted without delaying the job that has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from clusterd.core.allocation.migration_cost import MigrationCosts
from clusterd.core.allocation.rights import may_preempt
from clusterd.core.estimates.availability import AvailabilityForecast, Hold
from clusterd.core.estimates.backfill import Backfill
from clusterd.core.estimates.expected_time import Ends, ends_of_modelled
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, bind
from clusterd.core.performance_table import Estimate
from clusterd.core.queueing.bookings import ends_s
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import Device, JobId, JobKind


@dataclass(slots=True)
class ReservedStart:
    """Reserved start of the first job that cannot start, once there is one in this pass.

    Attributes:
        limits: what others must leave it; None: nobody has been reserved anything.
        is_served: True where devices are being freed for the job with the reservation of earlier passes: it stands, and
            the next blocked job has the limits of this pass.
    """

    costs: MigrationCosts
    availability: AvailabilityForecast
    limits: Backfill | None = None
    job: JobId | None = None
    is_served: bool = False

    def may_backfill(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> bool:
        """True where the job with the reservation starts no later for this grant (backfill)."""
        return self.admits(self.hold_of(forecast, offer, devices))

    def admits(self, hold: Hold) -> bool:
        """True where the job with the reservation starts no later for this grant, or takes it back in time."""
        if self.limits is None or self.gives_way(hold.job):
            return True
        return self.limits.admits(hold, self.yields(hold.job))

    def limited(self, job: Job, ends: Ends, ledger: Ledger) -> Iterator[Ledger]:
        """Free resources without those that the job with the reservation needs where this one still runs."""
        if self.limits is not None:
            yield from self.limits.limited(ledger, ends, self.yields(job))

    def gives_way(self, job: Job) -> bool:
        """True where the job with the reservation takes the devices of `job` by right once all others are free.

        That takes a stop at most, and is worth it where `job` has run for a while by then. A command would begin anew.
        """
        if self.limits is None or self.job is None or job.spec.kind is JobKind.COMMAND:
            return False
        is_preemptible = may_preempt(job, self.costs.view.jobs[self.job]) and not job.spec.guaranteed
        return is_preemptible and self.limits.at_s > self.costs.thresholds.pause_s(self.costs.restart_s(job))

    def yields(self, job: Job) -> bool:
        """True where a queued job would be stopped in time for the promised start: see `owes`."""
        bound = self.limits.bound if self.limits is not None else None
        is_stoppable = job.spec.kind is not JobKind.COMMAND and not job.spec.guaranteed and job.attempt is None
        return (
            bound is not None and is_stoppable and bound.at_s > self.costs.thresholds.pause_s(self.costs.restart_s(job))
        )

    def occupy(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> None:
        """Record a grant of an offer in the forecast and within the limits of the reservation."""
        self.hold(self.hold_of(forecast, offer, devices))

    def hold(self, hold: Hold) -> None:
        """Record a grant in the forecast and within the limits of the reservation."""
        self.availability.hold(hold)
        if self.limits is not None and not self.gives_way(hold.job):
            self.limits.take(hold, self.yields(hold.job))

    def hold_of(self, forecast: JobForecast, offer: Estimate, devices: Sequence[Device]) -> Hold:
        """Resources that a job would hold under an offer."""
        where = bind(forecast.job, offer, devices)
        ends = ends_of_modelled(forecast.job, forecast.left_s(offer), self.costs.view.now_s)
        return Hold(forecast.job, ends, devices, where.booked)


def owes(job: Job, view: View) -> bool:
    """True for a running job that passed the one with a promised start, for which it is stopped if need be.

    It was to end before. Whoever keeps its state and has no guarantee may pass on these terms.
    """
    promise, attempt = view.reservation, job.attempt
    if promise is None or promise.latest_s is None or attempt is None:
        return False
    first = view.jobs[promise.job]
    is_stoppable = job.spec.kind is not JobKind.COMMAND and not job.spec.guaranteed
    return is_stoppable and job.priority <= first.priority and attempt.started_s >= first.queued_s


def held_by(forecast: JobForecast, view: View) -> Hold:
    """Resources that a running job holds."""
    job, now_s = forecast.job, view.now_s
    ends = forecast.ends(view)
    if (left_s := max(ends_s(view.claims, job) - now_s, 0.0)) < inf:  # what it leaves is its booking's until then
        ends = Ends(left_s, left_s, left_s)
    promise = view.reservation
    if promise is not None and promise.latest_s is not None and owes(job, view):
        ends = replace(ends, latest_s=min(ends.latest_s, max(promise.latest_s - now_s, 0.0)))
    attempt = job.attempt
    return Hold(job, ends, forecast.devices, attempt.booked) if attempt else Hold(job, ends, ())
