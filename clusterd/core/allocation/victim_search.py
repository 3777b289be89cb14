"""Search for the cheapest set of jobs to shrink, move or suspend so that an offer of another job fits.

A shape needs a number of devices on each of some hosts. Hosts are chosen where that costs least; on each, victims are
taken in the order of their loss per device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clusterd.core.booked import NOTHING
from clusterd.core.estimates.job_forecast import JobForecast
from clusterd.core.ledger import Ledger
from clusterd.core.performance_table import Estimate
from clusterd.types import Device, HostId, JobId

NEVER = float("inf")

HOSTS_TRIED = 8
"""Hosts examined for each width of an offer: those that lack fewest devices."""

SizesOf = Callable[[JobForecast], Sequence[Estimate]]
CostOf = Callable[[JobForecast, Estimate], float]
SuspensionCost = Callable[[JobForecast], float | None]
"""Seconds that a victim loses by a suspension; None: it must not be suspended."""


@dataclass(frozen=True, slots=True)
class Change:
    """Migration of a victim to a smaller offer or to other devices, or its suspension."""

    victim: JobForecast
    offer: Estimate | None  # None: it is suspended
    devices: list[Device]
    lost_s: float


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Changes of victims after which an offer fits."""

    offer: Estimate
    changes: tuple[Change, ...]
    now: tuple[Device, ...]  # free already, and reserved for the job that gets the others
    hosts: Mapping[HostId, int] = field(default_factory=dict)  # devices of each host that the offer takes

    @property
    def lost_s(self) -> float:
        """Seconds that all changes cost the victims."""
        return sum(change.lost_s for change in self.changes)

    @property
    def suspended(self) -> list[JobForecast]:
        """Victims that are suspended."""
        return [change.victim for change in self.changes if change.offer is None]


class VictimSearch:
    """Search for victims of one job; leaves the ledger as it was."""

    def __init__(
        self,
        ledger: Ledger,
        forecast: JobForecast,
        movable: Sequence[JobForecast],
        suspension_s: SuspensionCost = lambda _: None,
    ) -> None:
        self.ledger, self.forecast, self.suspension_s = ledger, forecast, suspension_s
        self.on_host: dict[HostId, list[JobForecast]] = {}
        for victim in movable:
            for host in dict.fromkeys(d.host for d in victim.devices):
                self.on_host.setdefault(host, []).append(victim)

    def make(self, offer: Estimate, sizes_of: SizesOf, cost_of: CostOf) -> EvictionPlan | None:
        """Cheapest changes after which the offer fits; None: there are none."""
        kind = offer.device_type
        free = {
            host: len(types.get(kind, {}))
            for host, types in self.ledger.devices.items()
            if self.forecast.job.admits(self.ledger.hosts[host])
        }
        # A host can give what is free on it and what those who may be moved hold there.
        reach = {
            host: count
            + sum(d.host == host and d.name == kind for victim in self.on_host.get(host, ()) for d in victim.devices)
            for host, count in free.items()
        }
        # What a host costs is known only when its jobs were asked: each alone, the cheapest together.
        alone: dict[int, list[tuple[float, HostId, EvictionPlan]]] = {}
        for count in dict.fromkeys(offer.shape):
            fit = sorted((h for h in free if reach[h] >= count), key=lambda h: (max(count - free[h], 0), free[h], h))
            found = [(h, self._changes(offer, {h: count}, free, sizes_of, cost_of)) for h in fit[:HOSTS_TRIED]]
            alone[count] = sorted(((m.lost_s, h, m) for h, m in found if m is not None), key=lambda x: x[:2])
        chosen_hosts: dict[HostId, int] = {}
        for count in offer.shape:
            best = next((x for x in alone[count] if x[1] not in chosen_hosts), None)
            if best is None:
                return None
            chosen_hosts[best[1]] = count
            if len(offer.shape) == 1:
                return best[2]
        return self._changes(offer, chosen_hosts, free, sizes_of, cost_of)

    def _changes(
        self,
        offer: Estimate,
        chosen_hosts: dict[HostId, int],
        free: dict[HostId, int],
        sizes_of: SizesOf,
        cost_of: CostOf,
    ) -> EvictionPlan | None:
        ledger = self.ledger
        kind = offer.device_type
        now: list[Device] = []
        for host, count in chosen_hosts.items():
            some = sorted(ledger.devices[host].get(kind, {}).values(), key=lambda d: d.id)
            now += some[: min(count, len(some))]
        missing = {host: count - free[host] for host, count in chosen_hosts.items() if count > free[host]}
        changes: list[Change] = []
        taken: list[Device] = list(now)
        ledger.take(now)
        try:
            for host in sorted(missing, key=lambda h: (missing[h], h)):
                while missing[host] > 0:
                    changed = {c.victim.job.id for c in changes}
                    change = self._cheapest(
                        host, kind, missing, changed, self.forecast.left_s(offer), sizes_of, cost_of
                    )
                    if change is None:
                        return None
                    changes.append(change)
                    own = {d.id for d in change.victim.devices}
                    stays = {d.id for d in change.devices}
                    fresh = [d for d in change.devices if d.id not in own]
                    ledger.take(fresh)
                    taken += fresh
                    for device in change.victim.devices:
                        if device.id not in stays and device.host in missing and device.name == kind:
                            missing[device.host] -= 1
            return EvictionPlan(offer, tuple(changes), tuple(now), chosen_hosts)
        finally:
            ledger.put(taken)

    def _cheapest(
        self,
        host: HostId,
        kind: str,
        missing: dict[HostId, int],
        changed: set[JobId],
        for_s: float,
        sizes_of: SizesOf,
        cost_of: CostOf,
    ) -> Change | None:
        """Victim on this host that loses least per missing device; None: there is none."""
        best: tuple[float, int, str, Change] | None = None
        for victim in self.on_host.get(host, ()):
            if victim.job.id in changed:
                continue
            ways: list[Change] = []
            if (found := self._elsewhere(victim, kind, missing, sizes_of(victim))) is not None:
                offer, devices = found
                # It is slower for as long as the other runs; then it may be moved back, or stay as it is.
                slower_s = max(victim.left_s(offer) - victim.now_s, 0.0)
                back_s = for_s * max(1.0 - victim.now_s / max(victim.left_s(offer), 1e-9), 0.0) + cost_of(victim, offer)
                ways.append(Change(victim, offer, devices, min(slower_s, back_s) + cost_of(victim, offer)))
            if (stopped_s := self.suspension_s(victim)) is not None:
                ways.append(Change(victim, None, [], stopped_s))
            for change in ways:
                stays = {d.id for d in change.devices}
                gives = sum(d.host == host and d.name == kind and d.id not in stays for d in victim.devices)
                key = (change.lost_s / min(gives, missing[host]) if gives else NEVER, gives, victim.job.id)
                if gives and (best is None or key < best[:3]):
                    best = (*key, change)
        return best[3] if best is not None else None

    def _elsewhere(
        self, victim: JobForecast, kind: str, missing: dict[HostId, int], sizes: Sequence[Estimate]
    ) -> tuple[Estimate, list[Device]] | None:
        """Fastest offer of a victim on free devices and on those of its own that are not needed."""
        wanted = {host: max(count, 0) for host, count in missing.items()}
        keeps: list[Device] = []
        for device in victim.devices:
            if device.name == kind and wanted.get(device.host, 0) > 0:
                wanted[device.host] -= 1
            elif device.host in self.ledger.devices:
                keeps.append(device)
        if len(keeps) == len(victim.devices):
            return None
        per_host: dict[HostId, int] = {}
        for device in keeps:
            per_host[device.host] = per_host.get(device.host, 0) + 1
        own = {d.id for d in keeps}
        attempt = victim.job.attempt
        booked = attempt.booked if attempt is not None else NOTHING
        self.ledger.put(keeps, booked)
        try:
            for offer in sizes:
                devices = self.ledger.find(victim.job, offer, per_host, own)
                if devices is not None:
                    return offer, devices
            return None
        finally:
            self.ledger.take(keeps, booked)
