"""Quotas of tenants and limits of users, and fair shares of tenants, during one scheduling pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clusterd.core.state import Attempt, Job, State
from clusterd.types import JobSpec, Tenant
from clusterd.units import counted

ALL = 1 << 30
"""A number of devices larger than any cluster."""

_PLAIN = Tenant()


def beyond_quota(state: State, spec: JobSpec, devices: int) -> str | None:
    """Reason why a job must not get this many more devices now; None: it may."""
    if not (state.tenants or state.device_limits):
        return None
    return Quotas(state, (state.jobs[job] for job in state.active)).why_not(spec, devices)


class Quotas:
    """Ledger of the devices that the jobs of each tenant and of each user hold."""

    def __init__(self, state: State, running: Iterable[Job]) -> None:
        self._tenants, self._limits = state.tenants, state.device_limits
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

    def over_share(self, waiting: Iterable[Job]) -> dict[str, bool]:
        """True by tenant that holds more than its share of all held devices; empty where only one tenant wants any."""
        wanting = set(self._held) | {job.spec.tenant for job in waiting}
        if len(wanting) < 2:
            return {}
        shares = {name: self._tenants.get(name, _PLAIN).share for name in wanting}
        each = sum(self._held.values()) / sum(shares.values())
        return {name: self._held.get(name, 0) > each * share for name, share in shares.items()}


def _devices_of(attempt: Attempt) -> int:
    """Number of devices of current ranks, target ranks and trials."""
    coming = attempt.migration.ranks if attempt.migration is not None else {}
    places = [*attempt.ranks.values(), *coming.values()]
    return len({rank.place.device for rank in places if rank.place.device is not None} | set(attempt.reserved_devices))
