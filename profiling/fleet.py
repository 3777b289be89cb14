"""Device types of a cluster, and the shapes of allocations on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clusterd.profiling.coefficients import Prior
from clusterd.profiling.fit import DEFAULT_FIT, FitOptions
from clusterd.profiling.placement import Allocation, HostShare

EVERY_COUNT_UP_TO = 16
"""Every number of devices up to this one is considered; above it, powers of two and whole hosts."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """All devices of one name in the cluster."""

    name: str
    kind: str  # "cuda" or "cpu"
    per_host: tuple[int, ...]  # devices on each host that has some, largest first
    memory_bytes: int  # of the smallest device
    cores_per_device: int  # a device's share of its host's CPU cores; 0 if unknown
    cores_most: int = 0  # CPU cores of a host that jobs share; 0 if unknown or if a device is CPU cores

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return sum(self.per_host)

    def allocation(self, shape: Iterable[int], cores: int | None = None) -> Allocation:
        """Allocation with `shape` devices on each host, and `cores` per device (default: the device's share)."""
        each = self.cores_per_device if cores is None else cores
        return Allocation(tuple(HostShare(n, n * each, self.name) for n in shape))


def shapes(fleet: DeviceType, most: int | None = None) -> list[tuple[int, ...]]:
    """Shapes of allocations that the hosts allow, as devices on each host, largest first.

    For each number of devices: packed on the fewest hosts, and spread evenly over more; up to 4 devices, every shape.

    Args:
        most: largest number of devices; default: all devices.
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
    """Noise assumed for a kind of device: ranks on CPU devices share caches, memory and often cores."""
    return replace(DEFAULT_FIT, noise=0.05) if kind == "cpu" else DEFAULT_FIT


def prior(kind: str, known: dict[str, float] | None = None) -> Prior:
    """Prior for a kind of device; `known`: figures from probes by coefficient.

    A CPU core does 20 to 60 billion operations per second and moves 5 to 20 GB/s; gloo sends a few GB/s over the
    loopback interface, with a latency of 0.1 ms per message.
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
    # FSDP gathers and scatters block by block, and each block takes milliseconds of Python on a busy core.
    wide = wide.holding("gather_messages", 10.0, 0.8).holding("scatter_messages", 15.0, 0.8)
    for name, value in (known or {}).items():
        # A probe measures the best case of one large kernel; a model runs many smaller ones.
        wide = wide.holding(name, value * (0.6 if name == "compute_rate" else 1.0), 0.7)
    return wide
