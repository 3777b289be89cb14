"""Fourth stage for several jobs that start at once on mixed devices: assignment of devices to jobs.

Each was given its devices in turn, the fastest type first. Their sizes stay; who has devices of which type is a market
(`matching`). Its answer is laid out with the shapes and plans that are known, and taken only if the jobs
then end earlier in all. Who runs already is left where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterd.core.estimates.job_forecast import WORTHWHILE, JobForecast
from clusterd.core.ledger import Ledger, by_type, needs
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.placement.heterogeneous_search import Found, HeterogeneousSearch
from clusterd.core.placement.matching import match
from clusterd.core.view import View
from clusterd.types import Device


@dataclass(slots=True)
class PlannedStart:
    """A job that starts in this pass, with its devices."""

    forecast: JobForecast
    offer: Estimate
    devices: list[Device]
    number: int  # among the proposal's starts


MOST_DEVICES = 128
"""Of the jobs that are assigned together: the market's time grows with the square."""


def assign(
    started: Sequence[PlannedStart], view: View, mixed_search: HeterogeneousSearch, ledger: Ledger
) -> list[Found] | None:
    """Another way to share the devices of jobs that start, in their order; None: none that is known is better.

    Args:
        ledger: any; only its rules are used.
    """
    devices = [device for one in started for device in one.devices]
    kinds = {device.kind for device in devices}
    types = sorted({device.name for device in devices})
    if len(started) < 2 or len(types) < 2 or len(kinds) > 1 or len(devices) > MOST_DEVICES:
        return None
    if len({needs(one.forecast.job, one.offer) for one in started}) > 1:
        return None  # the hosts' cores and memory were counted for them as they are
    performance_tables = [view.performance_tables[one.forecast.job.inspection.model] for one in started]
    rates = np.array(
        [
            [_rate(table, one.offer, device.name) for device in devices]
            for one, table in zip(started, performance_tables, strict=True)
        ]
    )
    if np.any(rates <= 0):
        return None  # of some job nothing is known on some type
    work = np.array(
        [one.forecast.steps_left * table.global_batch for one, table in zip(started, performance_tables, strict=True)]
    )
    owners = match(work, rates, counts=np.array([len(one.devices) for one in started], dtype=np.int64))
    part = ledger.part(devices)
    mixed = HeterogeneousSearch(mixed_search.estimates, view, part, mixed_search.there)
    found: list[Found] = []
    before_s = sum(one.forecast.left_s(one.offer) for one in started)
    after_s = 0.0
    for number, one in enumerate(started):
        limits = {
            name: len(some)
            for name, some in by_type([d for d, owner in zip(devices, owners, strict=True) if owner == number]).items()
        }
        bind = _within(one.forecast, limits, part, mixed)
        if bind is None:
            return None
        part.take(bind[1])
        found.append(bind)
        after_s += one.forecast.left_s(bind[0])
    return found if after_s < (1.0 - WORTHWHILE) * before_s else None


def _within(forecast: JobForecast, limits: dict[str, int], part: Ledger, mixed: HeterogeneousSearch) -> Found | None:
    """The fastest that a job can have with so many devices of each type."""
    best: Found | None = None
    for offer in forecast.curve.upto(sum(limits.values())):
        if offer.devices <= limits.get(offer.device_type, 0):
            devices = part.find(forecast.job, offer)
            if devices is not None:
                best = (offer, devices)
                break
    under = best[0].step_time_s if best is not None else float("inf")
    return mixed.best(forecast, sum(limits.values()), lambda step_s, _: step_s, under, limits=limits) or best


def _rate(table: PerformanceTable, offer: Estimate, name: str) -> float:
    """Samples per second of one device of this type, among about as many as the job has; 0: not known."""
    known = table.by_count.get(name, {})
    if not known:
        return 0.0
    nearest = known[min(known, key=lambda count: (abs(count - offer.devices), count))]
    return table.global_batch / (nearest.step_time_s * nearest.devices)
