"""Forecast of free devices by host from the remaining times of running jobs, without migrations."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterd.core.booked import NOTHING, Booked, Placement
from clusterd.core.claim_calendar import ClaimCalendar
from clusterd.core.estimates.expected_time import Ends
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


@dataclass(frozen=True, slots=True)
class Hold:
    """Resources that a job holds until its end."""

    job: Job
    ends: Ends
    devices: Sequence[Device]
    booked: Booked = NOTHING


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

    def __init__(self, ledger: Ledger, holds: Iterable[Hold], calendar: ClaimCalendar, by_limits: bool = False) -> None:
        """Forecast from the expected ends of jobs.

        Args:
            by_limits: from their time limits instead; jobs without one never end.
        """
        self._ledger = ledger
        self._calendar = calendar
        self._by_limits = by_limits
        self.run_s = 0.0
        self._granted: set[DeviceId] = set()
        self._holds = sorted(holds, key=lambda hold: (self._end_s(hold), hold.job.id))
        # A shared device is free when the last of its jobs has ended.
        self._last: dict[DeviceId, Hold] = {}
        for hold in self._holds:
            self._note_last(hold)
        self._names = sorted(ledger.hosts)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._now: dict[str, Counts] = {}
        for host, types in ledger.devices.items():
            for name, free in types.items():
                self._free_now(name)[self._index[host]] = len(free)

    def by_limits(self) -> AvailabilityForecast:
        """The same forecast from time limits alone."""
        found = AvailabilityForecast(self._ledger, self._holds, self._calendar, by_limits=True)
        found.run_s, found._granted = self.run_s, self._granted
        return found

    def _end_s(self, hold: Hold) -> float:
        return hold.ends.latest_s if self._by_limits else hold.ends.expected_s

    def _note_last(self, hold: Hold) -> None:
        if hold.job.spec.resources.share > 1:
            for device in hold.devices:
                if device.id not in self._last or self._end_s(hold) >= self._end_s(self._last[device.id]):
                    self._last[device.id] = hold

    @cached_property
    def _devices_back(self) -> dict[str, _Returns]:
        rows: dict[str, list[tuple[float, int, tuple[int, ...]]]] = {}
        for hold in self._ending():
            usable = [device for device in self._freed(hold) if device.host in self._index and not device.foreign]
            for name, some in by_type(usable).items():
                rows.setdefault(name, []).extend(
                    (self._end_s(hold), self._index[host], (count,)) for host, count in per_host(some).items()
                )
        return {name: _Returns.of(some, 1) for name, some in rows.items()}

    def _ending(self, by_s: float = NEVER) -> Iterator[Hold]:
        """Holds that end by then, in order of their ends."""
        return takewhile(lambda hold: self._end_s(hold) < NEVER and self._end_s(hold) <= by_s + AT_ONCE_S, self._holds)

    def _freed(self, hold: Hold) -> Sequence[Device]:
        """Devices that are free when the job ends."""
        if hold.job.spec.resources.share < 2:
            return hold.devices
        return [d for d in hold.devices if self._last[d.id] is hold]

    @cached_property
    def _cores_back(self) -> _Returns:
        """CPU cores and bytes of memory."""
        return _Returns.of(
            [
                (self._end_s(hold), self._index[host], hold.booked.on(host))
                for hold in self._ending()
                for host in dict.fromkeys([*hold.booked.cores, *hold.booked.memory_bytes])
                if host in self._index
            ],
            2,
        )

    def _free_now(self, device_type: str) -> Counts:
        return self._now.setdefault(device_type, np.zeros(len(self._names), dtype=np.int64))

    def take(self, device_type: str, taken: Mapping[HostId, int]) -> None:
        """Record devices that a waiting job will get, for longer than the forecast looks ahead."""
        free = self._free_now(device_type)
        for host, count in taken.items():
            if host in self._index:
                free[self._index[host]] -= count

    def hold(self, hold: Hold) -> None:
        """Record a grant of this pass."""
        fresh = [device for device in hold.devices if device.id not in self._last]  # those of sharing jobs are in use
        for name, some in by_type(fresh).items():
            self.take(name, per_host(some))
        self._granted.update(device.id for device in hold.devices)
        insort(self._holds, hold, key=self._end_s)
        self._note_last(hold)
        for cached in ("_devices_back", "_cores_back"):
            self.__dict__.pop(cached, None)

    def _beside(self, ledger: Ledger) -> tuple[Counts, Counts]:
        """CPU cores and bytes of memory."""
        cores = np.array([ledger.cores[host] for host in self._names], dtype=np.int64)
        return cores, np.array([ledger.memory_bytes[host] for host in self._names], dtype=np.int64)

    def ledger_at(self, at_s: float) -> Ledger:
        """Free resources once the jobs that end by then have ended."""
        found = self._later(self._now_alone(), -NEVER, at_s)
        if self._calendar:
            self._apply_claims(found, at_s)
        return found

    def _now_alone(self) -> Ledger:
        found = self._ledger.copy()
        found.shared.clear()  # who could join a job now has started
        return found

    def _later(self, ledger: Ledger, after_s: float, at_s: float) -> Ledger:
        """The ledger, with what jobs give back that end after one time and by another."""
        for hold in self._ending(at_s):
            if self._end_s(hold) > after_s + AT_ONCE_S:
                ledger.put(self._freed(hold), hold.booked)
        return ledger

    def _apply_claims(self, ledger: Ledger, at_s: float) -> None:
        """Take out what is claimed while the job would run, and give back what claims have left by then."""
        given_back = {d.id for hold in self._ending(at_s) for d in self._freed(hold)}
        held = (self._calendar.held | self._granted) - given_back
        for device in self._calendar.devices:
            ledger.take([device])
            if device.id not in held and self._calendar.is_free(device.id, at_s, self.run_s):
                ledger.put([device])
        ledger.withhold(self._calendar.kept(at_s, self.run_s))

    def first(
        self, look: Callable[[Ledger], Seen | None], hosts: Container[HostId] | None = None
    ) -> tuple[float, Seen] | None:
        """First end of a job, in seconds from now, after which `look` finds something; None: it never does.

        By binary search: free resources only increase, unless there are claims, whose ends count like those of jobs.

        Args:
            hosts: on which it looks; None: on all.
        """
        times = sorted({self._end_s(hold) for hold in self._ending()})
        if self._calendar:
            for at_s in sorted({*times, *self._calendar.ends_s}):
                there = self.ledger_at(at_s)
                if (seen := look(there if hosts is None else there.only(hosts))) is not None:
                    return at_s, seen
            return None
        low, high = 0, len(times)
        short, short_s = self._now_alone(), -NEVER  # what is free at the latest time that was not enough
        short = short if hosts is None else short.only(hosts)
        answer: tuple[float, Seen] | None = None
        while low < high:
            middle = (low + high) // 2
            ledger = self._later(short.copy(), short_s, times[middle])
            found = look(ledger)
            if found is not None:
                answer, high = (times[middle], found), middle
            else:
                low, short, short_s = middle + 1, ledger, times[middle]
        return answer

    def awaited(self, at_s: float, place: Placement) -> list[Hold]:
        """Holds that end by then and have devices of the types of this place, or cores, on its hosts."""
        usable = {rank.device for rank in place.ranks}
        here = [device for host in place.booked.cores for device in self._ledger.hosts[host].devices]
        names = {device.name for device in here if device.id in usable}
        return [
            hold
            for hold in self._ending(at_s)
            if not place.booked.cores.keys().isdisjoint(hold.booked.cores)
            and (not names or any(d.host in place.booked.cores and d.name in names for d in hold.devices))
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
        each_cores, each_bytes = needs(job, offer)
        now, back, hosts = self._beside(ledger), self._devices_back.get(offer.device_type), len(self._names)

        def look(at_s: float) -> EarliestStart | None:
            if self._calendar:
                then = self.ledger_at(at_s)
                counts = [len(then.devices[host].get(offer.device_type, ())) for host in self._names]
                there, (cores, memory_bytes) = np.array(counts, dtype=np.int64), self._beside(then)
            else:
                cores, memory_bytes = (now[kind] + self._cores_back.by(at_s, hosts, kind) for kind in (0, 1))
                there = self._free_now(offer.device_type)
                there = there + back.by(at_s, hosts) if back is not None else there
            there = np.minimum(there, cores // max(each_cores, 1))
            there = np.minimum(there, memory_bytes // max(each_bytes, 1))
            fitting = _fit(offer.shape, np.where(admits, there, 0))
            return EarliestStart(offer, at_s, {self._names[i]: n for i, n in fitting}) if fitting else None

        if (found := look(0.0)) is not None:
            return found
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
