"""Interface of policies: a read-only view of the cluster for one pass, and the proposals that they may make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from clusterd.core.booked import Booked
from clusterd.core.claim_calendar import ClaimCalendar
from clusterd.core.fair_share import Quotas
from clusterd.core.host import Host
from clusterd.core.ledger import Ledger, SharedDevice, of_ranks
from clusterd.core.performance_table import PerformanceTable
from clusterd.core.queue_order import Order, QueuePlace
from clusterd.core.reservations import Handover, Reservation
from clusterd.core.state import Attempt, Job, State
from clusterd.core.timers import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import AttemptState, DeviceClaim, HostId, JobId, RankPlace


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a queued job."""

    job: JobId
    plan: Plan | None
    ranks: tuple[RankPlace, ...]
    booked: Booked
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Migration of a running job to another plan or other devices."""

    job: JobId
    plan: Plan
    ranks: tuple[RankPlace, ...]
    booked: Booked
    reason: str
    may_restart: bool = False  # through host memory, if source and target ranks do not fit side by side


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """Another number of CPU cores for a running job; its ranks stay where they are."""

    job: JobId
    each: int  # per device
    cores: Mapping[HostId, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop of a running job through no fault of its own; it is requeued and goes on from its last saved state."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a job does not start; permanent where no change of the cluster's load would help."""

    job: JobId
    reason: str
    is_permanent: bool = False
    devices: int = 0  # that would start it, if they were free
    is_shortage: bool = False  # the end of other jobs would let it start


@dataclass(slots=True)
class Proposal:
    """Actions that a policy proposes in one pass."""

    starts: list[Start] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    preempts: list[Preempt] = field(default_factory=list)
    grants: list[CoreGrant] = field(default_factory=list)
    reservation: Reservation | None = None  # the new one; None: as it was
    ends_reservation: bool = False  # there is none any more
    again_s: float | None = None  # after which the policy is to be asked again even if nothing happens
    handovers: dict[JobId, Handover] = field(default_factory=dict)  # new ones
    ends_handovers: list[JobId] = field(default_factory=list)  # those that cannot be met any more
    order: dict[JobId, QueuePlace | None] = field(default_factory=dict)  # places that changed: see `difference`


class View:
    """The cluster at one instant, for one pass. Policies change only `free` and `quotas`."""

    def __init__(
        self,
        state: State,
        now_s: float,
        blocked: Collection[JobId] = (),
        of_request: dict[object, Any] | None = None,
    ) -> None:
        """Build the view.

        Args:
            blocked: queued jobs that wait for other jobs or for data: policies do not see them as queued.
            of_request: what earlier views found that these hosts could do for a request: see `HostAnswers`.
        """
        self.now_s = now_s
        self.hosts: Mapping[HostId, Host] = state.hosts
        self.jobs: Mapping[JobId, Job] = state.jobs
        waiting = [state.jobs[job] for job in state.queue if job not in blocked]
        self.queued: list[Job] = [job for job in waiting if not job.spec.booking]
        self.of_bookings: list[Job] = [job for job in waiting if job.spec.booking]  # queued jobs of those that began
        self.claims: Mapping[str, DeviceClaim] = state.device_claims
        self.performance_tables: Mapping[str, PerformanceTable] = state.performance_tables
        self.move_costs_s: Mapping[str, float] = state.move_costs_s
        self.restart_costs_s: Mapping[str, float] = state.restart_costs_s
        self.run_times: Mapping[str, Sequence[float]] = state.run_times
        self.reservation = state.reservation
        self.order: Order = state.order  # of the pass before, without jobs that wait no more
        self.round_s = state.timers.get(Timer(TimerKind.ROUND))  # time of the next round; None: none is due
        self.handovers: Mapping[JobId, Handover] = state.handovers
        self.running: list[Job] = [state.jobs[job] for job in state.active]
        self.calendar = ClaimCalendar(state, now_s)
        self.free = Ledger(state.hosts.values(), state.holders, _shared(state))
        self.free.withhold(self.calendar.kept(0.0, 0.0))
        self.quotas = Quotas(state, self.running, now_s)
        self.of_request: dict[object, Any] = of_request if of_request is not None else {}

    def leaving(self, attempt: Attempt) -> str:
        """Message naming the drained hosts of an attempt, else its claimed devices; empty: none, or a booking."""
        if self.jobs[attempt.job].spec.booking:
            return ""
        hosts = [self.hosts[host] for host in attempt.hosts if host in self.hosts]
        if drained := sorted(host.id for host in hosts if host.drained is not None and not host.jobs_stay):
            return f"{', '.join(drained)} is drained"
        claimed = [(d, why) for host in hosts for d, why in host.claimed.items() if d in attempt.devices]
        return f"{', '.join(d for d, _ in claimed)} is {claimed[0][1]}" if claimed else ""


class HostAnswers:
    """Answers about what the hosts could do for each request if nothing ran, kept until a host changes."""

    def __init__(self) -> None:
        self._hosts: tuple[object, ...] = ()
        self._of_request: dict[object, Any] = {}

    def of(self, hosts: Iterable[Host]) -> dict[object, Any]:
        """Answers about these hosts so far; new ones are added by whoever asks."""
        now = tuple((host.id, host.unusable, host.facts, host.devices) for host in hosts)
        if now != self._hosts or len(self._of_request) > MOST_ANSWERS:
            self._hosts, self._of_request = now, {}
        return self._of_request


MOST_ANSWERS = 10_000


def _shared(state: State) -> Iterator[SharedDevice]:
    """Devices in use that further jobs may share; those that all of their jobs leave are others'."""
    for job in map(state.jobs.__getitem__, state.active):
        if job.spec.resources.share < 2 or job.attempt is None or job.attempt.state is AttemptState.STOPPING:
            continue
        for device in of_ranks(state.hosts, job.attempt):
            jobs, limit = len(state.jobs_on(device.id)), state.share_limit(device.id)
            if jobs < limit and not (device.exclusive or device.foreign):
                yield SharedDevice(device, jobs, limit)


class Policy(Protocol):
    """Scheduling policy: the four stages, or a baseline in their place."""

    name: str
    interval_s: float | None
    """Seconds between rounds, for policies that also decide by the clock; None: events are enough."""

    def propose(self, view: View) -> Proposal:
        """Decide what to do at this instant.

        The default policy is stateless between passes. Policies that work in rounds may keep the last round's answer;
        after a restart of the daemon they begin a new round.
        """
        ...
