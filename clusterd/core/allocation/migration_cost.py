"""Cost of migrations in seconds, and the thresholds that a migration must pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.estimates.first_fit import USABLE_SHARE
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import HostState

MOVE_S = 30.0
"""Assumed downtime of a live migration where none was made yet."""

RESTART_S = 60.0
"""Assumed downtime of a migration through host memory: ranks exit, new ones start and build their model."""


@dataclass(frozen=True, slots=True)
class MigrationThresholds:
    """Thresholds that a migration must pass."""

    grow: float = 2.0  # gain of a growth beyond its cost, in multiples of that cost
    shrink: float = 2.0  # seconds saved to a waiting job per second that others lose
    budget: float = 0.3  # share of a job's life that migrations may cost
    settle: float = 2.0  # pause between two migrations of a job, in multiples of their cost
    settle_s: float = 10.0  # ... and at least this
    price: float = 1.0  # of a device-second, in seconds of delay per job that could use it
    thrift: float = 0.3  # likewise, while no job waits
    failed_s: float = 30.0  # pause after a failed migration; longer after several in a row

    def pause_s(self, cost_s: float) -> float:
        """Seconds that a job runs at least between two changes of this cost."""
        return max(self.settle * cost_s, self.settle_s)


DEFAULT_THRESHOLDS = MigrationThresholds()


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """Migration costs of the jobs of one view, and whether they may migrate now."""

    view: View
    thresholds: MigrationThresholds

    def move_s(self, job: Job) -> float:
        """Seconds of a live migration: the average of the job's model, else the largest of any model, else a guess."""
        return _of_model(job, self.view.move_costs_s, MOVE_S)

    def cost_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds of migrating the job to an offer: live, or through host memory where both sides do not fit."""
        if fits_beside(forecast, offer):
            return self.move_s(forecast.job)
        return self.restart_s(forecast.job)

    def then_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds until the job's end if it migrates to an offer now."""
        return self.cost_s(forecast, offer) + forecast.left_s(offer)

    def restart_s(self, job: Job) -> float:
        """Seconds of stopping and starting again: the average of the job's model, else the largest of any, a guess."""
        return _of_model(job, self.view.restart_costs_s, RESTART_S)

    def may_move(self, forecast: JobForecast) -> bool:
        """True for a job that is not pinned, did not migrate a moment ago, and whose hosts are up."""
        job = forecast.job
        if job.pinned is not None or job.progress.step < 1 or forecast.now is None:
            return False
        if any(self.view.hosts[d.host].state is not HostState.UP for d in forecast.devices):
            return False
        last = job.last_plan_change
        if last is None:
            return True
        since_s = self.view.now_s - (last.ended_s if last.ended_s is not None else last.started_s)
        settle_s = self.thresholds.pause_s(self.move_s(job))
        return since_s >= (job.back_off_s(self.thresholds.failed_s) if last.failure else settle_s)

    def within_budget(self, forecast: JobForecast, offer: Estimate) -> bool:
        """True where all its migrations, this one included, stay within a share of its life."""
        made = sum(not m.failure for m in forecast.job.plan_changes)
        life_s = executed_s(forecast.job, self.view.now_s) + forecast.left_s(offer)
        return made * self.move_s(forecast.job) + self.cost_s(forecast, offer) <= self.thresholds.budget * life_s


def fits_beside(forecast: JobForecast, offer: Estimate) -> bool:
    """True where target ranks fit beside the source ranks; a simulated job's memory is unknown and counts as 0."""
    if not forecast.devices:
        return True
    there = forecast.now.device_bytes if forecast.now is not None else 0
    return not forecast.job.failures.needs_exclusive_memory and there + offer.device_bytes <= USABLE_SHARE * min(
        d.memory_bytes for d in forecast.devices
    )


def _of_model(job: Job, known: Mapping[str, float], guess_s: float) -> float:
    return known[job.inspection.model] if job.inspection.model in known else max(known.values(), default=guess_s)
