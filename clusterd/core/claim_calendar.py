"""Calendar of claims in one scheduling pass, in seconds from now.

A claim is on devices. A booking also keeps their parts of the cores and memory of their hosts for its jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from clusterd.core.booked import Booked, peak
from clusterd.core.state import State
from clusterd.types import Device, DeviceId, HostId


@dataclass(frozen=True, slots=True)
class Window:
    """Time in which a device is claimed."""

    from_s: float
    until_s: float  # infinite: until the claim is removed

    def overlaps(self, at_s: float, for_s: float) -> bool:
        """True where it has begun at that time, or begins within so many seconds, and is not over."""
        return at_s < self.until_s and (self.from_s <= at_s or self.from_s < at_s + for_s)


class ClaimCalendar:
    """Claims on devices that have begun or are to come."""

    def __init__(self, state: State, now_s: float) -> None:
        self._windows: dict[DeviceId, list[Window]] = {}
        self._kept: dict[str, tuple[Window, Booked]] = {}  # by booking, beyond what its jobs have
        for claim in state.device_claims.values():
            window = Window(claim.from_s - now_s, inf if claim.until_s is None else claim.until_s - now_s)
            for device in claim.devices:
                self._windows.setdefault(device, []).append(window)
            if claim.owner:
                self._kept[claim.id] = window, _beside(claim.devices, state)
        for job in map(state.jobs.__getitem__, state.active if self._kept else ()):
            if job.attempt is not None:
                self.use(job.spec.booking, job.attempt.booked)
        self.held = frozenset(state.holders) if self._windows else frozenset()
        hosts = state.hosts.values() if self._windows else ()
        # As they are outside of claims; those in use by others stay out.
        self.devices: list[Device] = [
            replace(d, foreign="") if d.id in host.claimed else d
            for host in hosts
            for d in host.devices
            if d.id in self._windows and not d.excluded and (d.id in host.claimed or not d.foreign)
        ]

    def __bool__(self) -> bool:
        return bool(self._windows)

    @property
    def ends_s(self) -> list[float]:
        """Ends of claims, in order; one that is over and still counts ends now."""
        return sorted({max(w.until_s, 0.0) for some in self._windows.values() for w in some if w.until_s < inf})

    def is_free(self, device: DeviceId, at_s: float, for_s: float) -> bool:
        """True where no claim on the device overlaps this time."""
        return not any(window.overlaps(at_s, for_s) for window in self._windows.get(device, ()))

    def to_withhold(self, devices: Iterable[Device], for_s: float) -> list[Device]:
        """Those of the devices that a claim takes before so many seconds have passed."""
        return [d for d in devices if d.id in self._windows and not self.is_free(d.id, 0.0, for_s)]

    def use(self, booking: str, booked: Booked) -> None:
        """Record cores and memory that a job of a booking has."""
        if booking in self._kept:
            window, kept = self._kept[booking]
            self._kept[booking] = window, kept.beyond(booked)

    def kept(self, at_s: float, for_s: float, but: str = "") -> list[Booked]:
        """Cores and memory that bookings, but for one, keep for their jobs within so many seconds from a time.

        Bookings that follow each other keep the same ones.
        """
        kept = [these for name, these in self._kept.items() if name != but and these[0].overlaps(at_s, for_s)]
        return [peak((window.from_s, window.until_s, booked) for window, booked in kept)] if kept else []


def _beside(devices: Iterable[DeviceId], state: State) -> Booked:
    """Cores and memory of the hosts of these devices, in proportion to their number."""
    cores, memory_bytes, booked = dict[HostId, int](), dict[HostId, int](), {*devices}
    for host in state.hosts.values():
        here = host.facts.devices if host.facts is not None else ()
        if host.facts is not None and (count := sum(device.id in booked for device in here)):
            cores[host.id] = host.facts.cpu_cores * count // len(here)
            memory_bytes[host.id] = host.facts.memory_bytes * count // len(here)
    return Booked(cores, memory_bytes)
