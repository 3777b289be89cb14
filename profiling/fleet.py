"""Device types of a cluster, and the shapes of allocation that a job may get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from profiling.coefficients import Prior
from profiling.fit import DEFAULT_FIT, FitOptions
from profiling.placement import Allocation, HostShare

EVERY_COUNT_UP_TO = 16
"""Larger allocations are looked at in powers of two and whole hosts."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """All devices of one name in the cluster."""

    name: str
    kind: str  # "cuda" or "cpu"
    per_host: tuple[int, ...]  # of it on each host that has some, most first
    memory_bytes: int  # of one device, the smallest
    cores_per_device: int  # host CPU cores that come with one; 0: not known
    cores_most: int = 0  # of a host, for jobs to share; 0: devices have their own, or it is not known

    @property
    def devices(self) -> int:
        """In all."""
        return sum(self.per_host)

    def allocation(self, shape: Iterable[int], cores: int | None = None) -> Allocation:
        """So many devices on each of so many hosts, each with so many cores, by default its share of the host's."""
        each = self.cores_per_device if cores is None else cores
        return Allocation(tuple(HostShare(n, n * each, self.name) for n in shape))


def shapes(fleet: DeviceType, most: int | None = None) -> list[tuple[int, ...]]:
    """Shapes that the hosts allow: for each count the fewest hosts, and even spreads over more; small ones all.

    Args:
        most: devices, at most; default: all there are.
    """
    limit = min(fleet.devices, most or fleet.devices)
    found: dict[tuple[int, ...], None] = {}
    for count in _counts(fleet, limit):
        found[_packed(fleet.per_host, count)] = None
        for hosts in range(2, min(len(fleet.per_host), count) + 1):
            even = tuple(sorted((count // hosts + (i < count % hosts) for i in range(hosts)), reverse=True))
            if (hosts <= 4 or count % hosts == 0) and _allowed(fleet.per_host, even):
                found[even] = None
        if count <= 4:
            found.update(dict.fromkeys(s for s in _partitions(count) if _allowed(fleet.per_host, s)))
    return list(found)


def _counts(fleet: DeviceType, limit: int) -> list[int]:
    counts = set(range(1, min(EVERY_COUNT_UP_TO, limit) + 1))
    power = EVERY_COUNT_UP_TO
    while power <= limit:
        counts.add(power)
        power *= 2
    whole = 0
    for here in fleet.per_host:
        whole += here
        if whole <= limit:
            counts.add(whole)
    return sorted(counts)


def _packed(per_host: tuple[int, ...], count: int) -> tuple[int, ...]:
    exact = [n for n in per_host if n >= count]
    if exact:
        return (count,)
    chosen: list[int] = []
    left = count
    for here in per_host:
        if left:
            chosen.append(min(here, left))
            left -= chosen[-1]
    return tuple(sorted(chosen, reverse=True))


def _allowed(per_host: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(shape) <= len(per_host) and all(n <= here for n, here in zip(shape, per_host, strict=False))


def _partitions(count: int, most: int | None = None) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [
        (first, *rest)
        for first in range(min(count, most or count), 0, -1)
        for rest in _partitions(count - first, first)
    ]


def beliefs(kind: str) -> FitOptions:
    """Noise and misfit assumed for a kind of device.

    Ranks on CPU devices share caches, memory and often cores, which the structure does not know: what it foretold there
    was off by 15 to 25% where seven plans had been measured.
    """
    return replace(DEFAULT_FIT, noise=0.05, misfit=0.12) if kind == "cpu" else DEFAULT_FIT


def prior(kind: str, known: dict[str, float] | None = None) -> Prior:
    """Beliefs about a kind of device before anything is measured; `known` are what probes of it found.

    A CPU core does 20 to 60 billion operations a second and moves 5 to 20 GB/s; gloo sends a few GB/s through the
    loopback interface in messages of a tenth of a millisecond.
    """
    if kind != "cpu":
        wide = Prior.typical()
        for name, value in (known or {}).items():
            wide = wide.holding(name, value * (0.6 if name == "compute_rate" else 1.0), 0.6)
        return wide
    cpu = {
        "compute_rate": 40e9,
        "local_rate": 1.5e9,
        "network_rate": 1e9,
        "local_latency_s": 1.5e-4,
        "network_latency_s": 1e-3,
        "update_rate": 4e8,
        "host_update_rate": 4e8,
        "thread_update_rate": 4e8,
        "copy_rate": 4e9,
        "offload_whole_rate": 1e9,
        "launch_s": 2e-4,
        "step_s": 1e-3,
        "offload_s": 1e-3,
    }
    wide = Prior.typical(known=cpu, known_width=0.9).holding("crowding", 0.3, 0.5).holding("tp_messages", 1.0, 1.0)
    # FSDP gathers and scatters block by block, and each takes milliseconds of Python on a core that has none to spare.
    wide = wide.holding("gather_messages", 10.0, 0.8).holding("scatter_messages", 15.0, 0.8)
    for name, value in (known or {}).items():
        # A probe is the best case of one kernel; a model's are smaller and many.
        wide = wide.holding(name, value * (0.6 if name == "compute_rate" else 1.0), 0.7)
    return wide
