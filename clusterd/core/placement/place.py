"""Fourth stage for jobs without a performance model: exact devices for a number of ranks.

One host where the ranks fit, else as few hosts as possible. Tensor-parallel shards never span hosts, as they
communicate most. Among equal hosts the fullest is taken, so that whole hosts stay free for wide jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from clusterd.core.booked import Booked, Placement
from clusterd.core.ledger import HostFree, Ledger
from clusterd.core.state import Job
from clusterd.types import Device, HostId, JobKind, RankPlace


def candidates(job: Job, free: Ledger, least: int = 0) -> list[HostFree]:
    """Usable hosts that the job admits, in a fixed order, with at least so many free devices."""
    names = sorted(name for name in free.hosts if free.count_on(name) >= least)
    return [free.on_host(name) for name in names if job.admits(free.hosts[name])]


def kinds_for(job: Job) -> tuple[str, ...]:
    """Kinds of devices that the job may run on, the better first; a job without batch shares never mixes kinds."""
    kind = job.spec.resources.kind
    return ("cuda", "cpu") if kind is None else (kind,)


def fitting(job: Job, host: HostFree, kind: str) -> list[Device]:
    """Free devices of one kind for which the host also has free cores and memory."""
    wanted = job.spec.resources
    here = [d for d in host.devices if d.kind == kind]
    devices = [d for d in here if wanted.admits(d.kind, d.name, d.memory_bytes, d.compute_capability)]
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


def place(job: Job, free: Ledger, count: int, group: int, nodes: int | None) -> Placement | None:
    """Find devices for `count` ranks, in groups of `group` that stay on one host; None: they are not free.

    A job's devices are all of one kind: mixed kinds need unequal shares, which the caller fixes in the plan.

    Args:
        nodes: hosts over which they are spread evenly; None: as few as possible.
    """
    if count == 0:
        return _cores_only(job, free, nodes or 1)
    if free.total < count:
        return None
    here = candidates(job, free, group if nodes is None else count // nodes)
    for kind in kinds_for(job):
        by_host = [(h, fitting(job, h, kind)) for h in here]
        chosen = _pack(by_host, count, group) if nodes is None else _spread_evenly(by_host, count, nodes)
        if chosen:
            return place_on(job, [device for _, devices in chosen for device in devices])
    return None


def place_on(job: Job, devices: Iterable[Device]) -> Placement:
    """Placement of ranks on exactly these devices, in this order."""
    cores_each, memory_each = per_device(job)
    ranks: list[RankPlace] = []
    cores: dict[HostId, int] = {}
    memory: dict[HostId, int] = {}
    for number, device in enumerate(devices):
        ranks.append(RankPlace(rank=number, host=device.host, device=device.id))
        cores[device.host] = cores.get(device.host, 0) + _cores(device, cores_each)
        memory[device.host] = memory.get(device.host, 0) + memory_each
    return Placement(tuple(ranks), Booked(cores, memory))


def place_beside(job: Job, free: Ledger) -> Placement | None:
    """Place on a device that jobs share, that of the most jobs; None: none has a place, cores and memory left."""
    wanted = job.spec.resources
    cores_each, memory_each = per_device(job)
    for shared in sorted(free.shared.values(), key=lambda some: (-some.jobs, some.device.id)):
        device, host = shared.device, shared.device.host
        if shared.jobs >= wanted.share or host not in free.hosts or not job.admits(free.hosts[host]):
            continue
        if not wanted.admits(device.kind, device.name, device.memory_bytes, device.compute_capability):
            continue
        if free.cores[host] >= cores_each and free.memory_bytes[host] >= memory_each:
            booked = Booked({host: cores_each}, {host: memory_each})
            return Placement((RankPlace(rank=0, host=host, device=device.id),), booked)
    return None


def _spread_evenly(
    by_host: list[tuple[HostFree, list[Device]]], count: int, nodes: int
) -> list[tuple[HostFree, list[Device]]]:
    """As many devices of each of so many hosts, the fullest hosts that have them; empty: they are not free."""
    each = count // nodes
    fit = sorted(((h, d) for h, d in by_host if len(d) >= each), key=lambda item: (len(item[1]), item[0].host.id))
    return [(host, devices[:each]) for host, devices in fit[:nodes]] if len(fit) >= nodes else []


def holds(job: Job, counts: Iterable[int]) -> bool:
    """True where hosts with so many usable devices hold what the job requests."""
    wanted = job.spec.resources
    if job.spec.kind is JobKind.COMMAND:
        return sum(count >= wanted.per_node for count in counts) >= wanted.nodes
    return sum(counts) >= max(wanted.devices, 1)


def _pack(by_host: list[tuple[HostFree, list[Device]]], count: int, group: int) -> list[tuple[HostFree, list[Device]]]:
    exact = [(h, d) for h, d in by_host if len(d) >= count]
    if exact:
        host, devices = min(exact, key=lambda item: (len(item[1]), item[0].host.id))
        return [(host, devices[:count])]
    chosen: list[tuple[HostFree, list[Device]]] = []
    left = count
    for host, devices in sorted(by_host, key=lambda item: (-len(item[1]), item[0].host.id)):
        take = min(left, len(devices) - len(devices) % group)
        if take:
            chosen.append((host, devices[:take]))
            left -= take
    return chosen if left == 0 else []


def _cores_only(job: Job, free: Ledger, nodes: int) -> Placement | None:
    cores, memory_bytes = per_device(job)
    fits = [h for h in candidates(job, free) if h.cores >= max(cores, 1) and h.memory_bytes >= memory_bytes]
    if len(fits) < nodes:
        return None
    hosts = [h.host.id for h in sorted(fits, key=lambda h: (len(h.host.devices), h.cores, h.host.id))[:nodes]]
    ranks = tuple(RankPlace(rank=number, host=host, device=None) for number, host in enumerate(hosts))
    return Placement(ranks, Booked(dict.fromkeys(hosts, max(cores, 1)), dict.fromkeys(hosts, memory_bytes)))


def per_device(job: Job) -> tuple[int, int]:
    """Cores and bytes of host memory that a job requests per device; of a job without devices: per node."""
    resources = job.spec.resources
    count = resources.devices or resources.nodes
    return -(-resources.cores // count), -(-resources.memory_bytes // count)


def _cores(device: Device, asked: int) -> int:
    return max(len(device.cores), asked, 1)
