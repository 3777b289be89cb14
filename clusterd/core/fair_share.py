"""Quotas and fair shares of tenants during one scheduling pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clusterd.core.state import Attempt, Job, State
from clusterd.types import Tenant
from clusterd.units import counted

ALL = 1 << 30
"""A number of devices larger than any cluster."""

_PLAIN = Tenant()


def beyond_quota(state: State, tenant: str, devices: int) -> str | None:
    """Reason why a tenant must not get this many more devices now; None: it may."""
    if not state.tenants:
        return None
    return Quotas(state.tenants, (state.jobs[job] for job in state.active)).why_not(tenant, devices)


class Quotas:
    """Ledger of the devices that each tenant's jobs hold."""

    def __init__(self, tenants: Mapping[str, Tenant], running: Iterable[Job]) -> None:
        self._tenants = tenants
        self.held: dict[str, int] = {}
        for job in running:
            if job.attempt is not None:
                self.take(job.spec.tenant, _devices_of(job.attempt))

    def most(self, tenant: str) -> int:
        """Devices that the tenant's jobs may hold in all."""
        quota = self._tenants.get(tenant, _PLAIN).quota
        return ALL if quota is None else quota

    def left(self, tenant: str) -> int:
        """Devices that the tenant's jobs may still get."""
        most = self.most(tenant)
        return ALL if most == ALL else max(most - self.held.get(tenant, 0), 0)

    def take(self, tenant: str, devices: int) -> None:
        """Record granted devices; a negative number is given back."""
        self.held[tenant] = self.held.get(tenant, 0) + devices

    def why_not(self, tenant: str, devices: int) -> str | None:
        """Reason why a job of this tenant must not get this many more devices; None: it may."""
        if devices <= self.left(tenant):
            return None
        quota, held = self.most(tenant), self.held.get(tenant, 0)
        if devices > quota:
            return f"needs {counted(devices, 'device')} at once, and tenant {tenant} may hold {quota} in all"
        return f"tenant {tenant} may hold {counted(quota, 'device')}, and holds {held}: {devices} more are wanted"

    def over_share(self, waiting: Iterable[Job]) -> dict[str, bool]:
        """True by tenant that holds more than its share of all held devices; empty where only one tenant wants any."""
        wanting = set(self.held) | {job.spec.tenant for job in waiting}
        if len(wanting) < 2:
            return {}
        shares = {name: self._tenants.get(name, _PLAIN).share for name in wanting}
        each = sum(self.held.values()) / sum(shares.values())
        return {name: self.held.get(name, 0) > each * share for name, share in shares.items()}


def _devices_of(attempt: Attempt) -> int:
    """Number of devices of current ranks, target ranks and trials."""
    coming = attempt.migration.ranks if attempt.migration is not None else {}
    places = [*attempt.ranks.values(), *coming.values()]
    return len({rank.place.device for rank in places if rank.place.device is not None} | set(attempt.reserved_devices))
