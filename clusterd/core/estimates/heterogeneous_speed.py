"""Predicted speed of a plan on mixed device types, from its estimates on each type alone.

Every replica lies on one type and takes a share of the batch; a step lasts as long as the slowest replica. A replica is
taken to be as fast per sample as it is where all hosts of the shape are of its type: so the traffic between replicas is
counted once, at the pace of the replica's own type. Shares follow speed, in whole samples, and make the slowest replica
as fast as whole samples allow (proportional workload assignment of sampling-based placement, TPDS 35(6), 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterd.core.ledger import shape_of
from clusterd.core.performance_table import Estimate, PerformanceTable, evenly
from clusterd.plans.plan import Plan, even_shares
from clusterd.types import Device

UNBOUNDED = 1 << 60


def predict_heterogeneous(
    alone: Mapping[str, Estimate], device_types: Sequence[str], global_batch: int, most: Mapping[str, int] | None = None
) -> Estimate | None:
    """Estimate of a plan with the best batch shares on hosts of these types; None: it cannot be split so.

    Args:
        alone: one plan on one shape by device type, its batch cut as evenly as can be.
        device_types: of each host of the shape.
        most: samples that a replica may take, by type; absent: all.
    """
    base = alone[device_types[0]]
    owners = _replica_types(evenly(base.plan), base.shape, device_types)
    if owners is None:
        return None
    slowness = [alone[name].step_time_s / _largest_share(alone[name].plan, global_batch) for name in owners]
    limits = [(most or {}).get(name, UNBOUNDED) for name in owners]
    # A micro-batch has at least one sample.
    shares = proportional(slowness, global_batch, base.plan.accumulation, limits)
    if shares is None:
        return None
    plan = evenly(base.plan) if len(set(shares)) == 1 else replace(base.plan, shares=shares)
    return _estimate(alone, plan, shares, owners, device_types, global_batch)


def believed(table: PerformanceTable, plan: Plan, devices: Sequence[Device]) -> Estimate | None:
    """Estimate of a plan on these devices, by rank; None: unknown."""
    names = {device.name for device in devices}
    known = table.of(plan, names.pop(), shape_of(devices)) if len(names) == 1 else None
    if known is not None or not (names or plan.shares):
        return known
    return pace(table, plan, [(device.host, device.name) for device in devices])


def pace(table: PerformanceTable, plan: Plan, places: Sequence[tuple[str, str]]) -> Estimate | None:
    """Estimate of a plan with its own batch shares; None: it is unknown on some type, or impossible.

    Args:
        places: host and device type of each rank.
    """
    found = _laid(table, plan, places)
    if found is None:
        return None
    alone, owners, names = found
    return _estimate(
        alone, plan, plan.shares or even_shares(table.global_batch, plan.dp), owners, names, table.global_batch
    )


def in_proportion(table: PerformanceTable | None, plan: Plan, devices: Sequence[Device], batch: int) -> Plan:
    """The plan with its batch split by the speed of these devices, by rank; evenly where that is unknown.

    Args:
        batch: the job's global batch.
    """
    if plan.pp == 1 and table is not None and len({device.name for device in devices}) > 1:
        found = _laid(table, plan, [(device.host, device.name) for device in devices])
        if found is not None:
            alone, owners, _ = found
            slowness = [alone[name].step_time_s / _largest_share(alone[name].plan, batch) for name in owners]
            shares = proportional(slowness, batch, plan.accumulation, [UNBOUNDED] * plan.dp)
            if shares is not None and len(set(shares)) > 1:
                return replace(plan, shares=shares)
    # Shares of devices that it leaves: as even as can be, for it must not be refused what it runs with.
    return replace(plan, shares=even_shares(batch, plan.dp)) if plan.shares and batch % plan.dp else evenly(plan)


def _laid(
    table: PerformanceTable, plan: Plan, places: Sequence[tuple[str, str]]
) -> tuple[Mapping[str, Estimate], list[str], list[str]] | None:
    """Estimates by type, the type of each replica, and the type of each host, largest host first."""
    if plan.pp != 1 or len(places) != plan.ranks:
        return None
    hosts: dict[str, list[str]] = {}
    for host, name in places:
        hosts.setdefault(host, []).append(name)
    by_size = sorted(hosts.values(), key=lambda names: -len(names))
    alone = table.alone.get(tuple(len(names) for names in by_size), {}).get(evenly(plan), {})
    owners: list[str] = []
    for replica in range(plan.dp):
        mine = {places[plan.rank_of(0, replica, shard)][1] for shard in range(plan.tp)}
        if len(mine) != 1 or not mine <= alone.keys():
            return None
        owners.append(mine.pop())
    return alone, owners, [names[0] for names in by_size]


def proportional(slowness: Sequence[float], batch: int, least: int, most: Sequence[int]) -> tuple[int, ...] | None:
    """Whole shares of a batch, for which the slowest replica is as fast as can be; None: there are none.

    Args:
        slowness: seconds per sample of each replica.
        least, most: samples of a replica.
    """
    count = len(slowness)
    if least * count > batch or any(limit < least for limit in most) or sum(most) < batch:
        return None
    # Down to whole samples of the exact shares none has too much; what is left goes one by one where it costs least.
    exact_s = batch / sum(1.0 / s for s in slowness)
    shares = [min(max(int(exact_s / s), least), limit) for s, limit in zip(slowness, most, strict=True)]
    if sum(shares) > batch:
        shares = [least] * count
    waiting = [((n + 1) * s, r) for r, (n, s) in enumerate(zip(shares, slowness, strict=True)) if n < most[r]]
    heapq.heapify(waiting)
    for _ in range(batch - sum(shares)):
        _, replica = heapq.heappop(waiting)
        shares[replica] += 1
        if shares[replica] < most[replica]:
            heapq.heappush(waiting, ((shares[replica] + 1) * slowness[replica], replica))
    return tuple(shares)


def _replica_types(plan: Plan, shape: Sequence[int], device_types: Sequence[str]) -> list[str] | None:
    """Device type of each replica, ranks going host by host; None: a replica would lie on two hosts."""
    owners: list[str] = []
    for name, count in zip(device_types, shape, strict=True):
        if count % plan.tp:
            return None
        owners += [name] * (count // plan.tp)
    return owners if len(owners) == plan.dp and plan.pp == 1 else None


def _largest_share(plan: Plan, global_batch: int) -> int:
    return max(plan.shares) if plan.shares else -(-global_batch // plan.dp)


def _estimate(
    alone: Mapping[str, Estimate],
    plan: Plan,
    shares: Sequence[int],
    owners: Sequence[str],
    device_types: Sequence[str],
    global_batch: int,
) -> Estimate:
    largest: dict[str, int] = {}
    for name, share in zip(owners, shares, strict=True):
        largest[name] = max(largest.get(name, 0), share)
    used = {name: alone[name] for name in largest}
    times = {name: largest[name] / _largest_share(one.plan, global_batch) for name, one in used.items()}
    known = all(one.device_bytes for one in used.values())
    return Estimate(
        plan=plan,
        device_type=device_types[0],
        shape=next(iter(used.values())).shape,
        step_time_s=max(one.step_time_s * times[name] for name, one in used.items()),
        lower_s=max(one.lower_s * times[name] for name, one in used.items()),
        upper_s=max(one.upper_s * times[name] for name, one in used.items()),
        cores_per_device=max(one.cores_per_device for one in used.values()),
        # Of a larger micro-batch no part of the memory grows faster than the batch: this is the most that it can be.
        device_bytes=int(
            max(one.device_bytes * max(_growth(one, largest[name], global_batch), 1.0) for name, one in used.items())
        )
        if known
        else 0,
        host_bytes=max(one.host_bytes for one in used.values()),
        device_types=tuple(device_types) if len(set(device_types)) > 1 else (),
    )


def _growth(one: Estimate, share: int, global_batch: int) -> float:
    """Of the largest micro-batch."""
    micro_batches = one.plan.accumulation
    return -(-share // micro_batches) / -(-_largest_share(one.plan, global_batch) // micro_batches)
