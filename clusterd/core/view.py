"""What a policy sees, and what it may ask for: a read-only cluster with a free-resources ledger for one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from clusterd.core.fair_share import Quotas
from clusterd.core.performance_table import Outlook
from clusterd.core.queueing.dependencies import waits_for
from clusterd.core.state import Attempt, Host, Job, State
from clusterd.types import Device, DeviceId, HostId, JobId, RankPlace
from plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Start:
    """Launch a queued job so."""

    job: JobId
    plan: Plan | None
    ranks: tuple[RankPlace, ...]
    cores: Mapping[HostId, int]
    memory_bytes: Mapping[HostId, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Take a running elastic job to another plan, or other devices."""

    job: JobId
    plan: Plan
    ranks: tuple[RankPlace, ...]
    cores: Mapping[HostId, int]
    memory_bytes: Mapping[HostId, int]
    reason: str
    may_restart: bool = False  # through host memory, if old and new ranks have no room side by side


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """Let a running job use so many CPU cores; its ranks stay where they are."""

    job: JobId
    each: int  # beside each device
    cores: Mapping[HostId, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running job and queue it again, through no fault of its own; it goes on from where it last saved."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stage turned the job down, for this reason; `forever` when no change of the cluster's load would help."""

    job: JobId
    reason: str
    forever: bool = False
    devices: int = 0  # that would start it, if they were free


@dataclass(slots=True)
class Proposal:
    """What a policy wants done in this pass."""

    starts: list[Start] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    preempts: list[Preempt] = field(default_factory=list)
    grants: list[CoreGrant] = field(default_factory=list)


@dataclass(slots=True)
class HostFree:
    """What is free on one usable host."""

    host: Host
    devices: list[Device]
    cores: int
    memory_bytes: int


class Free:
    """Free resources of the usable hosts; stages take from it as they grant, so that a pass adds up."""

    def __init__(self, hosts: Iterable[Host], leased: Mapping[DeviceId, object]) -> None:
        self.hosts: dict[HostId, HostFree] = {}
        for host in hosts:
            if host.unusable is None and host.facts is not None:
                self.hosts[host.id] = HostFree(
                    host=host,
                    devices=[d for d in host.devices if d.id not in leased and not d.foreign],
                    cores=host.facts.cpu_cores - host.cores_used,
                    memory_bytes=host.facts.memory_bytes - host.memory_used_bytes,
                )

    def take(self, ranks: Iterable[RankPlace], cores: Mapping[HostId, int], memory_bytes: Mapping[HostId, int]) -> None:
        """Book these places for the rest of the pass."""
        taken = {place.device for place in ranks}
        for host, count in cores.items():
            free = self.hosts[host]
            free.devices = [d for d in free.devices if d.id not in taken]
            free.cores -= count
            free.memory_bytes -= memory_bytes.get(host, 0)

    def without(self, attempt: Attempt) -> Free:
        """As if this attempt were over; hosts that may not be used stay out."""
        found = Free((), {})
        for name, free in self.hosts.items():
            own = [d for d in free.host.devices if d.id in attempt.devices and not d.foreign]
            cores = free.cores + attempt.cores.get(name, 0)
            memory_bytes = free.memory_bytes + attempt.memory_bytes.get(name, 0)
            found.hosts[name] = HostFree(free.host, [*own, *free.devices], cores, memory_bytes)
        return found


class View:
    """The cluster at one instant, for one pass; nothing in it may be changed but `free` and `quotas`."""

    def __init__(self, state: State, now_s: float) -> None:
        self.now_s = now_s
        self.hosts: Mapping[HostId, Host] = state.hosts
        self.jobs: Mapping[JobId, Job] = state.jobs
        queued = [state.jobs[job] for job in state.queue]
        self.queued: list[Job] = [job for job in queued if waits_for(job.spec, state) is None]
        self.outlooks: Mapping[str, Outlook] = state.outlooks
        self.move_costs_s: Mapping[str, float] = state.move_costs_s
        self.restart_costs_s: Mapping[str, float] = state.restart_costs_s
        self.running: list[Job] = [state.jobs[job] for job in state.active]
        self.free = Free(state.hosts.values(), state.leases)
        self.quotas = Quotas(state.tenants, self.running)

    def leaving(self, attempt: Attempt) -> str:
        """Which of its hosts are drained, in words; empty: none."""
        drained = sorted(h for h in attempt.hosts if h in self.hosts and self.hosts[h].drained is not None)
        return f"{', '.join(drained)} is drained" if drained else ""


class Policy(Protocol):
    """Who gets what: the four stages in one, or a baseline in their place."""

    name: str
    interval_s: float | None
    """Seconds between rounds, for policies that think again by the clock; None: what happens is enough."""

    def propose(self, view: View) -> Proposal:
        """What is to be done at this instant.

        The default keeps nothing between passes. Policies of rounds may keep their last round's answer; after a restart
        of the daemon they begin with a new round.
        """
        ...
