"""NUMA nodes of a host's GPUs, and its InfiniBand ports, from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def with_numa_nodes(gpus: Iterable[Mapping[str, Any]], sysfs: Path = SYSFS) -> list[dict[str, Any]]:
    """The GPUs with the NUMA node of each."""
    return [{**gpu, "numa_node": numa_node(gpu.get("pci_address", ""), sysfs)} for gpu in gpus]


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


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
