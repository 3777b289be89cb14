"""State of the scheduler: hosts, jobs, attempts, migrations, trials and holders of devices.

Only the handlers of `clusterd.core.scheduler` change it; everybody else reads. Plain data without behaviour beyond
derived values, so that it serialises, compares, and is equal after a replay of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any

from clusterd.core import transitions
from clusterd.core.booked import NOTHING, Booked
from clusterd.core.host import Host
from clusterd.core.performance_table import PerformanceTable
from clusterd.core.queue_order import Order
from clusterd.core.reservations import Handover, Reservation
from clusterd.core.timers import Timer
from clusterd.core.transitions import History, MigrationState, RestartState, SeriesState, TrialState
from clusterd.plans.plan import Plan
from clusterd.types import (
    AttemptState,
    DeviceClaim,
    DeviceId,
    HostId,
    JobId,
    JobSpec,
    JobState,
    RankEnd,
    RankPlace,
    Reclaim,
    Tenant,
)

BACK_OFF_MAX_S = 3600.0
"""Longest pause between a failed migration and the next, however many have failed in a row."""


class Outcome(StrEnum):
    """Reason for stopping an attempt, where the exit reports of its ranks alone do not tell it."""

    CANCELLED = "cancelled"
    TIME_LIMIT = "time limit"
    HOST_LOST = "host lost"
    HOST_FULL = "host full"  # its disk: the job waits for somebody who makes room
    TARGET_REACHED = "target reached"
    LAUNCH_FAILED = "launch failed"
    PREEMPTED = "preempted"
    REFUSED = "refused"  # by a host that could not start it, where others may
    OVER_SHARE = "over share"  # of the memory of a device that it shares
    NOT_A_NUMBER = "not a number"  # its loss, and it is to stop then


class InspectionState(StrEnum):
    """Progress of inspecting an elastic job's model before its first launch."""

    NOT_NEEDED = "not needed"
    NEEDED = "needed"
    ASKED = "asked"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Plans that turned out to be impossible for a job.

    Attributes:
        memory_cap_bytes: largest estimate of device memory that a plan may have; a plan estimated above it ran out.
        rejected: plans under which its ranks cannot train, each with the reason.
    """

    memory_cap_bytes: int | None = None
    rejected: tuple[tuple[Plan, str], ...] = ()

    def why_not(self, plan: Plan) -> str | None:
        """Reason why the job cannot train under `plan`: it uses every technique of a rejected plan; else None."""
        return next(
            (f"under {other}: {why}" for other, why in self.rejected if other.techniques <= plan.techniques), None
        )

    def admits(self, plan: Plan, device_bytes: int) -> bool:
        """True unless something is known to rule out a plan of this estimated memory per device."""
        fits = self.memory_cap_bytes is None or device_bytes <= self.memory_cap_bytes
        return fits and self.why_not(plan) is None


NO_BOUNDS = Bounds()


@dataclass(slots=True)
class Inspection:
    """Model of an elastic job, as its inspection before the first launch found it."""

    state: InspectionState = InspectionState.NOT_NEEDED
    host: HostId | None = None  # where it is made
    shape: dict[str, Any] | None = None  # plans.model_shape.ModelShape
    model: str = ""  # signature: key of `State.performance_tables`
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest directory with a job's state, if there is one."""

    path: str | None = None  # as the job's hosts see it; "HOST:/folder": on that one
    step: int = 0
    failure: str = ""  # of the attempts to write a newer one since


@dataclass(slots=True)
class Progress:
    """Newest reports of a job's ranks, and the end that they foretell."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    step_time_s: float | None = None
    input_share: float | None = None  # of its step time, smoothed, that passes in waiting for input; None: not timed
    reported_s: float | None = None  # time of the newest report of a step
    nan_step: int | None = None  # first step reported with a loss that is not a number; None: the newest is one
    target_hits: int = 0  # consecutive reports with the loss on target
    predictable: bool | None = None  # by its loss curve; None: not judged
    predicted_steps: int | None = None  # in all, until its target loss


@dataclass(slots=True)
class Failures:
    """Failures of a job, and the hosts and plans that they rule out."""

    of_job: int = 0  # ends of attempts that were its own fault
    of_hosts: int = 0  # ends of attempts in a row that were not
    excluded_hosts: dict[HostId, str] = field(default_factory=dict)  # that could not start it, with the reason
    bounds: Bounds = NO_BOUNDS
    needs_exclusive_memory: bool = False  # a rank ran out of memory beside one of another generation

    def cap_memory(self, cap_bytes: int) -> None:
        """Record that a plan estimated above this many bytes per device ran out of memory."""
        self.bounds = replace(self.bounds, memory_cap_bytes=cap_bytes)

    def reject_plan(self, plan: Plan, why: str) -> None:
        """Record that the job's ranks cannot train under a plan; they may under another."""
        if plan not in dict(self.bounds.rejected):
            self.bounds = replace(self.bounds, rejected=(*self.bounds.rejected, (plan, why)))


@dataclass(frozen=True, slots=True)
class Holder:
    """Attempt that holds a device, and the generation of its ranks there: agents refuse older ones."""

    host: HostId
    job: JobId
    attempt: int
    generation: int


@dataclass(slots=True)
class Rank:
    """Place of one rank and, once it exited, its exit reason."""

    place: RankPlace
    end: RankEnd | None = None


@dataclass(slots=True, kw_only=True)
class PlanChange:
    """One change of a job's plan or devices, under way or over."""

    number: int
    plan: Plan
    ranks: dict[int, Rank]  # target ranks
    old_plan: Plan
    reason: str
    started_s: float
    booked: Booked = NOTHING  # for the target ranks, in all
    phases: list[tuple[str, float, str]] = field(default_factory=list)  # name, seconds, description
    step: int | None = None
    local_bytes: int = 0
    downtime_s: float | None = None
    ended_s: float | None = None
    failure: str = ""  # why it failed; empty: it did not
    history: History = field(default_factory=list)

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Places of the target ranks, by number."""
        return tuple(rank.place for _, rank in sorted(self.ranks.items()))


@dataclass(slots=True, kw_only=True)
class Migration(PlanChange):
    """A live migration: the target ranks get the state from the source ranks while these still run."""

    generation: int  # of the target ranks
    state: MigrationState = MigrationState.PREPARING
    network_bytes: int = 0
    lost: tuple[int, ...] = ()  # source ranks that were dead when it began
    old_pin: Plan | None = None  # restored when it fails

    def go(self, state: MigrationState, at_s: float) -> None:
        """Take a step of the migration's state machine."""
        transitions.advance(self, transitions.MIGRATION, state, at_s, f"migration {self.number} to {self.plan}")


@dataclass(slots=True, kw_only=True)
class Restart(PlanChange):
    """A migration through host memory, or of a job with its own training loop: one attempt ends, the next goes on."""

    state: RestartState = RestartState.STOPPING

    def go(self, state: RestartState, at_s: float) -> None:
        """Take a step of the restart's state machine."""
        transitions.advance(self, transitions.RESTART, state, at_s, f"restart {self.number} under {self.plan}")


@dataclass(slots=True)
class Retired:
    """Ranks of a former generation, until every host reports that they are gone."""

    ranks: dict[int, Rank]
    pending: set[HostId]
    booked: Booked


@dataclass(frozen=True, slots=True)
class Former:
    """Plan and host of each rank of a generation that is over."""

    plan: Plan | None
    hosts: dict[int, HostId]


@dataclass(slots=True)
class Stop:
    """End of an attempt: its cause, and who has yet to confirm it."""

    outcome: Outcome | None = None
    why: str = ""
    pending: set[HostId] = field(default_factory=set)  # hosts that have yet to report it gone
    unconfirmed_hosts: set[HostId] = field(default_factory=set)  # lost before they reported it gone
    skip_grace: bool = False  # its ranks get no time to save, whatever their job asked for
    keep: bool = False  # its ranks leave the state of their last step in host memory
    save: str | None = None  # directory of the checkpoint that its ranks write before they exit; see `StopAttempt`
    saved_step: int | None = None  # of that checkpoint, once it is complete
    not_saved: str = ""  # why it could not be written


@dataclass(slots=True)
class Survivors:
    """Ranks that lost their peers or their device memory, and wait for the scheduler."""

    steps: dict[int, int] = field(default_factory=dict)  # last finished step of each waiting rank
    can_finish_step: set[int] = field(default_factory=set)  # ranks that can make one more step without their peers
    collectives_aborted: bool = False  # silent ranks were told that peers are gone
    out_of_memory: bool = False  # a rank ran out of device memory under the plan it was migrated to


@dataclass(slots=True)
class Attempt:
    """One numbered run of a job."""

    job: JobId
    number: int
    generation: int
    plan: Plan | None
    ranks: dict[int, Rank]
    started_s: float
    reason: str = ""  # of its start
    account: str = ""  # of its job
    state: AttemptState = AttemptState.LAUNCHING
    step: int = 0  # newest that was reported
    idle_since_s: float | None = None  # since when its devices do nothing, once that is long; None: they work
    reclaim: Reclaim = Reclaim.SHELLS  # what is done with it if they stay so
    over_share: str = ""  # says what it holds beyond its part of a shared device; empty: nothing
    paused_by: str | None = None  # user who had its processes stopped where they are; None: they run
    ended_s: float | None = None
    stop: Stop = field(default_factory=Stop)
    booked: Booked = NOTHING
    last_generation: int = 1  # that was given out
    migration: Migration | None = None  # under way, before its switch
    pending_restart: Restart | None = None  # start of the next attempt, for which this one is being stopped
    retired: dict[int, Retired] = field(default_factory=dict)  # by generation
    survivors: Survivors = field(default_factory=Survivors)
    former: dict[int, Former] = field(default_factory=dict)  # generations before this one
    versions: dict[HostId, dict[str, str]] = field(default_factory=dict)  # of Python, torch, CUDA, driver
    build_times_s: dict[HostId, float] = field(default_factory=dict)  # of hosts that built it for this attempt
    start: tuple[tuple[str, float], ...] = ()  # phases up to the first step, with their seconds; empty: not known
    announced_cores: int | None = None  # per device, last sent to its ranks; None: nothing was sent
    reserved_devices: dict[DeviceId, HostId] = field(default_factory=dict)  # held, idle while a smaller plan is tried
    history: History = field(default_factory=list)

    def go(self, state: AttemptState, at_s: float) -> None:
        """Take a step of the attempt's state machine."""
        transitions.advance(self, transitions.ATTEMPT, state, at_s, f"attempt {self.job}.{self.number}")

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Each of its hosts once, that of rank 0 first."""
        return tuple(dict.fromkeys(rank.place.host for rank in self.ranks.values()))

    @property
    def all_hosts(self) -> set[HostId]:
        """Hosts of its ranks, of the target ranks of a migration, and of retired ranks."""
        hosts = set(self.hosts)
        if self.migration is not None:
            hosts |= {place.host for place in self.migration.places}
        for retired in self.retired.values():
            hosts |= retired.pending
        return hosts

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Its devices, by rank."""
        return tuple(rank.place.device for rank in self.ranks.values() if rank.place.device is not None)

    def held_on(self, host: HostId) -> set[DeviceId]:
        """Devices of a host that a rank of any generation may still use, and reserved ones."""
        places: list[RankPlace] = []
        if self.state is not AttemptState.STOPPING or host in self.stop.pending:
            places += [rank.place for rank in self.ranks.values()]
        if self.migration is not None:
            places += self.migration.places
        for retired in self.retired.values():
            if host in retired.pending:
                places += [rank.place for rank in retired.ranks.values()]
        held = {place.device for place in places if place.host == host and place.device is not None}
        return held | {device for device, where in self.reserved_devices.items() if where == host}


@dataclass(slots=True)
class Trial:
    """A short run of a job under a plan, to measure its speed."""

    plan: Plan
    steps: int
    why: str
    state: TrialState = TrialState.PROPOSED
    migration: int | None = None  # number of the migration to the plan, once it began
    from_step: int | None = None  # at which the job began to run under the plan
    step_time_s: float | None = None  # median
    predicted_s: float | None = None
    failure: str = ""
    is_refused: bool = False  # the plan cannot run there: it is not tried again
    history: History = field(default_factory=list)

    def go(self, state: TrialState, at_s: float) -> None:
        """Take a step of the trial's state machine."""
        transitions.advance(self, transitions.TRIAL, state, at_s, f"trial of {self.plan}")


@dataclass(slots=True)
class TrialSeries:
    """Trials of one job: the current one, the finished ones, and the return to the job's own plan."""

    state: SeriesState = SeriesState.IDLE
    current: Trial | None = None
    finished: list[Trial] = field(default_factory=list)
    history: History = field(default_factory=list)

    def go(self, state: SeriesState, at_s: float) -> None:
        """Take a step of the series' state machine."""
        if state is not self.state:
            transitions.advance(self, transitions.TRIAL_SERIES, state, at_s, "series of trials")

    @property
    def is_running(self) -> bool:
        """True from the first trial until the profiler has nothing more to try."""
        return self.state is SeriesState.RUNNING


@dataclass(slots=True)
class Job:
    """A submitted job; outlives its attempts."""

    id: JobId
    spec: JobSpec
    priority: int
    submitted_s: float  # follows the wall clock when it is set, until the job is over
    queued_s: float  # since when it waits; a requeued job keeps its place by `submitted_s`
    created_s: float = 0.0  # submit time by the clock of that moment: tells it from another job of the same id
    state: JobState = JobState.QUEUED
    reason: str = ""  # why it is in its state
    attempts: list[Attempt] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)  # switched or over
    restarts: list[Restart] = field(default_factory=list)  # whose next attempt has started, or that failed
    checkpoint: Checkpoint = Checkpoint()
    pinned: Plan | None = None  # plan that its user fixed; of a checkpointable job: for its next start, too
    inspection: Inspection = field(default_factory=Inspection)
    building: dict[HostId, float] = field(default_factory=dict)  # hosts that build its environment, since when
    trials: TrialSeries = field(default_factory=TrialSeries)
    not_before_s: float = 0.0
    held_by: str | None = None  # user who keeps it in the queue; None: it may start
    progress: Progress = field(default_factory=Progress)
    failures: Failures = field(default_factory=Failures)
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    history: History = field(default_factory=list)

    def go(self, state: JobState, at_s: float) -> None:
        """Take a step of the job's state machine."""
        transitions.advance(self, transitions.JOB, state, at_s, f"job {self.id}")

    def admits(self, host: Host) -> bool:
        """True where its ranks may be placed on the host."""
        wanted = self.spec.resources
        named = (not wanted.hosts or host.id in wanted.hosts) and host.id not in wanted.exclude
        labelled = not wanted.constraint or not host.missing_labels(wanted.constraint)
        if self.spec.container and host.why_no_container(self.spec.runtime):
            return False
        return named and labelled and host.id not in self.failures.excluded_hosts

    def back_off_s(self, first_s: float) -> float:
        """Pause after failed migrations: `first_s`, doubled for each further failure in a row; 0 without a failure.

        The next migration would fail like them, and its preparation costs the job's devices time.
        """
        failed = sum(1 for _ in takewhile(lambda change: change.failure, reversed(self.plan_changes)))
        return min(first_s * 2.0 ** min(failed - 1, 30), BACK_OFF_MAX_S) if failed else 0.0

    @property
    def attempt(self) -> Attempt | None:
        """Its attempt that is not over, if any."""
        if self.attempts and self.attempts[-1].state is not AttemptState.ENDED:
            return self.attempts[-1]
        return None

    @property
    def resuming(self) -> Migration | None:
        """The migration that switched and whose target ranks have yet to finish a step, if any."""
        last = self.migrations[-1] if self.migrations else None
        return last if last is not None and last.state is MigrationState.RESUMING else None

    @property
    def restarting(self) -> Restart | None:
        """The restart whose ranks have yet to finish a step, if any."""
        last = self.restarts[-1] if self.restarts else None
        return last if last is not None and last.state is RestartState.STARTING else None

    @property
    def plan_changes(self) -> list[Migration | Restart]:
        """Its migrations and restarts, by number."""
        return sorted([*self.migrations, *self.restarts], key=lambda change: change.number)

    @property
    def last_plan_change(self) -> Migration | Restart | None:
        """The newest of its migrations and restarts, if any."""
        newest: list[Migration | Restart] = [*self.migrations[-1:], *self.restarts[-1:]]
        return max(newest, key=lambda change: change.number, default=None)


@dataclass(slots=True)
class Used:
    """Devices that a user has used, by `fair_share.charge`."""

    device_s: float = 0.0  # of which each half-life takes half
    month_s: float = 0.0  # device-seconds of this calendar month
    devices: float = 0.0  # held since then, by weight
    at_s: float = 0.0


@dataclass(slots=True)
class State:
    """Whole state of the scheduler. Serialisable and comparable: a replay of the journal gives an equal one."""

    epoch: int = 0
    jobs: dict[JobId, Job] = field(default_factory=dict)
    hosts: dict[HostId, Host] = field(default_factory=dict)
    holders: dict[DeviceId, Holder] = field(default_factory=dict)  # by device that is in use
    sharers: dict[DeviceId, list[JobId]] = field(default_factory=dict)  # further jobs on a device beside its holder
    performance_tables: dict[str, PerformanceTable] = field(default_factory=dict)  # by model
    tenants: dict[str, Tenant] = field(default_factory=dict)
    device_limits: dict[str, int] = field(default_factory=dict)  # devices held at a time, by user; "": all others
    half_life_s: float = 0.0  # of what was used, for fair shares; 0: shares are of what is held
    budgets: dict[str, float] = field(default_factory=dict)  # device-hours a month, by user; "": all others
    device_weights: dict[str, float] = field(default_factory=dict)  # by part of the type's name; 1: all others
    used: dict[str, dict[str, Used]] = field(default_factory=dict)  # by tenant and user, if anything depends on it
    move_costs_s: dict[str, float] = field(default_factory=dict)  # by model: moving average of downtimes
    restart_costs_s: dict[str, float] = field(default_factory=dict)  # likewise, of migrations through host memory
    timers: dict[Timer, float] = field(default_factory=dict)
    passed_s: float | None = None  # time of the last scheduling pass; None: the next one need not wait
    queue: dict[JobId, None] = field(default_factory=dict)  # queued jobs, in order of arrival in the queue
    order: Order = field(default_factory=dict)  # of the last pass; see `place_of`
    active: dict[JobId, None] = field(default_factory=dict)  # jobs with an attempt that is not over
    reservation: Reservation | None = None
    handovers: dict[JobId, Handover] = field(default_factory=dict)  # by queued job, oldest first
    device_claims: dict[str, DeviceClaim] = field(default_factory=dict)  # by id; those that are not over
    last_device_claim: int = 0
    # start and device-seconds of bookings that are over, or of devices that they released, by owner
    booked_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    notice: str = ""  # of an operator to all users; empty: there is none
    run_times: dict[str, list[float]] = field(default_factory=dict)  # see `estimates.expected_time`
    recovering: set[HostId] = field(default_factory=set)  # hosts that must report before anything is placed
    jobs_by_host: dict[HostId, dict[JobId, None]] = field(default_factory=dict)  # see `index`
    hosts_by_job: dict[JobId, set[HostId]] = field(default_factory=dict)

    def attempt(self, job: JobId, number: int, generation: int | None = None) -> Attempt | None:
        """The attempt, if it is the job's running one (and of this generation)."""
        known = self.jobs.get(job)
        attempt = known.attempt if known else None
        if attempt is None or attempt.number != number:
            return None
        return attempt if generation is None or attempt.generation == generation else None

    def past_attempt(self, job: JobId, number: int) -> Attempt | None:
        """The attempt, over or not."""
        known = self.jobs.get(job)
        return next((a for a in known.attempts if a.number == number), None) if known is not None else None

    def account_of(self, job: str) -> str:
        """Account of a job on the hosts; "": the daemon's own, also where the job is unknown."""
        known = self.jobs.get(JobId(job))
        return known.spec.account if known is not None else ""

    def running_attempts(self) -> Iterator[Attempt]:
        """Attempts all of whose ranks run."""
        attempts = (self.jobs[job].attempt for job in self.active)
        return (attempt for attempt in attempts if attempt is not None and attempt.state is AttemptState.RUNNING)

    def jobs_on(self, device: DeviceId) -> list[JobId]:
        """Jobs that hold the device: one, unless they share it."""
        holder = self.holders.get(device)
        return [holder.job, *self.sharers.get(device, ())] if holder is not None else []

    def share_limit(self, device: DeviceId) -> int:
        """Jobs that may be on a device in use, by those that are: the least number counts."""
        return min(self.jobs[job].spec.resources.share for job in self.jobs_on(device))

    def attempts_on(self, host: HostId) -> Iterator[Attempt]:
        """Attempts with a rank of any generation on the host."""
        for job in self.jobs_by_host.get(host, ()):
            attempt = self.jobs[job].attempt
            assert attempt is not None, f"job {job} is indexed under {host} without an attempt"
            yield attempt

    def index(self, attempt: Attempt) -> None:
        """Update the index by host after the hosts of an attempt changed; invariants compare it with the attempts."""
        now = set() if attempt.state is AttemptState.ENDED else attempt.all_hosts
        before = self.hosts_by_job.pop(attempt.job, set())
        for host in sorted(before - now):
            del self.jobs_by_host[host][attempt.job]
            if not self.jobs_by_host[host]:
                del self.jobs_by_host[host]
        for host in sorted(now - before):
            self.jobs_by_host.setdefault(host, {})[attempt.job] = None
        if now:
            self.hosts_by_job[attempt.job] = now
