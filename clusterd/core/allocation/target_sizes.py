"""Third stage: target size of each job, as if migrations were free.

A device goes where it does most for the sum of completion times. Speed counts in work done per second, in the device
seconds that the work would take where it takes fewest, times how many jobs will still be there after this one: whoever
is quicker through takes precedence by as many as wait behind it. For jobs alike but in size this is the optimum for
speed-up curves n^p as p nears 1 (Berg, Vesilo and Harchol-Balter, heSRPT, 2020), and it depends on the order of sizes
alone, which predictions get right more often than sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.types import JobId


def by_work(forecasts: Sequence[JobForecast]) -> list[JobForecast]:
    """Jobs sorted by remaining work, most first."""
    return sorted(forecasts, key=lambda p: (-p.work_s, p.job.submitted_s, p.job.id))


def shares(ordered: Sequence[JobForecast], devices: int) -> dict[JobId, int]:
    """Target number of devices of each job, at most so many in all; 0: the job should wait.

    Args:
        ordered: by work, most first.
    """
    weight = {p.job.id: float(rank) for rank, p in enumerate(ordered, 1)}
    # Beyond this many nobody can get any: the others need not be looked at.
    contenders = ordered[-max(2 * devices, 64) :]
    by_id = {p.job.id: p for p in contenders}
    size = dict.fromkeys((p.job.id for p in ordered), 0)
    left = devices
    heap: list[tuple[float, JobId, int]] = []

    def push(job: JobId) -> None:
        curve = by_id[job].curve
        first = curve.first_step if not size[job] else None
        step = first if first is not None and first[1] <= left else curve.best_step(size[job], left)
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
