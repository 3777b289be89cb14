"""CPU cores and host memory that are booked beside devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterd.core.host import Host
from clusterd.types import HostId, RankPlace


@dataclass(frozen=True, slots=True)
class Booked:
    """CPU cores and bytes of host memory, by host."""

    cores: Mapping[HostId, int] = field(default_factory=dict)
    memory_bytes: Mapping[HostId, int] = field(default_factory=dict)

    def on(self, host: HostId) -> tuple[int, int]:
        """Cores and bytes on one host."""
        return self.cores.get(host, 0), self.memory_bytes.get(host, 0)

    def beyond(self, other: Booked) -> Booked:
        """Part that another does not have, host by host."""
        return Booked(_more(self.cores, other.cores), _more(self.memory_bytes, other.memory_bytes))


NOTHING = Booked()


def peak(held: Iterable[tuple[float, float, Booked]]) -> Booked:
    """Largest sum at any instant, host by host, of what is held from one time until another."""
    changes = [change for begin_s, end_s, booked in held for change in ((begin_s, 1, booked), (end_s, -1, booked))]
    now, most = Counter[HostId](), Counter[HostId]()
    now_bytes, most_bytes = Counter[HostId](), Counter[HostId]()
    for _, sign, booked in sorted(changes, key=lambda change: change[:2]):  # what ends makes room for what begins then
        for host in {*booked.cores, *booked.memory_bytes}:
            cores, memory_bytes = booked.on(host)
            now[host] += sign * cores
            now_bytes[host] += sign * memory_bytes
            most[host], most_bytes[host] = max(most[host], now[host]), max(most_bytes[host], now_bytes[host])
    return Booked(most, most_bytes)


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of each rank, and what is booked beside them."""

    ranks: tuple[RankPlace, ...]
    booked: Booked


def book(hosts: Mapping[HostId, Host], booked: Booked) -> None:
    """Count what is booked on its hosts."""
    for host in {*booked.cores, *booked.memory_bytes}:
        _add(hosts[host], booked, 1)


def free(host: Host, booked: Booked) -> None:
    """Count what was booked on one host as free."""
    _add(host, booked, -1)


def _add(host: Host, booked: Booked, sign: int) -> None:
    cores, memory_bytes = booked.on(host.id)
    host.cores_used += sign * cores
    host.memory_used_bytes += sign * memory_bytes


def _more(these: Mapping[HostId, int], those: Mapping[HostId, int]) -> dict[HostId, int]:
    return {host: more for host, count in these.items() if (more := max(count - those.get(host, 0), 0))}
