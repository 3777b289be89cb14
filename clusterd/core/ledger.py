"""Ledger of free devices, cores and memory by host and device type during one scheduling pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from clusterd.core.booked import NOTHING, Booked, Placement
from clusterd.core.host import Host
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Attempt, Job
from clusterd.types import Device, DeviceId, HostId, RankPlace


@dataclass(frozen=True, slots=True)
class HostFree:
    """Free resources of one host at one moment of a pass."""

    host: Host
    devices: list[Device]
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A device in use that further jobs may share.

    Attributes:
        limit: jobs that may be on it, by those that are.
    """

    device: Device
    jobs: int
    limit: int


class Ledger:
    """Free devices, cores and host memory of the usable hosts during one pass.

    Attributes:
        shared: devices with a place left for another job; they do not count as free.
        withheld: cores and memory that are taken for now.
    """

    def __init__(
        self,
        hosts: Iterable[Host] = (),
        held: Container[DeviceId] = (),
        shared: Iterable[SharedDevice] = (),
    ) -> None:
        self.shared = {some.device.id: some for some in shared}
        self.hosts: dict[HostId, Host] = {}
        self.devices: dict[HostId, dict[str, dict[DeviceId, Device]]] = {}
        self.cores: dict[HostId, int] = {}
        self.memory_bytes: dict[HostId, int] = {}
        self.count: dict[str, int] = {}
        self.withheld: Sequence[Booked] = ()
        for host in hosts:
            if host.unusable is None and host.facts is not None:
                self.hosts[host.id], self.devices[host.id] = host, {}
                self.cores[host.id] = host.facts.cpu_cores - host.cores_used
                self.memory_bytes[host.id] = host.facts.memory_bytes - host.memory_used_bytes
                self.put(d for d in host.devices if d.id not in held)

    def copy(self) -> Ledger:
        """Ledger with the same free resources, to be changed without changing this one."""
        found = Ledger()
        found.hosts = self.hosts
        found.devices = {h: {n: dict(some) for n, some in types.items()} for h, types in self.devices.items()}
        found.cores, found.memory_bytes, found.count = dict(self.cores), dict(self.memory_bytes), dict(self.count)
        found.shared, found.withheld = dict(self.shared), self.withheld
        return found

    def only(self, hosts: Container[HostId]) -> Ledger:
        """Copy with the free resources of these hosts alone."""
        found = Ledger()
        found.hosts = {name: host for name, host in self.hosts.items() if name in hosts}
        found.devices = {h: {n: dict(some) for n, some in self.devices[h].items()} for h in found.hosts}
        found.cores = {name: self.cores[name] for name in found.hosts}
        found.memory_bytes = {name: self.memory_bytes[name] for name in found.hosts}
        found.count = Counter(n for types in found.devices.values() for n, some in types.items() for _ in some)
        found.shared, found.withheld = dict(self.shared), self.withheld
        return found

    def without(self, attempt: Attempt) -> Ledger:
        """Copy in which this attempt is over; unusable hosts stay out."""
        found = self.copy()
        found.put(of_ranks(self.hosts, attempt), attempt.booked)
        return found

    def on_host(self, name: HostId) -> HostFree:
        """Free resources of one host, its devices in the order in which it reports them."""
        free = {device for types in self.devices[name].values() for device in types}
        devices = [d for d in self.hosts[name].devices if d.id in free] if free else []
        return HostFree(self.hosts[name], devices, self.cores[name], self.memory_bytes[name])

    def count_on(self, name: HostId) -> int:
        """Number of free devices of one host."""
        return sum(map(len, self.devices[name].values()))

    def all_devices(self) -> Iterator[Device]:
        """All free devices."""
        return (device for here in self.devices.values() for some in here.values() for device in some.values())

    @property
    def total(self) -> int:
        """Number of free devices of all types."""
        return sum(self.count.values())

    def put(self, devices: Iterable[Device], booked: Booked = NOTHING) -> None:
        """Add freed devices, cores and memory; devices of unusable hosts stay out."""
        for device in devices:
            if device.host in self.devices and not device.foreign:
                self.devices[device.host].setdefault(device.name, {})[device.id] = device
                self.count[device.name] = self.count.get(device.name, 0) + 1
        for name, count in booked.cores.items():
            if name in self.cores:
                self.cores[name] += count
        for name, count in booked.memory_bytes.items():
            if name in self.memory_bytes:
                self.memory_bytes[name] += count

    def take(self, devices: Iterable[Device], booked: Booked = NOTHING) -> None:
        """Remove granted devices, cores and memory."""
        for device in devices:
            here = self.devices.get(device.host, {}).get(device.name, {})
            if here.pop(device.id, None) is not None:
                self.count[device.name] -= 1
        for name, count in booked.cores.items():
            if name in self.cores:
                self.cores[name] -= count
        for name, count in booked.memory_bytes.items():
            if name in self.memory_bytes:
                self.memory_bytes[name] -= count

    def withhold(self, kept: Sequence[Booked]) -> None:
        """Take cores and memory, and put back those that were withheld before."""
        for booked in self.withheld:
            self.put((), booked)
        for booked in kept:
            self.take((), booked)
        self.withheld = kept

    def take_places(self, places: Iterable[RankPlace], booked: Booked, share: int = 1) -> None:
        """Remove the granted devices of these ranks, cores and memory.

        Args:
            share: jobs that may be on each device, by the job.
        """
        named = [(place.host, place.device) for place in places if place.device is not None]
        here = [(self.devices.get(host, {}), device) for host, device in named]
        free = [some[d] for types, d in here for some in types.values() if d in some]
        known = [self.shared.pop(d) for _, d in named if d in self.shared]
        for some in [*known, *(SharedDevice(device, 0, share) for device in free)]:
            now = SharedDevice(some.device, some.jobs + 1, min(some.limit, share))
            if now.jobs < now.limit and not now.device.exclusive:
                self.shared[now.device.id] = now
        self.take(free, booked)

    def part(self, devices: Sequence[Device]) -> Ledger:
        """Ledger of these devices alone, with unlimited cores and memory: the whole ledger has booked those."""
        found = Ledger()
        hosts = per_host(devices)
        found.hosts, found.devices = self.hosts, {host: {} for host in hosts}
        found.cores, found.memory_bytes = dict.fromkeys(hosts, 1 << 60), dict.fromkeys(hosts, 1 << 60)
        found.put(devices)
        return found

    def find(
        self, job: Job, estimate: Estimate, mine: Mapping[HostId, int] | None = None, own: Iterable[DeviceId] = ()
    ) -> list[Device] | None:
        """Find free devices of the estimate's shape, host by host; None: they are not free.

        Prefers hosts where the job runs already, then the fullest, so that whole hosts stay free.

        Args:
            mine: devices of the job on each host.
            own: devices of the job that are in the ledger.
        """
        if not estimate.device_types and self.count.get(estimate.device_type, 0) < estimate.devices:
            return None
        here = mine or {}
        each_cores, each_bytes = needs(job, estimate)
        preferred = set(own)
        found: list[Device] = []
        used: set[HostId] = set()
        for count, kind in zip(estimate.shape, estimate.types, strict=True):
            best: HostId | None = None
            best_key: tuple[float, int, str] | None = None
            for name, types in self.devices.items():
                free = types.get(kind)
                if free is None or len(free) < count or name in used or not job.admits(self.hosts[name]):
                    continue
                if self.cores[name] < count * each_cores or self.memory_bytes[name] < count * each_bytes:
                    continue
                key = (-min(here.get(name, 0), count), len(free), name)
                if best_key is None or key < best_key:
                    best, best_key = name, key
            if best is None:
                return None
            used.add(best)
            devices = self.devices[best][kind].values()
            found += sorted(devices, key=lambda d: (d.id not in preferred, d.id))[:count]
        return found


def needs(job: Job, estimate: Estimate | None) -> tuple[int, int]:
    """Cores and bytes of host memory that a job needs per device."""
    wanted = job.spec.resources
    memory_bytes = -(-wanted.memory_bytes // max(wanted.devices, 1))
    return least_cores(job, estimate), max(memory_bytes, estimate.host_bytes if estimate is not None else 0)


def least_cores(job: Job, estimate: Estimate | None) -> int:
    """Least cores per device: as requested, and for guaranteed jobs as many as the estimate assumes."""
    wanted = job.spec.resources
    asked = max(-(-wanted.cores // max(wanted.devices, 1)), 1)
    if estimate is None or (estimate.core_times and not job.spec.guaranteed):
        return asked
    return max(asked, estimate.cores_per_device)


def bind(job: Job, estimate: Estimate, devices: Iterable[Device]) -> Placement:
    """Placement of ranks on these devices in this order, with the cores and memory that they book."""
    each_cores, each_bytes = needs(job, estimate)
    ranks: list[RankPlace] = []
    cores: dict[HostId, int] = {}
    memory_bytes: dict[HostId, int] = {}
    for number, device in enumerate(devices):
        ranks.append(RankPlace(rank=number, host=device.host, device=device.id))
        cores[device.host] = cores.get(device.host, 0) + max(each_cores, len(device.cores))
        memory_bytes[device.host] = memory_bytes.get(device.host, 0) + each_bytes
    return Placement(tuple(ranks), Booked(cores, memory_bytes))


def per_host(devices: Iterable[Device]) -> dict[HostId, int]:
    """Number of devices on each host."""
    counts: dict[HostId, int] = {}
    for device in devices:
        counts[device.host] = counts.get(device.host, 0) + 1
    return counts


def by_type(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Devices of each type."""
    found: dict[str, list[Device]] = {}
    for device in devices:
        found.setdefault(device.name, []).append(device)
    return found


def shape_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """Number of devices on each host, largest first."""
    return tuple(sorted(per_host(devices).values(), reverse=True))


def held(hosts: Mapping[HostId, Host], places: Iterable[tuple[HostId, DeviceId | None]]) -> list[Device]:
    """Devices at these places, in their order, as far as their hosts still report them."""
    found: list[Device] = []
    known: dict[HostId, dict[DeviceId, Device]] = {}
    for host, device in places:
        if device is None or host not in hosts:
            continue
        if host not in known:
            known[host] = {d.id: d for d in hosts[host].devices}
        if device in known[host]:
            found.append(known[host][device])
    return found


def of_ranks(hosts: Mapping[HostId, Host], attempt: Attempt) -> list[Device]:
    """Devices of an attempt's ranks, by rank."""
    return held(hosts, ((rank.place.host, rank.place.device) for rank in attempt.ranks.values()))
