"""Limits of what users may ask for: tenants, priority, guarantees and numbers of jobs, by the configuration.

A request states what its user wishes; what the user may have is written in ``[limits]``, ``[users]`` and ``[tenants]``.
Operators may ask for everything.
"""

from __future__ import annotations

import pwd
from collections.abc import Callable
from dataclasses import dataclass

from clusterd.config import Config, limits_of
from clusterd.core.queueing import bookings
from clusterd.core.state import Job, State
from clusterd.daemon.access import Peer, is_among
from clusterd.errors import ClusterError, TryLater, UsageError
from clusterd.types import JobSpec
from clusterd.units import counted


@dataclass(frozen=True, slots=True)
class Rights:
    """Checks requests of users against the configuration in force."""

    config: Callable[[], Config]
    state: State

    def refuse_job(self, peer: Peer, spec: JobSpec) -> None:
        """Refuse a new job that its user may not ask for.

        Raises:
            UsageError: there is no such tenant.
            ClusterError: it is beyond a limit, which is named. TryLater: too many are queued.
        """
        self._refuse_tenant(peer, spec.tenant)
        self.refuse_change(peer, spec)
        if peer.is_operator:
            return
        queued = sum(1 for job in self.state.queue if self.state.jobs[job].spec.user == peer.user)
        limit = limits_of(self.config(), peer.user).queued_jobs
        if queued >= limit:
            raise TryLater(
                f"{peer.user} has {counted(queued, 'queued job')}, and may have {limit} "
                f"({self._rule(peer.user, 'queued_jobs')}): submit it when some of them have started"
            )

    def refuse_change(self, peer: Peer, spec: JobSpec, before: Job | None = None) -> None:
        """Refuse a priority or a guarantee that a user may not give to a job; what an operator gave it may stay.

        Raises:
            ClusterError: it is beyond a limit, which is named.
        """
        if peer.is_operator:
            return
        limits = limits_of(self.config(), peer.user)
        if spec.priority > max(limits.priority, before.priority if before is not None else limits.priority):
            raise ClusterError(
                f"priority {spec.priority} is above {limits.priority}, the highest that {peer.user} may give "
                f"({self._rule(peer.user, 'priority')}): ask an operator"
            )
        had = before.spec.resources.devices if before is not None and before.spec.guaranteed else 0
        if not spec.guaranteed or spec.resources.devices <= had:
            return
        others = (job for job in self.state.jobs.values() if not job.state.is_final and job is not before)
        asked = sum(job.spec.resources.devices for job in others if job.spec.guaranteed and job.spec.user == peer.user)
        if asked + spec.resources.devices > limits.guaranteed_devices:
            already = f", and {asked} are asked for already" if asked else ""
            raise ClusterError(
                f"guaranteed jobs of {peer.user} may ask for {counted(limits.guaranteed_devices, 'device')} together "
                f"({self._rule(peer.user, 'guaranteed_devices')}){already}: leave out guaranteed, or ask an operator"
            )

    def owner_of_booking(self, peer: Peer, user: str) -> str:
        """Return for whom a caller books: operators for any account of this machine, others for themselves.

        Raises:
            ClusterError: for somebody else, and not an operator; UsageError: there is no such account.
        """
        if user in ("", peer.user):
            return peer.user
        if not peer.is_operator:
            raise ClusterError(f"{peer.user} books for {peer.user} alone: ask {user}, or an operator")
        try:
            return pwd.getpwnam(user).pw_name
        except (KeyError, ValueError):
            raise UsageError(f"the head node knows no account {user!r}") from None

    def refuse_booking(self, peer: Peer, wanted: bookings.Wanted) -> None:
        """Refuse a booking beyond the quota of its user.

        Raises:
            ClusterError: it is, with what is left.
        """
        if peer.is_operator:
            return
        limit_h = limits_of(self.config(), peer.user).booked_device_hours
        left_h = limit_h - bookings.used_s(self.state, peer.user, wanted.from_s) / 3600.0
        if (wanted_h := wanted.device_s / 3600.0) > left_h + 1e-9:
            raise ClusterError(
                f"{peer.user} may book {counted(limit_h, 'device-hour')} in seven days "
                f"({self._rule(peer.user, 'booked_device_hours')}), {max(left_h, 0.0):.4g} of which are left then: "
                f"{wanted_h:.4g} are asked for; book less, cancel another booking, or ask an operator"
            )

    def _refuse_tenant(self, peer: Peer, name: str) -> None:
        tenants = self.config().tenants
        if tenants and name not in tenants and name != "default":
            raise UsageError(f"there is no tenant {name!r}; there are {', '.join(sorted({*tenants, 'default'}))}")
        members = tenants[name].members if name in tenants else None
        is_open = name == "default" and members is None
        if peer.is_operator or is_open or (members is not None and is_among(peer.user, peer.uid, members)):
            return
        raise ClusterError(
            f"{peer.user} may not submit for tenant {name}: an operator adds the name to members of [tenants.{name}]"
        )

    def _rule(self, user: str, key: str) -> str:
        everybody = getattr(self.config().limits, key)
        is_own = getattr(limits_of(self.config(), user), key) != everybody
        return f"{key} of [users.{user}]" if is_own else f"{key} of [limits]"
