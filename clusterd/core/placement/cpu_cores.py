"""CPU cores per device: every rank gets its minimum, the rest goes where it saves most step time.

Cores change hands without a rank being moved: a word to the ranks changes how many threads they use. So nobody waits
for cores that others hold beyond their least; these give them back in the same pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterd.core.estimates.heterogeneous_speed import believed
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import held, least_cores, per_host
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Attempt, Job
from clusterd.core.view import CoreGrant, Proposal, View
from clusterd.types import Device, HostId, JobId

KEEP = 1.25
"""Times what they bring that cores count for with the one who has them: two alike do not take them from each other."""


@dataclass(slots=True)
class _Holder:
    """A job with ranks on devices that have no cores of their own."""

    job: Job
    estimate: Estimate
    counts: dict[HostId, int]  # devices on each host
    least: int  # cores beside each device
    now: int
    granted: int

    def step_s(self, each: int) -> float:
        """With so many cores beside each device."""
        times = self.estimate.core_times
        return next((t for cores, t in reversed(times) if cores <= each), times[0][1])

    def cores(self, each: int) -> dict[HostId, int]:
        """Of each host."""
        return {host: each * count for host, count in self.counts.items()}


class Cores:
    """The cores of one pass: lent to who starts, and shared out again when all devices are given."""

    def __init__(self, view: View, running: Iterable[JobForecast]) -> None:
        """Lend out what running jobs hold beyond their minimum: it counts as free from here on."""
        self._view = view
        self._holders: list[_Holder] = []
        for forecast in running:
            attempt = forecast.job.attempt
            if attempt is None or forecast.job.trials.is_running:
                continue
            holder = _holder(forecast.job, forecast.now, forecast.devices, attempt.booked.cores)
            if holder is not None and all(host in view.free.hosts for host in attempt.hosts):
                self._holders.append(holder)
                for host, count in holder.counts.items():
                    view.free.cores[host] += (holder.now - holder.least) * count

    def share_out(self, proposal: Proposal) -> None:
        """Grants to those who run, and cores of those who start, by what a core brings."""
        spare = dict(self._view.free.cores)
        moved = {move.job for move in proposal.moves}
        lent = {h.job.id: h.cores(h.least) for h in self._holders}
        for move in proposal.moves:
            for host, count in move.booked.cores.items():
                if host in spare:
                    attempt = self._view.jobs[move.job].attempt
                    mine = lent.get(move.job) or (attempt.booked.cores if attempt is not None else {})
                    spare[host] -= max(count - mine.get(host, 0), 0)
        starting = self._starting(proposal)
        _climb([*(h for h in self._holders if h.job.id not in moved), *starting.values()], spare)
        for holder in self._holders:
            if holder.granted != holder.now:
                proposal.grants.append(_grant(holder))
        for number, holder in starting.items():
            start = proposal.starts[number]
            booked = replace(start.booked, cores=holder.cores(holder.granted))
            proposal.starts[number] = replace(start, booked=booked)

    def _starting(self, proposal: Proposal) -> dict[int, _Holder]:
        found: dict[int, _Holder] = {}
        for number, start in enumerate(proposal.starts):
            job = self._view.jobs[start.job]
            table = self._view.performance_tables.get(job.inspection.model) if job.inspection.model else None
            if start.plan is None or table is None or not table.cores_matter:
                continue
            devices = held(self._view.hosts, ((place.host, place.device) for place in start.ranks))
            estimate = believed(table, start.plan, devices)
            holder = _holder(job, estimate, devices, start.booked.cores)
            if holder is not None:
                found[number] = holder
        return found


def cores_each(attempt: Attempt, devices: Sequence[Device]) -> int:
    """Cores that an attempt has beside each of its devices."""
    return _each(attempt.booked.cores, per_host(devices))


def _each(cores: Mapping[HostId, int], counts: Mapping[HostId, int]) -> int:
    return min((cores.get(host, 0) // count for host, count in counts.items()), default=0)


def _holder(
    job: Job, estimate: Estimate | None, devices: Sequence[Device], cores: Mapping[HostId, int]
) -> _Holder | None:
    """None: cores make no difference to it, or its devices have their own."""
    if estimate is None or not estimate.core_times:
        return None
    counts, least = per_host(devices), least_cores(job, estimate)
    return _Holder(job, estimate, counts, least, _each(cores, counts), least)


def _climb(holders: Sequence[_Holder], spare: dict[HostId, int]) -> None:
    """Core by core to whom it brings most, as far as they go."""
    heap: list[tuple[int, float, JobId, int, int]] = []

    def push(number: int) -> None:
        holder = holders[number]
        steps = [(_slope(holder, to), to) for to, _ in holder.estimate.core_times if to > holder.granted]
        steps = [s for s in steps if s[0] > 0 and _fits(holder, s[1], spare)]
        if steps:
            slope, to = max(steps)
            heapq.heappush(heap, (-holder.job.priority, -slope, holder.job.id, number, to))

    for number in range(len(holders)):
        push(number)
    while heap:
        *_, number, to = heapq.heappop(heap)
        holder = holders[number]
        if _fits(holder, to, spare):
            for host, count in holder.counts.items():
                spare[host] -= (to - holder.granted) * count
            holder.granted = to
        push(number)


def _slope(holder: _Holder, to: int) -> float:
    """Share of the step time that each further core saves."""
    now_s = holder.step_s(holder.granted)
    saved = 1.0 - holder.step_s(to) / now_s
    each = saved / ((to - holder.granted) * sum(holder.counts.values()))
    return each * (KEEP if to <= holder.now else 1.0)


def _fits(holder: _Holder, to: int, spare: dict[HostId, int]) -> bool:
    return all((to - holder.granted) * count <= spare[host] for host, count in holder.counts.items())


def _grant(holder: _Holder) -> CoreGrant:
    each = holder.granted
    why = "nobody needs them more" if each > holder.now else "the others serve somebody better"
    times = f"{holder.step_s(each):.3g} s a step instead of {holder.step_s(holder.now):.3g}"
    return CoreGrant(holder.job.id, each, holder.cores(each), f"{each} CPU cores beside each device, {times}: {why}")
