"""Forecast of free devices by host from the remaining times of running jobs, without migrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterd.core.claim_calendar import ClaimCalendar
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger, by_type, needs, per_host
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Job
from clusterd.types import Device, DeviceId, HostId

NEVER = float("inf")
Seen = TypeVar("Seen")
Counts = NDArray[np.int64]
"""A number for each host, by its index."""
AT_ONCE_S = 1e-6
"""Ends that are no further apart than this are one."""


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
        found.shared.clear()  # whoever joins a job keeps its device longer
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


@dataclass(frozen=True, slots=True)
class _Returns:
    """Resources that hosts get back as running jobs end, in order of time: one row for each end and host."""

    at_s: NDArray[np.float64]
    hosts: Counts
    counts: Counts  # rows by number of kinds of resource

    @staticmethod
    def of(rows: Sequence[tuple[float, int, tuple[int, ...]]], kinds: int) -> _Returns:
        return _Returns(
            np.array([row[0] for row in rows]),
            np.array([row[1] for row in rows], dtype=np.int64),
            np.array([row[2] for row in rows], dtype=np.int64).reshape(len(rows), kinds),
        )

    def by(self, at_s: float, hosts: int, kind: int = 0) -> Counts:
        """Sum by host of what is back by then."""
        rows = int(np.searchsorted(self.at_s, at_s + AT_ONCE_S, side="right"))
        return np.bincount(self.hosts[:rows], weights=self.counts[:rows, kind], minlength=hosts).astype(np.int64)


class AvailabilityForecast:
    """Free devices of each host and type over time, and the cores and memory beside them.

    Every job that waits asks for many times: hosts are indices of arrays, in the order of their names.

    Attributes:
        run_s: how long the job of which it is asked runs: a claim on a device must not begin before its end.
    """

    def __init__(self, ledger: Ledger, running: Sequence[JobForecast], calendar: ClaimCalendar) -> None:
        self._ledger = ledger
        self._calendar = calendar
        self.run_s = 0.0
        self._granted: set[DeviceId] = set()
        self._running = sorted(running, key=lambda p: (p.now_s, p.job.id))
        # A shared device is free when the last of its jobs has ended.
        self._last = {d.id: p.job.id for p in self._running if p.job.spec.resources.share > 1 for d in p.devices}
        self._names = sorted(ledger.hosts)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._now: dict[str, Counts] = {}
        for host, types in ledger.devices.items():
            for name, free in types.items():
                self._free_now(name)[self._index[host]] = len(free)

    @cached_property
    def _devices_back(self) -> dict[str, _Returns]:
        rows: dict[str, list[tuple[float, int, tuple[int, ...]]]] = {}
        for p in self._running:
            usable = [device for device in self._freed(p) if device.host in self._index and not device.foreign]
            for name, some in by_type(usable).items():
                rows.setdefault(name, []).extend(
                    (p.now_s, self._index[host], (count,)) for host, count in per_host(some).items()
                )
        return {name: _Returns.of(some, 1) for name, some in rows.items()}

    def _freed(self, p: JobForecast) -> Sequence[Device]:
        """Devices that are free when the job ends; others may have joined it on a shared one in this pass."""
        if p.job.spec.resources.share < 2:
            return p.devices
        return [d for d in p.devices if self._last[d.id] == p.job.id and d.id not in self._granted]

    @cached_property
    def _cores_back(self) -> _Returns:
        """CPU cores and bytes of memory."""
        return _Returns.of(
            [
                (p.now_s, self._index[host], (attempt.cores.get(host, 0), attempt.memory_bytes.get(host, 0)))
                for p in self._running
                if (attempt := p.job.attempt) is not None
                for host in dict.fromkeys([*attempt.cores, *attempt.memory_bytes])
                if host in self._index
            ],
            2,
        )

    def _free_now(self, device_type: str) -> Counts:
        return self._now.setdefault(device_type, np.zeros(len(self._names), dtype=np.int64))

    def take(self, device_type: str, taken: Mapping[HostId, int]) -> None:
        """Record devices granted in this pass, for longer than the forecast looks ahead."""
        free = self._free_now(device_type)
        for host, count in taken.items():
            if host in self._index:
                free[self._index[host]] -= count

    def occupy(self, devices: Sequence[Device]) -> None:
        """Record these devices as granted in this pass."""
        self._granted.update(device.id for device in devices)
        for name, some in by_type(devices).items():
            self.take(name, per_host(some))

    def free_at(self, device_type: str, at_s: float) -> dict[HostId, int]:
        """Number of free devices at that time, by host."""
        return dict(zip(self._names, self._free_at(device_type, at_s).tolist(), strict=True))

    def _free_at(self, device_type: str, at_s: float) -> Counts:
        if self._calendar:
            there = self.ledger_at(at_s).devices
            return np.array([len(there[host].get(device_type, ())) for host in self._names], dtype=np.int64)
        back = self._devices_back.get(device_type)
        free = self._free_now(device_type)
        return free + back.by(at_s, len(self._names)) if back is not None else free.copy()

    def ledger_at(self, at_s: float) -> Ledger:
        """Free resources once the running jobs that end by then have ended."""
        found = self._ledger.copy()
        found.shared.clear()  # who could join a job now has started
        for p in self._running:
            if p.now_s > at_s + AT_ONCE_S:
                break
            attempt = p.job.attempt
            if attempt is not None:
                found.put(self._freed(p), attempt.cores, attempt.memory_bytes)
        if self._calendar:
            self._apply_claims(found, at_s)
        return found

    def _apply_claims(self, ledger: Ledger, at_s: float) -> None:
        """Take out what is claimed while the job would run, and give back what claims have left by then."""
        given_back = {d.id for p in self._running if p.now_s <= at_s + AT_ONCE_S for d in self._freed(p)}
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
            if p.now_s <= at_s + AT_ONCE_S
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
        ledger = self._ledger
        admits = np.array([job.admits(ledger.hosts[host]) for host in self._names], dtype=bool)
        cores = np.array([ledger.cores[host] for host in self._names], dtype=np.int64)
        memory_bytes = np.array([ledger.memory_bytes[host] for host in self._names], dtype=np.int64)
        each_cores, each_bytes = needs(job, offer)

        def look(at_s: float) -> EarliestStart | None:
            there, hosts = self._free_at(offer.device_type, at_s), len(self._names)
            there = np.minimum(there, (cores + self._cores_back.by(at_s, hosts)) // max(each_cores, 1))
            there = np.minimum(there, (memory_bytes + self._cores_back.by(at_s, hosts, 1)) // max(each_bytes, 1))
            fitting = _fit(offer.shape, np.where(admits, there, 0))
            return EarliestStart(offer, at_s, {self._names[i]: n for i, n in fitting}) if fitting else None

        if (found := look(0.0)) is not None:
            return found
        back = self._devices_back.get(offer.device_type)
        times: list[float] = []
        if back is not None:
            times = np.unique(back.at_s[: int(np.searchsorted(back.at_s, within_s, side="left"))]).tolist()
        if self._calendar:
            later = (x for x in sorted({*times, *self._calendar.ends_s}) if x < within_s)
            return next((found for at_s in later if (found := look(at_s)) is not None), None)
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            if (earlier := look(times[middle])) is not None:
                found, high = earlier, middle
            else:
                low = middle + 1
        return found


def _fit(shape: Sequence[int], free: Counts) -> list[tuple[int, int]]:
    """Best-fitting hosts for a shape, by index, with the devices taken of each; empty: it does not fit."""
    chosen: list[tuple[int, int]] = []
    left = free.copy()
    for wanted in shape:
        enough = np.where(left >= wanted, left, _FULL)
        index = int(enough.argmin())  # of equals the first by name
        if enough[index] == _FULL:
            return []
        chosen.append((index, wanted))
        left[index] = -1
    return chosen


_FULL = np.iinfo(np.int64).max
