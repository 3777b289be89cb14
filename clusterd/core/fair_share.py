"""Quotas and monthly budgets of tenants and users, and fair shares of tenants and of the users of each.

Shares are of what was used lately: device-seconds lose half of their weight in each half-life, as in Slurm's fair-share
factor. Without a half-life, tenants share what they hold at the moment, and users of one tenant are equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

from clusterd.core.state import Attempt, Job, State, Used
from clusterd.types import DeviceId, HostId, JobSpec, Tenant
from clusterd.units import counted

ALL = 1 << 30
"""A number of devices larger than any cluster."""

SOON_S = 60.0
"""What is held counts for so long in advance: of those who begin together, the one who holds more is behind."""

_PLAIN = Tenant()


def charge(state: State, now_s: float) -> None:
    """Add what each user has held since the last call, and take up what is held now: after each change of that."""
    if not (state.half_life_s or state.budgets or any(t.device_hours is not None for t in state.tenants.values())):
        state.used.clear()
        return
    held: defaultdict[tuple[str, str], float] = defaultdict(float)
    for job in map(state.jobs.__getitem__, state.active):
        if job.attempt is not None:
            held[job.spec.tenant, job.spec.user] += _weight_of(state, job.attempt)
    for tenant, user in held:
        state.used.setdefault(tenant, {}).setdefault(user, Used(at_s=now_s))
    month_s = _month(now_s).timestamp()
    for tenant, users in list(state.used.items()):
        for user, used in list(users.items()):
            for_s = max(now_s - used.at_s, 0.0)
            used.month_s = _in_month(used, month_s, now_s)
            if state.half_life_s:
                left = 0.5 ** (for_s / state.half_life_s)
                used.device_s = used.device_s * left + used.devices * state.half_life_s / math.log(2.0) * (1.0 - left)
            used.devices, used.at_s = held.get((tenant, user), 0.0), now_s
            if not used.devices and used.device_s < 1.0 and used.month_s < 1.0:
                del users[user]
        if not users:
            del state.used[tenant]


@dataclass(frozen=True, slots=True)
class Budget:
    """Device-hours of one calendar month, and what is used of them."""

    who: str
    user: str  # empty: a tenant's
    hours: float
    used_hours: float

    @property
    def left_hours(self) -> float:
        """Rest of the month; 0.0: nothing is left."""
        return max(self.hours - self.used_hours, 0.0)


def budgets(state: State, tenant: str, user: str, now_s: float) -> Iterator[Budget]:
    """Budgets that jobs of a user of a tenant draw on."""
    of_tenant, of_user = state.tenants.get(tenant, _PLAIN).device_hours, state.budgets.get(user, state.budgets.get(""))
    if of_tenant is not None:
        yield Budget(f"tenant {tenant}", "", of_tenant, month_hours(state.used.get(tenant, {}).values(), now_s))
    if of_user is not None:
        mine = (users[user] for users in state.used.values() if user in users)
        yield Budget(user, user, of_user, month_hours(mine, now_s))


def month_hours(use: Iterable[Used], now_s: float) -> float:
    """Device-hours of this calendar month."""
    month_s = _month(now_s).timestamp()
    return sum(_in_month(used, month_s, now_s) for used in use) / 3600.0


def _in_month(used: Used, month_s: float, now_s: float) -> float:
    """Device-seconds since the month began, those included that were not charged yet."""
    before_s = used.month_s if used.at_s >= month_s else 0.0
    return before_s + used.devices * max(now_s - max(used.at_s, month_s), 0.0)


def why_spent(state: State, tenant: str, user: str, now_s: float) -> str | None:
    """Reason why jobs get no more devices in this month; None: something is left of each budget."""
    spent = next((budget for budget in budgets(state, tenant, user, now_s) if not budget.left_hours), None)
    if spent is None:
        return None
    month = _month(now_s)
    after = (month + timedelta(days=32)).replace(day=1)
    return (
        f"{spent.who} has used the {spent.hours:g} device-hours of {month:%Y-%m}: "
        f"the next month begins on {after:%Y-%m-%d}, 00:00 UTC"
    )


def _month(now_s: float) -> datetime:
    """Beginning of a time's calendar month, in UTC."""
    return datetime.fromtimestamp(now_s, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def beyond_quota(state: State, spec: JobSpec, devices: int, now_s: float) -> str | None:
    """Reason why a job must not get this many more devices now; None: it may."""
    if not (state.tenants or state.device_limits or state.budgets):
        return None
    return Quotas(state, (state.jobs[job] for job in state.active), now_s).why_not(spec, devices)


class Quotas:
    """Ledger of the devices that the jobs of each tenant and of each user hold."""

    def __init__(self, state: State, running: Iterable[Job], now_s: float) -> None:
        self._tenants, self._limits, self._budgets = state.tenants, state.device_limits, state.budgets
        self._why_spent = cache(lambda tenant, user: why_spent(state, tenant, user, now_s))
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
        if self._why_spent(spec.tenant, spec.user) is not None:
            return 0
        return min((max(most - held, 0) for _, most, held in self._bounds(spec)), default=ALL)

    def take(self, spec: JobSpec, devices: int) -> None:
        """Record granted devices; a negative number is given back."""
        self._held[spec.tenant] = self._held.get(spec.tenant, 0) + devices
        self._held_by_user[spec.user] = self._held_by_user.get(spec.user, 0) + devices

    def why_not(self, spec: JobSpec, devices: int) -> str | None:
        """Reason why a job must not get this many more devices; None: it may."""
        if devices > 0 and (spent := self._why_spent(spec.tenant, spec.user)) is not None:
            return str(spent)
        for who, most, held in self._bounds(spec):
            if devices > most:
                return f"needs {counted(devices, 'device')} at once, and {who} may hold {most} in all"
            if devices > most - held:
                return f"{who} may hold {counted(most, 'device')}, and holds {held}: {devices} more are wanted"
        return None

    def limited_user(self, spec: JobSpec) -> str:
        """User of a job, where a limit or a budget applies to that user; else empty."""
        return spec.user if {"", spec.user} & (self._limits.keys() | self._budgets.keys()) else ""

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


def _held_by(attempt: Attempt) -> dict[DeviceId, HostId]:
    """Devices of current ranks, target ranks and trials, each with its host."""
    coming = attempt.migration.ranks if attempt.migration is not None else {}
    places = [rank.place for rank in (*attempt.ranks.values(), *coming.values())]
    return {place.device: place.host for place in places if place.device is not None} | attempt.reserved_devices


def _devices_of(attempt: Attempt) -> int:
    return len(_held_by(attempt))


def _weight_of(state: State, attempt: Attempt) -> float:
    """Sum of the weights of an attempt's devices."""
    held = _held_by(attempt)
    if not state.device_weights:
        return float(len(held))
    names = {d.id: d.name for host in {*held.values()} if host in state.hosts for d in state.hosts[host].devices}
    return sum(weight(state.device_weights, names.get(device, "")) for device in held)


def weight(weights: Mapping[str, float], name: str) -> float:
    """Weight of a device of this type: that of the longest name which is a part of it; 1.0: there is none."""
    named = [part for part in weights if part.lower() in name.lower()]
    return weights[max(named, key=lambda part: (len(part), part))] if named else 1.0
