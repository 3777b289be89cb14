"""Calendar of claims on devices in one scheduling pass, in seconds from now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from clusterd.core.state import State
from clusterd.types import Device, DeviceId


@dataclass(frozen=True, slots=True)
class Window:
    """Time in which a device is claimed."""

    from_s: float
    until_s: float  # infinite: until the claim is removed


class ClaimCalendar:
    """Claims on devices that have begun or are to come."""

    def __init__(self, state: State, now_s: float) -> None:
        self._windows: dict[DeviceId, list[Window]] = {}
        for claim in state.device_claims.values():
            until_s = inf if claim.until_s is None else claim.until_s - now_s
            for device in claim.devices:
                self._windows.setdefault(device, []).append(Window(claim.from_s - now_s, until_s))
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
        return all(w.until_s <= at_s or w.from_s >= at_s + for_s for w in self._windows.get(device, ()))

    def to_withhold(self, devices: Iterable[Device], for_s: float) -> list[Device]:
        """Those of the devices that a claim takes before so many seconds have passed."""
        return [d for d in devices if d.id in self._windows and not self.is_free(d.id, 0.0, for_s)]
