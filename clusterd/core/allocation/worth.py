"""Worth of an offer to a job and to those behind it: seconds, and the price of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clusterd.core.allocation.migration_cost import MigrationCosts
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.performance_table import Estimate
from clusterd.types import JobId


@dataclass(frozen=True, slots=True)
class Worth:
    """Prices of one pass.

    Attributes:
        behind: number of jobs with more work left, by job.
        total: devices that the pass may grant.
    """

    costs: MigrationCosts
    behind: Mapping[JobId, int]
    total: int

    def burden_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds that an offer costs: the job's own time, and the time its devices could save the jobs behind it."""
        return forecast.left_s(offer) * (1.0 + self.price(forecast, self.costs.thresholds.price) * offer.devices)

    def price(self, forecast: JobForecast, each: float) -> float:
        """Price of a device as a share of the time that it is held; `each`: per job behind this one."""
        return each * self.behind.get(forecast.job.id, 0) / self.total

    def gain_s(self, forecast: JobForecast, offer: Estimate) -> float:
        """Seconds that an offer saves, net of the migration and of the price of further devices."""
        price = self.price(forecast, self.costs.thresholds.thrift)
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
        steps = forecast.job.progress.step + forecast.steps_left
        return self.costs.view.now_s + left_s <= started_s + promised.step_time_s * steps

    def may_move_for_others(self, forecast: JobForecast, offer: Estimate) -> bool:
        """True where moving a job to an offer leaves it its guarantee, and is within the budget of its migrations."""
        return self.costs.within_budget(forecast, offer) and self.keeps_guarantee(
            forecast, self.costs.then_s(forecast, offer)
        )
