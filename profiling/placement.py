"""Placement of a plan's ranks on hosts, and the resulting network traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HostShare:
    """Part of an allocation on one host."""

    devices: int
    cores: int = 0  # CPU cores of the job; 0: unknown, assumed to be enough
    device_type: str = ""
    speed: float = 1.0  # of a device, relative to the type for which the coefficients hold


@dataclass(frozen=True, slots=True)
class Allocation:
    """Devices of a job in rank order, host by host."""

    hosts: tuple[HostShare, ...]

    def __post_init__(self) -> None:
        if not self.hosts or any(h.devices < 1 or h.cores < 0 or not 0 < h.speed < math.inf for h in self.hosts):
            raise ValueError("an allocation needs at least one host, and each a device and a speed above 0")

    @classmethod
    def of(cls, counts: Sequence[int], *, cores_per_device: int = 0, device_type: str = "") -> Allocation:
        """Allocation of equal devices: `counts` on each host."""
        return cls(tuple(HostShare(n, n * cores_per_device, device_type) for n in counts))

    @property
    def spread(self) -> str:
        """Devices on each host as text, such as ``4+4``."""
        return "+".join(map(str, self.counts))

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices on each host."""
        return tuple(h.devices for h in self.hosts)

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return sum(h.devices for h in self.hosts)

    @property
    def cores(self) -> int:
        """Total number of CPU cores; 0 if unknown for a host."""
        return sum(h.cores for h in self.hosts) if all(h.cores for h in self.hosts) else 0

    def slowest_share(self, dp: int, tp: int, pp: int, shares: Sequence[int]) -> float:
        """Largest ratio of a replica's samples to the speed of its slowest device; `shares`: samples by replica."""
        if all(h.speed == 1.0 for h in self.hosts):
            return float(max(shares))
        speeds = [h.speed for h in self.hosts for _ in range(h.devices)]
        worst = 0.0
        for replica, share in enumerate(shares):
            mine = [speeds[(s * dp + replica) * tp + t] for s in range(pp) for t in range(tp)]
            worst = max(worst, share / min(mine))
        return worst

    def slowest_speed(self) -> float:
        """Relative speed of the slowest device."""
        return min(h.speed for h in self.hosts)


class Traffic(NamedTuple):
    """Network traffic of a plan, as determined by its placement."""

    tp_crosses: bool  # a tensor-parallel group spans hosts
    tp_flows: int  # groups that send through the busiest host's network, if they span hosts
    tp_devices: int  # devices in use on that host
    dp_hosts: int  # most hosts that one data-parallel group spans
    dp_flows: int  # rings through the network of the host with most rings per device; 0 if no ring leaves its host
    dp_devices: int  # devices in use on that host
    pp_local_hops: int  # stage boundaries inside a host
    pp_far_hops: int  # stage boundaries between hosts
    pp_flows: int  # ranks of one stage that send through the busiest host's network
    pp_devices: int  # devices in use on that host


@lru_cache(maxsize=65536)
def traffic(dp: int, tp: int, pp: int, counts: tuple[int, ...]) -> Traffic:
    """Network traffic of a plan whose ranks, numbered as in `plans.plan`, fill the hosts in order.

    Args:
        counts: devices on each host.
    Raises:
        ValueError: the number of devices is not the number of ranks.
    """
    ranks = dp * tp * pp
    if sum(counts) != ranks:
        raise ValueError(f"a plan of {ranks} ranks does not fit an allocation of {sum(counts)} devices")
    if len(counts) == 1:
        return Traffic(False, 0, 1, 1, 0, 1, pp - 1, 0, 0, 1)
    stage = dp * tp
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    tp_crosses = any(start % tp for start in starts[1:-1])
    spans = [0] * pp
    worst_dp, worst_pp = (0.0, 0, 1), (0.0, 0, 1)
    for begin, end in pairwise(starts):
        here, flows = end - begin, 0
        for s in range(begin // stage, (end - 1) // stage + 1):
            low, high = max(begin, s * stage), min(end, (s + 1) * stage)
            spans[s] += 1
            if high - low < stage:
                flows += min(tp, high - low)
        if dp > 1 and flows:
            worst_dp = max(worst_dp, (flows / here, flows, here))
        # One stage sends at a time.
        sending = min(max(min(end, ranks - stage) - max(begin, end - stage), 0), stage)
        if sending:
            worst_pp = max(worst_pp, (sending / here, sending, here))
    host_of = [h for h, count in enumerate(counts) for _ in range(count)]
    far = sum(host_of[s * stage] != host_of[(s + 1) * stage] for s in range(pp - 1))
    least = min(counts)
    return Traffic(
        tp_crosses=tp_crosses and tp > 1,
        tp_flows=math.ceil(least / tp),
        tp_devices=least,
        dp_hosts=max(spans),
        dp_flows=worst_dp[1],
        dp_devices=worst_dp[2],
        pp_local_hops=pp - 1 - far,
        pp_far_hops=far,
        pp_flows=max(worst_pp[1], 1),
        pp_devices=worst_pp[2],
    )
