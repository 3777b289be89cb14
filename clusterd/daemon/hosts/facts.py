"""Conversion of agents' messages to the core's types: devices to offer, attempts, exit reports."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from clusterd.config import HostOptions
from clusterd.protocol import agent
from clusterd.protocol.messages import from_map
from clusterd.types import (
    AttemptReport,
    Device,
    DeviceId,
    HostFacts,
    HostId,
    JobId,
    RankEnd,
    RankReport,
    Reason,
)

DESCRIPTION = 0
"""Number of the attempt that inspects a job's model; the core does not know it."""

FOREIGN_BYTES_MIN = 256 << 20
"""Foreign use below this is a display or a monitoring tool: the GPU is offered all the same."""

MESSAGE_LETTERS = 400
"""Length to which a rank's exit message is cut; its log has all of it."""

NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Rate of one link in one direction, by version of NVLink."""

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Rate of one lane in one direction, by generation of PCIe."""

UNLISTED_BYTES_MIN = 4 << 30
UNLISTED_SHARE_MIN = 0.1
"""Memory below this that no listed process uses is the driver's own, or a desktop's; a share of a larger GPU."""


def host_facts(
    host: HostId, reported: Mapping[str, Any], options: HostOptions, address: str,
    ours: Container[int] = (), elsewhere: Mapping[str, HostId] = MappingProxyType({}),
) -> HostFacts:  # fmt: skip
    """Facts that the core needs, from the map that the host's agent reported.

    Args:
        ours: processes that are ranks of other accounts, which the agent takes for foreign.
        elsewhere: hosts of this machine that offer a GPU already, by its uuid, as embedded hosts see the same GPUs.

    Raises:
        ProtocolError: the map lacks a field, or one is of another type.
    """
    facts = from_map(agent.Facts, reported, "facts")
    devices = [_gpu(host, gpu, ours, elsewhere.get(gpu.uuid, "")) for gpu in facts.gpus]
    cores, count = facts.cpu_cores, options.cpu_devices
    if count is None:
        # A host whose GPUs cannot be read has GPUs: its jobs must not silently train on CPUs.
        count = 0 if devices or facts.gpu_error else max(cores // max(options.cores_per_device, 1), 1)
    if count and not devices and count > cores:
        cores = count  # embedded hosts may offer more slots than the machine has cores; each still counts as one
    devices += _cpu_devices(host, count, options, facts, cores)
    near = next((entry for entry in facts.addresses if entry.address == address), None)
    return HostFacts(
        boot_id=facts.boot_id,
        gpu_error=facts.gpu_error or "",
        runtimes=dict(facts.runtimes),
        cpu_cores=cores,
        memory_bytes=facts.memory_bytes,
        address=address,
        interface=near.interface if near is not None else "",
        link_mbit=near.speed_mbit if near is not None else 0,
        rdma_mbit=min((port.speed_mbit for port in facts.infiniband), default=0),
        gpu_link_bytes_per_s=_gpu_link_bytes_per_s(facts.gpus),
        devices=tuple(
            _excluded(device) if _number(device) in options.exclude_devices else device for device in devices
        ),
        labels=options.labels,
    )


def _gpu_link_bytes_per_s(gpus: Sequence[agent.GpuRow]) -> float:
    """Peak rate in one direction of the slowest link in a ring over a host's GPUs; 0: unknown, or no ring."""
    uuids = {gpu.uuid for gpu in gpus}
    if len(gpus) < 2 or any(gpu.slice is not None for gpu in gpus):
        return 0.0
    if all(uuids <= {gpu.uuid, *gpu.nvlink_peers} for gpu in gpus):
        return min(gpu.nvlinks * NVLINK_BYTES_PER_S.get(gpu.nvlink_version, 25e9) for gpu in gpus)
    return min(slot_bytes_per_s(gpu.pcie_generation, gpu.pcie_width) for gpu in gpus)


def slot_bytes_per_s(pcie_generation: int, pcie_width: int) -> float:
    """Rate of a PCIe slot in one direction; 0: not reported."""
    return pcie_width * PCIE_LANE_BYTES_PER_S.get(pcie_generation, 0.0)


def _number(device: Device) -> int:
    """Number of a device on its host; of a MIG slice, that of its GPU."""
    number, _, _slice = device.id.rpartition(":")[2].removeprefix("gpu").removeprefix("cpu").partition(".")
    return int(number)


def _excluded(device: Device) -> Device:
    return replace(device, excluded=True, foreign="excluded by exclude_devices in the configuration")


@dataclass(frozen=True, slots=True)
class OutsideProcess:
    """A process on a GPU that belongs to no job."""

    host: HostId
    device: DeviceId
    pid: int
    user: str  # empty: not known
    memory_bytes: int


def outside_processes(host: HostId, reported: Mapping[str, Any], ours: Container[int]) -> tuple[OutsideProcess, ...]:
    """Processes outside the queue, of the map that the host's agent reported."""
    return tuple(
        OutsideProcess(host, _device_id(host, gpu), process.pid, process.user or "", process.memory_bytes or 0)
        for gpu in from_map(agent.Facts, reported, "facts").gpus
        for process in _foreign(gpu, ours)
    )


def _foreign(gpu: agent.GpuRow, ours: Container[int]) -> list[agent.ProcessRow]:
    return [
        process
        for process in gpu.processes
        if not process.ours and process.pid not in ours and (process.memory_bytes or 0) >= FOREIGN_BYTES_MIN
    ]


def _device_id(host: HostId, gpu: agent.GpuRow) -> DeviceId:
    return DeviceId(f"{host}:gpu{gpu.index}" + (f".{gpu.slice}" if gpu.slice is not None else ""))


def _gpu(host: HostId, gpu: agent.GpuRow, ours: Container[int], offered_by: str) -> Device:
    users = ", ".join(f"{process.user or 'someone'} (pid {process.pid})" for process in _foreign(gpu, ours))
    use = f"in use by {users}" if users else ""
    if not use and (gpu.unlisted_bytes or 0) >= max(UNLISTED_BYTES_MIN, UNLISTED_SHARE_MIN * gpu.memory_bytes):
        use = "in use, the driver does not say by whom"
    if offered_by:
        use = f"{offered_by} offers this GPU, on the same machine"
    return Device(
        id=_device_id(host, gpu),
        host=host,
        kind="cuda",
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        foreign=use,
        exclusive=gpu.exclusive,
        offered_by=offered_by,
        compute_capability=gpu.compute_capability,
        fault=gpu.fault,
    )


def _cpu_devices(host: HostId, count: int, options: HostOptions, facts: agent.Facts, cores: int) -> list[Device]:
    each = max(min(options.cores_per_device, cores // count), 1) if count else 0
    ids = facts.cpu_ids[: facts.cpu_cores]
    model = facts.cpu_model or "CPU"
    return [
        Device(
            id=DeviceId(f"{host}:cpu{index}"),
            host=host,
            kind="cpu",
            uuid=f"{host}-cpu{index}",
            name=f"{model} x{each}" if each > 1 else model,  # slots of another size are devices of another speed
            memory_bytes=facts.memory_bytes // count,
            # No pinning where slots outnumber cores: the kernel shares better.
            cores=tuple(ids[index * each : (index + 1) * each]) if count * each <= len(ids) else (),
        )
        for index in range(count)
    ]


def address(reported: Mapping[str, Any], reached_at: str) -> str:
    """Address under which other hosts reach this one.

    The one that the daemon uses, if it is the host's own; behind a NAT, the host's first own address. A host that the
    daemon does not reach (``reached_at`` is empty) and that has none is reached by itself alone.

    Raises:
        ProtocolError: as for `host_facts`.
    """
    own = [entry.address for entry in from_map(agent.Facts, reported, "facts").addresses]
    if reached_at in own or reached_at.startswith("127."):
        return reached_at
    outside = [a for a in own if not a.startswith("127.") and ":" not in a]
    return outside[0] if outside else reached_at or "127.0.0.1"


def attempt_report(row: agent.AttemptRow) -> AttemptReport:
    """Report of one attempt in the core's terms."""
    return AttemptReport(
        job=JobId(row.job),
        attempt=row.attempt,
        generation=row.generation,
        ranks=tuple(rank_report(rank) for rank in row.ranks),
    )


def rank_report(row: agent.RankRow) -> RankReport:
    """Report of one rank in the core's terms."""
    return RankReport(rank=row.rank, end=None if row.state == "running" else rank_end(row))


def rank_end(row: agent.RankRow | agent.RankExited) -> RankEnd:
    """Exit report of a rank in the core's terms; only the first line of its message is kept."""
    is_lost = isinstance(row, agent.RankRow) and row.state == "lost"
    message = (row.message.splitlines() or [""])[0][:MESSAGE_LETTERS]
    reason = Reason.LOST if is_lost or row.reason is None else row.reason
    return RankEnd(reason=reason, exit_code=row.exit_code, signal=row.signal, message=message)
