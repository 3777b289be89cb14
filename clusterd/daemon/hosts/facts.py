"""An agent's words in the core's terms: devices to offer, attempts it knows, ranks that ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterd.config import HostOptions
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
"""The number of the attempt that only tells a job's model; the core knows nothing of it."""

FOREIGN_BYTES_MIN = 256 << 20
"""Less than this, used by somebody else, is a display or a monitor: the GPU is offered all the same."""

MESSAGE_LETTERS = 400
"""Of what a rank says of its end, that are kept; its log has all of it."""

UNLISTED_BYTES_MIN = 4 << 30
UNLISTED_SHARE_MIN = 0.1
"""Less than this, used by no process that the driver lists, is its own, or a desktop's; more of a larger GPU."""


def host_facts(host: HostId, facts: Mapping[str, Any], options: HostOptions, address: str) -> HostFacts:
    """What the core knows of a host, from its agent's facts."""
    cores = int(facts["cpu_cores"])
    devices = [_gpu(host, gpu) for gpu in facts.get("gpus", ())]
    count = options.cpu_devices
    if count is None:
        count = 0 if devices else max(cores // max(options.cores_per_device, 1), 1)
    if count and not devices and count > cores:
        cores = count  # a laptop's hosts offer more slots than the machine has cores; each still counts as one
    devices += _cpu_devices(host, count, options, facts, cores)
    near = _interface(facts, address)
    return HostFacts(
        boot_id=str(facts["boot_id"]),
        cpu_cores=cores,
        memory_bytes=int(facts["memory_bytes"]),
        address=address,
        interface=str(near.get("interface", "")),
        link_mbit=int(near.get("speed_mbit", 0)),
        devices=tuple(devices),
    )


def _gpu(host: HostId, gpu: Mapping[str, Any]) -> Device:
    foreign = [p for p in gpu.get("processes", ()) if not p.get("ours") and _used(p) >= FOREIGN_BYTES_MIN]
    said = ", ".join(f"{p.get('user') or 'someone'} (pid {p['pid']})" for p in foreign)
    use = f"in use by {said}" if said else ""
    unlisted = gpu.get("unlisted_bytes", 0)  # an agent from before does not say
    if not use and unlisted >= max(UNLISTED_BYTES_MIN, UNLISTED_SHARE_MIN * gpu["memory_bytes"]):
        use = "in use, the driver does not say by whom"
    return Device(
        id=DeviceId(f"{host}:gpu{gpu['index']}"),
        host=host,
        kind="cuda",
        uuid=str(gpu["uuid"]),
        name=str(gpu["name"]),
        memory_bytes=int(gpu["memory_bytes"]),
        foreign=use,
        exclusive=bool(gpu.get("exclusive", False)),
    )


def _used(process: Mapping[str, Any]) -> int:
    return int(process.get("memory_bytes") or 0)


def _cpu_devices(host: HostId, count: int, options: HostOptions, facts: Mapping[str, Any], cores: int) -> list[Device]:
    each = max(min(options.cores_per_device, cores // count), 1) if count else 0
    ids = facts["cpu_ids"][: int(facts["cpu_cores"])]
    model = str(facts.get("cpu_model") or "CPU")
    return [
        Device(
            id=DeviceId(f"{host}:cpu{index}"),
            host=host,
            kind="cpu",
            uuid=f"{host}-cpu{index}",
            name=f"{model} x{each}" if each > 1 else model,  # slots of another size are devices of another speed
            memory_bytes=int(facts["memory_bytes"]) // count,
            # No pinning where slots outnumber cores: the kernel shares better than we would.
            cores=tuple(ids[index * each : (index + 1) * each]) if count * each <= len(ids) else (),
        )
        for index in range(count)
    ]


def address(facts: Mapping[str, Any], reached_at: str) -> str:
    """Where other hosts reach this one: where we do, if that is its own address; behind a NAT, its first own one."""
    own = [str(entry["address"]) for entry in facts.get("addresses", ())]
    if reached_at in own or reached_at.startswith("127."):
        return reached_at
    outside = [a for a in own if not a.startswith("127.") and ":" not in a]
    return outside[0] if outside else reached_at


def _interface(facts: Mapping[str, Any], address: str) -> Mapping[str, Any]:
    return next((entry for entry in facts.get("addresses", ()) if entry["address"] == address), {})


def attempt_report(report: Mapping[str, Any]) -> AttemptReport:
    """An agent's report of one attempt."""
    return AttemptReport(
        job=JobId(report["job"]),
        attempt=int(report["attempt"]),
        generation=int(report["generation"]),
        ranks=tuple(rank_report(r) for r in report["ranks"]),
    )


def rank_report(report: Mapping[str, Any]) -> RankReport:
    """An agent's report of one rank."""
    if report["state"] == "running":
        return RankReport(rank=int(report["rank"]), end=None)
    return RankReport(rank=int(report["rank"]), end=rank_end(report))


def rank_end(report: Mapping[str, Any]) -> RankEnd:
    """How a rank ended."""
    reason = Reason.LOST if report.get("state") == "lost" else Reason(report["reason"])
    said = (str(report.get("message") or "").splitlines() or [""])[0][:MESSAGE_LETTERS]
    return RankEnd(reason=reason, exit_code=report.get("exit_code"), signal=report.get("signal"), message=said)
