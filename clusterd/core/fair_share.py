"""Quotas of tenants and limits of users, and fair shares of tenants and of the users of each.

Shares are of what was used lately: device-seconds lose half of their weight in each half-life, as in Slurm's fair-share
factor. Without a half-life, tenants share what they hold at the moment, and users of one tenant are equal.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from clusterd.core.state import Attempt, Job, State, Used
from clusterd.types import JobSpec, Tenant
from clusterd.units import counted

ALL = 1 << 30
"""A number of devices larger than any cluster."""

SOON_S = 60.0
"""What is held counts for so long in advance: of those who begin together, the one who holds more is behind."""

_PLAIN = Tenant()


def charge(state: State, now_s: float) -> None:
    """Add what each user has held since the last call, and take up what is held now: after each change of that."""
    if not state.half_life_s:
        state.used.clear()
        return
    held: Counter[tuple[str, str]] = Counter()
    for job in map(state.jobs.__getitem__, state.active):
        if job.attempt is not None:
            held[job.spec.tenant, job.spec.user] += _devices_of(job.attempt)
    for tenant, user in held:
        state.used.setdefault(tenant, {}).setdefault(user, Used(at_s=now_s))
    for tenant, users in list(state.used.items()):
        for user, used in list(users.items()):
            left = 0.5 ** (max(now_s - used.at_s, 0.0) / state.half_life_s)
            used.device_s = used.device_s * left + used.devices * state.half_life_s / math.log(2.0) * (1.0 - left)
            used.devices, used.at_s = held[tenant, user], now_s
            if not used.devices and used.device_s < 1.0:
                del users[user]
        if not users:
            del state.used[tenant]


def beyond_quota(state: State, spec: JobSpec, devices: int) -> str | None:
    """Reason why a job must not get this many more devices now; None: it may."""
    if not (state.tenants or state.device_limits):
        return None
    return Quotas(state, (state.jobs[job] for job in state.active)).why_not(spec, devices)


class Quotas:
    """Ledger of the devices that the jobs of each tenant and of each user hold."""

    def __init__(self, state: State, running: Iterable[Job]) -> None:
        self._tenants, self._limits = state.tenants, state.device_limits
        self._used = state.used if state.half_life_s else None
        self._held: dict[str, int] = {}  # by tenant
        self._held_by_user: dict[str, int] = {}
        for job in running:
            if job.attempt is not None:
                self.take(job.spec, _devices_of(job.attempt))

    def _bounds(self, spec: JobSpec) -> Iterator[tuple[str, int, int]]:
        """Bounds of a job: tenant or user, most devices, and those that are held."""
        if (quota := self._tenants.get(spec.tenant, _PLAIN).quota) is not None:
            yield f"tenant {spec.tenant}", quota, self._held.get(spec.tenant, 0)
        if (limit := self._limits.get(spec.user, self._limits.get(""))) is not None:
            yield spec.user, limit, self._held_by_user.get(spec.user, 0)

    def most(self, spec: JobSpec) -> int:
        """Devices that the jobs of a job's tenant and user may hold in all."""
        return min((most for _, most, _ in self._bounds(spec)), default=ALL)

    def left(self, spec: JobSpec) -> int:
        """Devices that a job may still get."""
        return min((max(most - held, 0) for _, most, held in self._bounds(spec)), default=ALL)

    def take(self, spec: JobSpec, devices: int) -> None:
        """Record granted devices; a negative number is given back."""
        self._held[spec.tenant] = self._held.get(spec.tenant, 0) + devices
        self._held_by_user[spec.user] = self._held_by_user.get(spec.user, 0) + devices

    def why_not(self, spec: JobSpec, devices: int) -> str | None:
        """Reason why a job must not get this many more devices; None: it may."""
        for who, most, held in self._bounds(spec):
            if devices > most:
                return f"needs {counted(devices, 'device')} at once, and {who} may hold {most} in all"
            if devices > most - held:
                return f"{who} may hold {counted(most, 'device')}, and holds {held}: {devices} more are wanted"
        return None

    def limited_user(self, spec: JobSpec) -> str:
        """User of a job, where a limit of devices applies to that user; else empty."""
        return spec.user if {"", spec.user} & self._limits.keys() else ""

    def tenant_shares(self, waiting: Iterable[Job]) -> Shares:
        """Shares of the tenants that hold or want devices."""
        has: Mapping[str, float] = self._held
        if self._used is not None:
            has = {name: sum(_weight(each) for each in users.values()) for name, users in self._used.items()}
        wanting = set(self._held) | {job.spec.tenant for job in waiting}
        return Shares(has, {name: self._tenants.get(name, _PLAIN).share for name in wanting})

    def user_shares(self, waiting: Iterable[Job]) -> dict[str, Shares]:
        """Shares of the users of each tenant who hold or want devices; empty without a half-life."""
        if self._used is None:
            return {}
        wanting: dict[str, dict[str, float]] = defaultdict(dict)
        for job in waiting:
            wanting[job.spec.tenant][job.spec.user] = 1.0
        has: dict[str, dict[str, float]] = defaultdict(dict)
        for tenant, users in self._used.items():
            wanting[tenant] |= {user: 1.0 for user, used in users.items() if used.devices}
            has[tenant] = {user: _weight(used) for user, used in users.items()}
        return {tenant: Shares(has[tenant], weights) for tenant, weights in wanting.items()}


class Shares:
    """Part of each name in what all of them have, and the part that is due by weight."""

    def __init__(self, has: Mapping[str, float], weights: Mapping[str, float]) -> None:
        whole, total = sum(has.get(name, 0.0) for name in weights), sum(weights.values())
        self.parts = {
            name: (has.get(name, 0.0) / whole if whole else 0.0, weight / total) for name, weight in weights.items()
        }
        """Part that a name has, and part that is due."""

    def is_over(self, name: str) -> bool:
        """True for a name that has more than is due to it."""
        part, due = self.parts.get(name, (0.0, 1.0))
        return part > due * (1.0 + 1e-9)


def _weight(used: Used) -> float:
    return used.device_s + used.devices * SOON_S


def _devices_of(attempt: Attempt) -> int:
    """Number of devices of current ranks, target ranks and trials."""
    coming = attempt.migration.ranks if attempt.migration is not None else {}
    places = [*attempt.ranks.values(), *coming.values()]
    return len({rank.place.device for rank in places if rank.place.device is not None} | set(attempt.reserved_devices))
