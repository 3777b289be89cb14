"""Clusters as text: ``8x8:a800`` is 8 hosts with 8 devices each; several kinds are joined by ``+``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterd.simulate.errors import InputError
from clusterd.types import Device, DeviceId, HostFacts, HostId

_GIB = 1 << 30
_PART = re.compile(r"(\d+)x(\d+):([A-Za-z0-9_.-]+)")


@dataclass(frozen=True, slots=True)
class Group:
    """Hosts of one kind."""

    hosts: int
    devices: int  # on each
    device_type: str
    cores_per_device: int = 12
    memory_bytes_per_device: int = 200 * _GIB


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts by group, in the order of the text."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return "+".join(f"{g.hosts}x{g.devices}:{g.device_type}" for g in self.groups)

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return sum(g.hosts * g.devices for g in self.groups)

    @property
    def types(self) -> dict[str, int]:
        """Number of devices of each type."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.device_type] = found.get(group.device_type, 0) + group.hosts * group.devices
        return found

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Device counts of the hosts, by type."""
        found: dict[str, list[int]] = {}
        for group in self.groups:
            found.setdefault(group.device_type, []).extend([group.devices] * group.hosts)
        return found

    def facts(self) -> dict[HostId, HostFacts]:
        """Facts that each host would report."""
        found: dict[HostId, HostFacts] = {}
        for group in self.groups:
            for _ in range(group.hosts):
                host = HostId(f"h{len(found):03d}")
                devices = tuple(
                    Device(
                        id=DeviceId(f"{host}:gpu{n}"),
                        host=host,
                        kind="cuda",
                        uuid=f"{host}-{n}",
                        name=group.device_type,
                        memory_bytes=80 * _GIB,
                    )
                    for n in range(group.devices)
                )
                found[host] = HostFacts(
                    boot_id="simulated",
                    cpu_cores=group.devices * group.cores_per_device,
                    memory_bytes=group.devices * group.memory_bytes_per_device,
                    address="",
                    devices=devices,
                )
        return found


def parse_cluster(text: str) -> Cluster:
    """Parse the description of a cluster.

    Raises:
        InputError: the text is no description of a cluster.
    """
    groups: list[Group] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise InputError(
                f"--cluster {text}: {part.strip()!r} is no group of hosts; write HOSTSxDEVICES:TYPE, as in 8x8:a800"
            )
        hosts, devices = int(match[1]), int(match[2])
        if not 1 <= hosts <= 100_000 or not 1 <= devices <= 1024:
            raise InputError(f"--cluster {text}: {part.strip()!r} needs at least 1 host and 1 to 1024 devices on each")
        groups.append(Group(hosts, devices, match[3]))
    return Cluster(tuple(groups))
