"""Device types of a cluster, the shapes of allocations on them, and data sheets of GPUs.

By the data sheets it is known how fast a type of GPU is beside another, before anything ran on it. What a training step
is bound by (matrix products in half or in single precision, memory) differs by model, and is not known for one that ran
on a single type. So the speed-up is the geometric mean of the three ratios, and their spread is its uncertainty: small
between cards of one generation, large between those that were built for different work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

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


UNEXPLAINED = 0.15
"""Standard deviation of the logarithm of a speed-up between cards whose three ratios are equal: clocks under load,
cooling, kernels that are tuned for one of them."""


@dataclass(frozen=True, slots=True)
class Card:
    """Peak rates of one GPU, without sparsity."""

    half: float  # TFLOP/s of matrix products in half precision, sums in single precision
    single: float  # TFLOP/s in single precision, without TF32
    memory: float  # GB/s


CARDS: Mapping[str, Card] = {
    "K80": Card(4.4, 4.4, 240),  # one of the two GPUs on the board
    "P100": Card(18.7, 9.3, 732),
    "V100": Card(125, 15.7, 900),
    "V100 PCIE": Card(112, 14, 900),
    "GTX 1080 Ti": Card(11.3, 11.3, 484),
    "RTX 2080 Ti": Card(53.8, 13.4, 616),
    "TITAN RTX": Card(130.5, 16.3, 672),
    "Quadro RTX 8000": Card(130.5, 16.3, 672),
    "T4": Card(65, 8.1, 320),
    "A10": Card(125, 31.2, 600),
    "A10G": Card(70, 35, 600),
    "A30": Card(165, 10.3, 933),
    "A40": Card(149.7, 37.4, 696),
    "A100": Card(312, 19.5, 2039),
    "A100 40GB": Card(312, 19.5, 1555),
    "A800": Card(312, 19.5, 2039),
    "RTX A4000": Card(76.7, 19.2, 448),
    "RTX A5000": Card(111.1, 27.8, 768),
    "RTX A6000": Card(154.8, 38.7, 768),
    "RTX 3080": Card(59.5, 29.8, 760),
    "RTX 3090": Card(71, 35.6, 936),
    "RTX 4080": Card(97.5, 48.7, 717),
    "RTX 4090": Card(165.2, 82.6, 1008),
    "RTX 5090": Card(209.5, 104.8, 1792),
    "RTX 6000 Ada": Card(364, 91.1, 960),
    "L4": Card(121, 30.3, 300),
    "L40": Card(181, 90.5, 864),
    "L40S": Card(362, 91.6, 864),
    "H100": Card(989, 67, 3350),
    "H100 PCIe": Card(756, 51, 2000),
    "H800": Card(989, 67, 3350),
    "H20": Card(148, 44, 4000),
    "H200": Card(989, 67, 4800),
    "GH200": Card(990, 67, 4000),
    "B200": Card(2250, 75, 8000),
}
"""Cards by the words of their name that NVML reports too; the vendors' data sheets."""


def card(name: str) -> Card | None:
    """Data sheet of a GPU by its name as NVML reports it; None if none is known, as of a MIG slice.

    The entry with the most words of which each stands in the name.
    """
    words = _words(name)
    if "mig" in words:  # a part of the card, at a part of its rates
        return None
    matching = [entry for entry in CARDS if _words(entry) <= words]
    return CARDS[max(matching, key=lambda entry: len(_words(entry)))] if matching else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name.lower()))


def speed_up(new: str, known: Iterable[str]) -> tuple[str, float, float] | None:
    """The type among `known` that tells most about `new`, and what it tells; None without data sheets.

    Returns:
        its name, the logarithm of the speed of `new` relative to it, and that logarithm's standard deviation.
    """
    card_of_new = card(new)
    found = []
    for name in known:
        if card_of_new is not None and (other := card(name)) is not None:
            ratios = np.log([getattr(card_of_new, f) / getattr(other, f) for f in ("half", "single", "memory")])
            found.append((name, float(ratios.mean()), float(np.hypot(ratios.std(), UNEXPLAINED))))
    return min(found, key=lambda one: (one[2], one[0]), default=None)
