"""Forecast of free devices by host from the remaining times of running jobs, without migrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from clusterd.core.claim_calendar import ClaimCalendar
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, by_type, needs, per_host
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Job
from clusterd.types import Device, DeviceId, HostId

NEVER = float("inf")
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class EarliestStart:
    """Earliest start of a job under an offer."""

    offer: Estimate
    at_s: float  # from now
    hosts: Mapping[HostId, int]  # devices that it will take


@dataclass(slots=True)
class Backfill:
    """Limits that a reservation sets to the other jobs: they end before it, or use what it leaves.

    Attributes:
        at_s: start of the reserved job, from now.
        spare: by device type and host, devices that will be left then; types that are not here are free for all.
        cores: likewise, CPU cores by host.
    """

    at_s: float
    spare: dict[tuple[str, HostId], int]
    cores: dict[HostId, int] = field(default_factory=dict)

    def admits(self, left_s: float, devices: Iterable[Device], cores: Mapping[HostId, int]) -> bool:
        """True where holding these devices and cores for so long does not delay the reserved job."""
        if left_s <= self.at_s:
            return True
        return all(count <= self.spare.get(key, 0) for key, count in self._mine(devices).items()) and all(
            count <= self.cores[host] for host, count in cores.items() if host in self.cores
        )

    def take(self, left_s: float, devices: Iterable[Device], cores: Mapping[HostId, int]) -> None:
        """Record devices and cores that are held for so long."""
        if left_s <= self.at_s:
            return
        for key, count in self._mine(devices).items():
            self.spare[key] = self.spare.get(key, 0) - count
        for host, count in cores.items():
            if host in self.cores:
                self.cores[host] -= count

    def limited(self, ledger: Ledger) -> Ledger:
        """Copy of the ledger with what may be held beyond the start of the reserved job."""
        found = ledger.copy()
        for (name, host), count in self.spare.items():
            here = list(found.devices.get(host, {}).get(name, {}).values())
            found.take(here[max(count, 0) :], {}, {})
        for host, count in self.cores.items():
            if host in found.cores:
                found.cores[host] = min(found.cores[host], count)
        return found

    def _mine(self, devices: Iterable[Device]) -> dict[tuple[str, HostId], int]:
        """Number of these devices by type and host, of the reserved types."""
        types = {name for name, _ in self.spare}
        found: dict[tuple[str, HostId], int] = {}
        for device in devices:
            if device.name in types:
                found[device.name, device.host] = found.get((device.name, device.host), 0) + 1
        return found


class AvailabilityForecast:
    """Free devices of each host and type over time, and the cores and memory beside them.

    Attributes:
        run_s: how long the job of which it is asked runs: a claim on a device must not begin before its end.
    """

    def __init__(self, ledger: Ledger, running: Sequence[JobForecast], calendar: ClaimCalendar) -> None:
        self._ledger = ledger
        self._calendar = calendar
        self.run_s = 0.0
        self._granted: set[DeviceId] = set()
        self._now: dict[str, dict[HostId, int]] = {}
        for host, types in ledger.devices.items():
            for name, free in types.items():
                self._now.setdefault(name, {})[host] = len(free)
        ends: list[tuple[float, str, dict[HostId, int]]] = []
        for p in running:
            usable = [device for device in p.devices if device.host in ledger.devices and not device.foreign]
            ends += [(p.now_s, name, per_host(some)) for name, some in by_type(usable).items()]
        ends.sort(key=lambda e: e[0])
        self._ends = ends
        self._running = sorted(running, key=lambda p: (p.now_s, p.job.id))
        self._given_back: dict[float, tuple[dict[HostId, int], dict[HostId, int]]] = {}

    def take(self, device_type: str, taken: Mapping[HostId, int]) -> None:
        """Record devices granted in this pass, for longer than the forecast looks ahead."""
        free = self._now.setdefault(device_type, {})
        for host, count in taken.items():
            free[host] = free.get(host, 0) - count

    def occupy(self, devices: Sequence[Device]) -> None:
        """Record these devices as granted in this pass."""
        self._granted.update(device.id for device in devices)
        for name, some in by_type(devices).items():
            self.take(name, per_host(some))

    def free_at(self, device_type: str, at_s: float) -> dict[HostId, int]:
        """Number of free devices at that time, by host."""
        if self._calendar:
            there = self.ledger_at(at_s).devices
            return {host: len(types[device_type]) for host, types in there.items() if types.get(device_type)}
        free = dict(self._now.get(device_type, {}))
        for end_s, name, held in self._ends:
            if end_s > at_s + 1e-6:
                break
            if name == device_type:
                for host, count in held.items():
                    free[host] = free.get(host, 0) + count
        return free

    def ledger_at(self, at_s: float) -> Ledger:
        """Free resources once the running jobs that end by then have ended."""
        found = self._ledger.copy()
        for p in self._running:
            if p.now_s > at_s + 1e-6:
                break
            attempt = p.job.attempt
            if attempt is not None:
                found.put(p.devices, attempt.cores, attempt.memory_bytes)
        if self._calendar:
            self._apply_claims(found, at_s)
        return found

    def _apply_claims(self, ledger: Ledger, at_s: float) -> None:
        """Take out what is claimed while the job would run, and give back what claims have left by then."""
        given_back = {d.id for p in self._running if p.now_s <= at_s + 1e-6 for d in p.devices}
        held = (self._calendar.leased - given_back) | self._granted
        for device in self._calendar.devices:
            ledger.take([device], {}, {})
            if device.id not in held and self._calendar.is_free(device.id, at_s, self.run_s):
                ledger.put([device], {}, {})

    def first(self, look: Callable[[Ledger], Seen | None]) -> tuple[float, Seen] | None:
        """First end of a running job, in seconds from now, after which `look` finds something; None: it never does.

        By binary search: free resources only increase, unless there are claims, whose ends count like those of jobs.
        """
        times = sorted({p.now_s for p in self._running})
        if self._calendar:
            for at_s in sorted({*times, *self._calendar.ends_s}):
                if (seen := look(self.ledger_at(at_s))) is not None:
                    return at_s, seen
            return None
        low, high = 0, len(times)
        answer: tuple[float, Seen] | None = None
        while low < high:
            middle = (low + high) // 2
            found = look(self.ledger_at(times[middle]))
            if found is not None:
                answer, high = (times[middle], found), middle
            else:
                low = middle + 1
        return answer

    def awaited(self, at_s: float, hosts: Iterable[HostId], types: Iterable[str]) -> list[Job]:
        """Running jobs that end by then and hold devices of these types, or cores, on these hosts."""
        places, names = set(hosts), set(types)
        return [
            p.job
            for p in self._running
            if p.now_s <= at_s + 1e-6
            and p.job.attempt is not None
            and places.intersection(p.job.attempt.hosts)
            and (not names or any(d.host in places and d.name in names for d in p.devices))
        ]

    def earliest_start(
        self, job: Job, offers: Iterable[Estimate], burden_s: Callable[[Estimate], float]
    ) -> EarliestStart | None:
        """Offer with the least burden for the job, waiting included, and its start; None: none will ever fit.

        Args:
            offers: least burden first.
        """
        best: EarliestStart | None = None
        best_s = NEVER
        for offer in offers:
            run_s = burden_s(offer)
            if run_s >= best_s:
                break  # the others are worse even without waiting
            found = self._first(job, offer, best_s - run_s)
            if found is not None and found.at_s + run_s < best_s:
                best, best_s = found, found.at_s + run_s
        return best

    def _first(self, job: Job, offer: Estimate, within_s: float) -> EarliestStart | None:
        """First end of a running job after which the offer fits, by binary search: free devices only increase."""
        mine = [i for i, end in enumerate(self._ends) if end[1] == offer.device_type and end[0] < within_s]
        hosts = _fit(offer.shape, self._fit_for(job, offer, 0.0))
        if hosts is not None:
            return EarliestStart(offer, 0.0, hosts)
        if self._calendar:
            for at_s in sorted({*(self._ends[i][0] for i in mine), *self._calendar.ends_s}):
                hosts = _fit(offer.shape, self._fit_for(job, offer, at_s)) if at_s < within_s else None
                if hosts is not None:
                    return EarliestStart(offer, at_s, hosts)
            return None
        low, high = 0, len(mine)
        answer: EarliestStart | None = None
        while low < high:
            middle = (low + high) // 2
            at_s = self._ends[mine[middle]][0]
            hosts = _fit(offer.shape, self._fit_for(job, offer, at_s))
            if hosts is not None:
                answer, high = EarliestStart(offer, at_s, hosts), middle
            else:
                low = middle + 1
        return answer

    def _fit_for(self, job: Job, offer: Estimate, at_s: float) -> dict[HostId, int]:
        """Devices free at that time with the cores and memory that the job needs per device, by host."""
        ledger, (cores, memory_bytes) = self._ledger, self._back_at(at_s)
        each_cores, each_bytes = needs(job, offer)
        each_cores, each_bytes = max(each_cores, 1), max(each_bytes, 1)
        return {
            host: min(
                count,
                (ledger.cores.get(host, 0) + cores.get(host, 0)) // each_cores,
                (ledger.memory_bytes.get(host, 0) + memory_bytes.get(host, 0)) // each_bytes,
            )
            for host, count in self.free_at(offer.device_type, at_s).items()
            if host in ledger.hosts and job.admits(ledger.hosts[host])
        }

    def _back_at(self, at_s: float) -> tuple[dict[HostId, int], dict[HostId, int]]:
        """Cores and memory freed by jobs that will have ended, by host; cached by time."""
        known = self._given_back.get(at_s)
        if known is None:
            known = self._given_back[at_s] = {}, {}
            cores, memory_bytes = known
            for p in self._running:
                if p.now_s > at_s + 1e-6:
                    break
                if (attempt := p.job.attempt) is not None:
                    for host, count in attempt.cores.items():
                        cores[host] = cores.get(host, 0) + count
                    for host, count in attempt.memory_bytes.items():
                        memory_bytes[host] = memory_bytes.get(host, 0) + count
        return known


def _fit(shape: Sequence[int], free: Mapping[HostId, int]) -> dict[HostId, int] | None:
    """Best-fitting hosts for a shape, with the devices taken of each; None: it does not fit."""
    left = sorted(((count, host) for host, count in free.items() if count >= shape[-1]), key=lambda x: (x[0], x[1]))
    if len(left) < len(shape):
        return None
    chosen: dict[HostId, int] = {}
    for wanted in shape:
        index = next((i for i, (count, _) in enumerate(left) if count >= wanted), None)
        if index is None:
            return None
        chosen[left.pop(index)[1]] = wanted
    return chosen
