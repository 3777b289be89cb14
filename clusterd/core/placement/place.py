"""Fourth stage: which devices exactly.

One host where it fits, else as few hosts as possible; shards of one layer (tensor parallelism) never across hosts, for
they talk most. Among equals the host that the job leaves fullest, so that whole hosts stay free for wide jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clusterd.core.state import Job
from clusterd.core.view import Free, HostFree
from clusterd.types import Device, HostId, RankPlace


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each rank goes, and the cores and memory it books there."""

    ranks: tuple[RankPlace, ...]
    cores: dict[HostId, int]
    memory_bytes: dict[HostId, int]


def candidates(job: Job, free: Free) -> list[HostFree]:
    """Usable hosts that the job admits, in a fixed order."""
    return [f for name, f in sorted(free.hosts.items()) if job.admits(name)]


def kinds_for(job: Job) -> tuple[str, ...]:
    """Kinds of devices that the job may run on, the better first; never on two at once, where nobody chose shares."""
    kind = job.spec.resources.kind
    return ("cuda", "cpu") if kind is None else (kind,)


def fitting(job: Job, host: HostFree, kind: str) -> list[Device]:
    """Free devices of one kind that the host's free cores and memory can serve."""
    devices = [d for d in host.devices if d.kind == kind]
    cores_each, memory_each = per_device(job)
    usable: list[Device] = []
    cores, memory = host.cores, host.memory_bytes
    for device in devices:
        cores -= _cores(device, cores_each)
        memory -= memory_each
        if cores < 0 or memory < 0:
            break
        usable.append(device)
    return usable


def place(job: Job, free: Free, count: int, group: int, single_host: bool) -> Placement | None:
    """Devices for `count` ranks, in groups of `group` that stay on one host; None when they are not free.

    A job's devices are all of one kind: mixed kinds need unequal shares, which the caller fixes in the plan.
    """
    if count == 0:
        return _cores_only(job, free)
    for kind in kinds_for(job):
        by_host = [(h, fitting(job, h, kind)) for h in candidates(job, free)]
        chosen = _pack(by_host, count, group, single_host)
        if chosen:
            return place_on(job, [device for _, devices in chosen for device in devices])
    return None


def place_on(job: Job, devices: Iterable[Device]) -> Placement:
    """Ranks on exactly these devices, in this order."""
    cores_each, memory_each = per_device(job)
    ranks: list[RankPlace] = []
    cores: dict[HostId, int] = {}
    memory: dict[HostId, int] = {}
    for number, device in enumerate(devices):
        ranks.append(RankPlace(rank=number, host=device.host, device=device.id))
        cores[device.host] = cores.get(device.host, 0) + _cores(device, cores_each)
        memory[device.host] = memory.get(device.host, 0) + memory_each
    return Placement(tuple(ranks), cores, memory)


def _pack(
    by_host: list[tuple[HostFree, list[Device]]], count: int, group: int, single_host: bool
) -> list[tuple[HostFree, list[Device]]]:
    exact = [(h, d) for h, d in by_host if len(d) >= count]
    if exact:
        host, devices = min(exact, key=lambda item: (len(item[1]), item[0].host.id))
        return [(host, devices[:count])]
    if single_host:
        return []
    chosen: list[tuple[HostFree, list[Device]]] = []
    left = count
    for host, devices in sorted(by_host, key=lambda item: (-len(item[1]), item[0].host.id)):
        take = min(left, len(devices) - len(devices) % group)
        if take:
            chosen.append((host, devices[:take]))
            left -= take
    return chosen if left == 0 else []


def _cores_only(job: Job, free: Free) -> Placement | None:
    resources = job.spec.resources
    cores = max(resources.cpus, 1)
    fits = [h for h in candidates(job, free) if h.cores >= cores and h.memory_bytes >= resources.memory_bytes]
    if not fits:
        return None
    host = min(fits, key=lambda h: (len(h.host.devices), h.cores, h.host.id)).host.id
    return Placement((RankPlace(rank=0, host=host, device=None),), {host: cores}, {host: resources.memory_bytes})


def per_device(job: Job) -> tuple[int, int]:
    """Cores and bytes of host memory that a job asks for beside each device; of one without devices, in all."""
    resources = job.spec.resources
    count = max(resources.devices, 1)
    return -(-resources.cpus // count), -(-resources.memory_bytes // count)


def _cores(device: Device, asked: int) -> int:
    return max(len(device.cores), asked, 1)
