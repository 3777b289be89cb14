"""Tenants: what the jobs of each hold together, and what they may still be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clusterd.core.state import Attempt, Job, State
from clusterd.types import Tenant

ALL = 1 << 30
"""Devices: more than any cluster has."""

_PLAIN = Tenant()


def beyond_quota(state: State, tenant: str, devices: int) -> str | None:
    """Why a tenant must not be given so many more now, whoever proposes it; None: it may."""
    if not state.tenants:
        return None
    return Quotas(state.tenants, (state.jobs[job] for job in state.active)).why_not(tenant, devices)


class Quotas:
    """A ledger for one pass."""

    def __init__(self, tenants: Mapping[str, Tenant], running: Iterable[Job]) -> None:
        self._tenants = tenants
        self.held: dict[str, int] = {}
        for job in running:
            if job.attempt is not None:
                self.take(job.spec.tenant, _devices_of(job.attempt))

    def most(self, tenant: str) -> int:
        """Devices that its jobs may hold in all."""
        quota = self._tenants.get(tenant, _PLAIN).quota
        return ALL if quota is None else quota

    def left(self, tenant: str) -> int:
        """Devices that its jobs may still be given."""
        most = self.most(tenant)
        return ALL if most == ALL else max(most - self.held.get(tenant, 0), 0)

    def take(self, tenant: str, devices: int) -> None:
        """Given; less than none is given back."""
        self.held[tenant] = self.held.get(tenant, 0) + devices

    def why_not(self, tenant: str, devices: int) -> str | None:
        """Why a job of this tenant is not given so many more; None: it may be."""
        if devices <= self.left(tenant):
            return None
        quota = self._tenants[tenant].quota
        if quota is not None and devices > quota:
            return f"needs {devices} devices at once, and tenant {tenant} may hold {quota} in all"
        return (
            f"tenant {tenant} may hold {quota} devices, and holds {self.held.get(tenant, 0)}: {devices} more are wanted"
        )

    def over_share(self, waiting: Iterable[Job]) -> dict[str, bool]:
        """Whether a tenant holds more than its share of what is held; nobody does where only one wants any."""
        wanting = set(self.held) | {job.spec.tenant for job in waiting}
        if len(wanting) < 2:
            return {}
        shares = {name: self._tenants.get(name, _PLAIN).share for name in wanting}
        each = sum(self.held.values()) / sum(shares.values())
        return {name: self.held.get(name, 0) > each * share for name, share in shares.items()}


def _devices_of(attempt: Attempt) -> int:
    """Of ranks there and on their way, and what is kept for trials."""
    coming = attempt.migration.ranks if attempt.migration is not None else {}
    places = [*attempt.ranks.values(), *coming.values()]
    return len({rank.place.device for rank in places if rank.place.device is not None} | set(attempt.kept))
