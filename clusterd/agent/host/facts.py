"""Facts of this host, read from /proc, /sys and the GPU driver."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.host import cgroups, processes
from clusterd.agent.host.gpu_probe import Probe
from clusterd.trusted_paths import account_name

SYSFS = Path("/sys")


def numa_node(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a PCI device; None: not known, or the machine has one node alone."""
    domain, _, rest = pci_address.lower().partition(":")
    text = _read(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")  # NVML's domain has eight digits
    return int(text) if text.isdigit() else None  # -1: none


def cores_near(nodes: Iterable[int], sysfs: Path = SYSFS) -> list[int]:
    """CPU cores of these NUMA nodes."""
    found: set[int] = set()
    for node in nodes:
        for part in _read(sysfs / f"devices/system/node/node{node}/cpulist").split(","):
            first, _, last = part.partition("-")
            if first.isdigit():
                found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def cores_by_gpu(
    gpus: Iterable[Mapping[str, Any]], usable: Iterable[int], sysfs: Path = SYSFS
) -> dict[str, tuple[int, ...]]:
    """Usable cores of each GPU's NUMA node, by uuid; without those whose node is not known."""
    nodes = {gpu["uuid"]: gpu["numa_node"] for gpu in gpus if gpu.get("numa_node") is not None}
    near = {node: set(usable).intersection(cores_near([node], sysfs)) for node in set(nodes.values())}
    return {uuid: tuple(sorted(near[node])) for uuid, node in nodes.items() if near[node]}


def infiniband(sysfs: Path = SYSFS) -> list[dict[str, Any]]:
    """Active ports of RDMA cards, with their speed in Mbit/s; RoCE has the link layer Ethernet."""
    found = []
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _read(port / "rate"))
        if rate is not None and "ACTIVE" in _read(port / "state"):
            card = {"card": port.parts[-3], "port": port.name, "link_layer": _read(port / "link_layer")}
            found.append({**card, "speed_mbit": round(float(rate[1]) * 1000)})
    return found


_SIOCGIFADDR = 0x8915

AMD_DEVICE = Path("/dev/kfd")

Facts = dict[str, Any]


def gather(
    probe: Probe, disk: Path, held: Collection[str] = (), own_tag: str = processes.TAG, amd: Path = AMD_DEVICE
) -> Facts:
    """The Facts of the protocol.

    Args:
        disk: a path on the file system to which jobs write.
        held: uuids of the GPUs on which ranks of this agent run.
        amd: device file of AMD's driver.
        own_tag: environment variable that marks processes of clusterd; every other process on a GPU is foreign.
    """
    memory = memory_bytes()
    gpus, gpu_error = probe.gpus()
    if not gpus and gpu_error is None and amd.exists():
        gpu_error = f"AMD GPUs ({amd}) are not supported"
    gpus = [{**gpu, "numa_node": numa_node(gpu.get("pci_address", ""))} for gpu in gpus]
    for gpu in gpus:
        gpu["processes"] = [_with_owner(process, own_tag, gpu["uuid"] in held) for process in gpu["processes"]]
        gpu["unlisted_bytes"] = 0 if gpu["uuid"] in held else _unlisted_bytes(gpu)
    shm = _space(Path("/dev/shm"))
    return {
        "hostname": socket.gethostname(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "user": account_name(os.getuid()),
        "cpu_cores": cpu_cores(),
        "cpu_ids": sorted(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": memory[0],
        "memory_available_bytes": memory[1],
        "disk_free_bytes": _space(disk)[1],
        "shm_bytes": shm[0],
        "shm_free_bytes": shm[1],
        "boot_id": processes.boot_id(),
        "now_s": time.time(),
        "addresses": addresses(),
        "infiniband": infiniband(),
        "gpus": gpus,
        "gpu_error": gpu_error,
    }


def _with_owner(process: dict[str, Any], own_tag: str, held: bool) -> dict[str, Any]:
    """The process with its user, and whether it belongs to clusterd.

    In a container the driver may report pids of the outer pid namespace, which cannot be looked up. On a GPU that is
    leased to one of clusterd's ranks such a process counts as that rank's.
    """
    pid = process["pid"]
    try:
        user = account_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        # A pid of another namespace, or a process that has just exited.
        return {"pid": pid, "user": "?", "memory_bytes": process["memory_bytes"], "ours": held}
    environment = processes.environment(pid)
    ours = any(entry.startswith(f"{own_tag}=".encode()) for entry in environment.split(b"\0"))
    return {"pid": pid, "user": user, "memory_bytes": process["memory_bytes"], "ours": ours}


def _unlisted_bytes(gpu: dict[str, Any]) -> int:
    """GPU memory in use beyond that of the listed processes: the driver may omit processes of other containers."""
    listed = sum(process["memory_bytes"] or 0 for process in gpu["processes"])
    return max((gpu["memory_used_bytes"] or 0) - listed, 0)


def cpu_cores() -> int:
    """Number of cores this process may use at once: size of the affinity mask, limited by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    for quota in _cgroup_values("cpu.max", "cpu", "cpu.cfs_quota_us"):
        cores = min(cores, max(1, quota))
    return cores


def memory_bytes() -> tuple[int, int]:
    """Total and available memory: the minimum of the machine's and the cgroups'."""
    total, available = processes.machine_memory_bytes()
    for limit, used in _memory_limits():
        if limit < total:
            total = limit
        available = min(available, max(0, limit - used))
    return total, available


def _cgroup_directories(controller: str) -> list[Path]:
    """Directories of this process' cgroup and its ancestors, for cgroup version 2 or 1."""
    found = []
    for controllers, path in cgroups.own_groups():
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        place = Path(path.lstrip("/"))
        found += [root / place, *(root / parent for parent in place.parents)]
    return found


def _cgroup_values(file: str, controller: str, old_file: str) -> list[int]:
    found = []
    for directory in _cgroup_directories(controller):
        values = _read(directory / file).split()
        if len(values) == 2 and values[0].isdigit():
            found.append(int(values[0]) // int(values[1]))
        quota, period = _read(directory / old_file), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) // int(period))
    return found


def _memory_limits() -> list[tuple[int, int]]:
    found = []
    for directory in _cgroup_directories("memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(directory / limit_file), _read(directory / used_file)
            if limit.isdigit() and used.isdigit():
                found.append((int(limit), int(used) - _reclaimable(directory)))
    return found


def _reclaimable(directory: Path) -> int:
    """Bytes of cached file pages, which count as used in a cgroup but are freed when memory is needed."""
    for line in _read(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def addresses() -> list[dict[str, Any]]:
    """IPv4 address of each interface that has one, loopback included, and its speed in Mbit/s if known."""
    found: list[dict[str, Any]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _index, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # the interface is down or has no IPv4 address
            speed = _read(f"/sys/class/net/{name}/speed")  # unreadable or -1 for virtual interfaces
            entry = {"interface": name, "address": socket.inet_ntoa(answer[20:24])}
            found.append({**entry, "speed_mbit": int(speed)} if speed.isdigit() else entry)
    return found


def _space(path: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _os_name() -> str:
    for line in _read("/etc/os-release").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return platform.system()


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _read(path: str | Path) -> str:
    """Text of a file without the spaces around it; empty: it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
