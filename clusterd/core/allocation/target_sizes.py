"""Third stage: target size of each job, as if migrations were free.

A device goes where it does most for the sum of completion times. Speed counts in work done per second, in the device
seconds that the work would take where it takes fewest, times how many jobs will still be there after this one: whoever
is quicker through takes precedence by as many as wait behind it. For jobs alike but in size this is the optimum for
speed-up curves n^p as p nears 1 (Berg, Vesilo and Harchol-Balter, heSRPT, 2020), and it depends on the order of sizes
alone, which predictions get right more often than sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterd.core.estimates.job_forecast import Curve, JobForecast
from clusterd.core.fair_share import Quotas
from clusterd.types import JobId


@dataclass(slots=True)
class TargetSizes:
    """Target size of each job, and the devices beyond all of them."""

    by_job: Mapping[JobId, int]
    spare: int
    quotas: Quotas

    def of(self, forecast: JobForecast) -> int:
        """Target size of a job; 0: it should wait."""
        return self.by_job.get(forecast.job.id, 0)

    def most(self, forecast: JobForecast) -> int:
        """Most devices of a job: its target size, within its quota."""
        return min(max(self.of(forecast), 1), self._allowed(forecast))

    def most_mixed(self, forecast: JobForecast, most: int) -> int:
        """Most devices of several types: beyond one type's, only those outside every job's target size."""
        size = self.of(forecast)
        more = max(self.spare, 0) if size >= max(forecast.curve.points) else 0
        return min(max(most, size + more), self._allowed(forecast))

    def grant(self, forecast: JobForecast, devices: int) -> None:
        """Count the devices that a job gets beyond its target size and those that it has."""
        self.spare -= max(devices - max(self.of(forecast), len(forecast.devices)), 0)

    def _allowed(self, forecast: JobForecast) -> int:
        return len(forecast.devices) + self.quotas.left(forecast.job.spec)


def by_work(forecasts: Sequence[JobForecast]) -> list[JobForecast]:
    """Jobs sorted by remaining work, most first."""
    return sorted(forecasts, key=lambda forecast: (-forecast.work_s, forecast.job.submitted_s, forecast.job.id))


def shares(ordered: Sequence[JobForecast], devices: int) -> dict[JobId, int]:
    """Target number of devices of each job, at most so many in all; 0: the job should wait.

    Args:
        ordered: by work, most first.
    """
    weight = {forecast.job.id: float(rank) for rank, forecast in enumerate(ordered, 1)}
    # Beyond this many nobody can get any: the others need not be looked at.
    contenders = ordered[-max(2 * devices, 64) :]
    by_id = {forecast.job.id: forecast for forecast in contenders}
    size = dict.fromkeys((forecast.job.id for forecast in ordered), 0)
    left = devices
    heap: list[tuple[float, JobId, int]] = []
    first: dict[int, tuple[float, int] | None] = {}  # steps from nothing by curve: many jobs share one

    def push(job: JobId) -> None:
        curve = by_id[job].curve
        if size[job]:
            step = _best_step(curve, size[job], left)
        else:
            if id(curve) not in first:
                first[id(curve)] = _best_step(curve, 0, devices)
            step = first[id(curve)]
            if step is not None and step[1] > left:
                step = _best_step(curve, 0, left)
        if step is not None:
            heapq.heappush(heap, (-step[0] * weight[job], job, step[1]))

    for job in by_id:
        push(job)
    while heap and left > 0:
        _, job, to = heapq.heappop(heap)
        if to - size[job] > left:
            push(job)  # a smaller step may still fit
            continue
        left -= to - size[job]
        size[job] = to
        push(job)
    return size


def _best_step(curve: Curve, size: int, left: int) -> tuple[float, int] | None:
    """Next size with the most progress per further device, with that progress; None: no size is faster."""
    speed = curve.effort_s / curve.points[size].step_time_s if size else 0.0
    best: tuple[float, int] | None = None
    for count, offer in curve.points.items():
        if size < count <= size + left:
            gain = (curve.effort_s / offer.step_time_s - speed) / (count - size)
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, count)
    return best
