"""Events: the only input of the scheduler.

An event is a fact, named in the past tense and written to the journal before it is handled. It carries the time at
which it happened (`at_s`, seconds since the epoch) and the number that the journal gave it (`id`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NewType

from clusterd.core.performance_table import PerformanceTable
from clusterd.core.state import Job
from clusterd.core.timers import Timer as Timer
from clusterd.core.timers import TimerKind as TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import (
    AttemptReport,
    DeviceClaim,
    DeviceId,
    HostFacts,
    HostId,
    JobId,
    JobSpec,
    RankEnd,
    RankReport,
    Reclaim,
    Tenant,
)

EventId = NewType("EventId", int)
NO_EVENT = EventId(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at_s: float
    id: EventId = NO_EVENT


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStarted(Event):
    """A daemon opened this journal; no host is known to be up until its agent reports."""

    epoch: int
    tenants: dict[str, Tenant] = field(default_factory=dict)
    device_limits: dict[str, int] = field(default_factory=dict)  # see `State`
    half_life_s: float = 0.0  # see `State`
    budgets: dict[str, float] = field(default_factory=dict)  # see `State`
    device_weights: dict[str, float] = field(default_factory=dict)  # see `State`


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReloaded(Event):
    """An operator changed quotas and limits of the daemon that serves."""

    tenants: dict[str, Tenant]
    device_limits: dict[str, int]
    half_life_s: float = 0.0
    budgets: dict[str, float] = field(default_factory=dict)
    device_weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """The wall clock of the head node was set, as by NTP after a boot; `at_s` is by the new clock."""

    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """A timer set by `SetTimer` is due."""

    timer: Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAdded(Event):
    """An operator added a host to the cluster."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRemoved(Event):
    """An operator removed a host, which ran nothing, from the cluster."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDrained(Event):
    """An operator drained the host: its jobs leave and nothing new is placed there."""

    host: HostId
    by: str = ""
    why: str = ""
    jobs_stay: bool = False  # those there run to their end


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUndrained(Event):
    """An operator returned the host to service."""

    host: HostId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConnected(Event):
    """The host's agent answered and reported every attempt that it runs or has records of."""

    host: HostId
    facts: HostFacts
    attempts: tuple[AttemptReport, ...] = ()
    agent: str = ""  # identity of the agent, unique among hosts
    agent_home: str | None = None  # its configured directory; "": the default; None: not recorded
    adopted: tuple[Job, ...] = ()  # from records of launches that are newer than this state


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDisconnected(Event):
    """The connection to the host's agent broke; its ranks may go on."""

    host: HostId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountConnected(Event):
    """The agent of an account other than the daemon's answered on a host, and reported its attempts."""

    host: HostId
    account: str
    attempts: tuple[AttemptReport, ...] = ()
    adopted: tuple[Job, ...] = ()  # as of `HostConnected`


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountDisconnected(Event):
    """The agent of an account on a host cannot be reached, or the account has no login there."""

    host: HostId
    account: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChanged(Event):
    """The host's devices, or the foreign processes on them, changed."""

    host: HostId
    facts: HostFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesClaimed(Event):
    """An operator claimed devices, or a user booked them: from its start to its end others' jobs do not get them."""

    claim: DeviceClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaimRemoved(Event):
    """A claim was removed, or a booking cancelled, before its end."""

    claim: str
    by: str = ""


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticePosted(Event):
    """An operator told all users something; without text, took it back."""

    text: str
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Event):
    """A user submitted a job; from here on it is not lost."""

    job: JobId
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(Event):
    """The job's user or an operator cancelled it."""

    job: JobId
    by: str = ""
    now: bool = False  # without a grace period
    why: str = ""
    is_over: bool = False  # it was there for a shell, which ended by itself: that is no cancellation


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReprioritised(Event):
    """The job's user or an operator changed its priority."""

    job: JobId
    priority: int
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEdited(Event):
    """The job's user or an operator changed what it asks for."""

    job: JobId
    spec: JobSpec  # after the change, with its priority
    what: str  # the change in words
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHeld(Event):
    """The job's user or an operator keeps it in the queue until it is released."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased(Event):
    """A held job may start again."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequeued(Event):
    """The job's user or an operator had it stopped, to start again from the queue."""

    job: JobId
    by: str = ""
    hold: bool = False  # and stay there until it is released


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused(Event):
    """The processes of a running command were stopped where they are; it keeps its devices."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUnpaused(Event):
    """The processes of a paused command run again."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsArchived(Event):
    """Jobs that ended long ago left the state; the journal's table of jobs holds them."""

    jobs: tuple[JobId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecalled(Event):
    """An archived job is back in the state, as somebody asked for it."""

    job: JobId
    record: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescribed(Event):
    """A host built the job's model without storage and reported its shape (`ModelShape.to_dict`)."""

    job: JobId
    shape: dict[str, Any]
    model: str = ""  # signature: jobs with the same one share measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotDescribed(Event):
    """Inspecting the job's model failed."""

    job: JobId
    why: str
    is_infrastructure: bool = False  # the host's fault: another host may succeed
    is_permanent: bool = False  # that host would fail again: without another host the job fails
    is_full_disk: bool = False  # that host has no room: without another host the job waits for it


# --- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLearned(Event):
    """The performance model has a new table of estimates for all jobs of a model; it replaces the earlier one."""

    model: str
    table: PerformanceTable
    why: str = ""  # the measurements behind it, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPredicted(Event):
    """The loss curve predicts at which step the job reaches its target, or is not predictable."""

    job: JobId
    predictable: bool
    steps: int | None = None  # in all, until the target; None: no target, or it is never reached
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProposed(Event):
    """The profiler asks for a trial run of this plan; plan None: the model is known well enough."""

    job: JobId
    plan: Plan | None
    steps: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasured(Event):
    """The profiler timed a plan over some steps on some allocation."""

    job: JobId
    plan: Plan
    shape: tuple[int, ...]  # devices on each host, largest first
    device_type: str
    step_time_s: float  # median
    steps: int
    predicted_s: float | None = None  # before it was measured


# --- attempts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched(Event):
    """Every rank of the attempt started."""

    job: JobId
    attempt: int
    generation: int
    restored_step: int | None = None  # step of the state snapshot in memory that it was restored from
    versions: dict[HostId, dict[str, str]] = field(default_factory=dict)  # of Python, torch, ... on each host


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentBuildStarted(Event):
    """A host lacks the Python environment of a job, and builds it before the ranks start."""

    job: JobId
    attempt: int
    generation: int
    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentBuilt(Event):
    """A host has built the Python environment of a job."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed(Event):
    """A host failed to start its ranks."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    why: str
    is_infrastructure: bool = True
    is_permanent: bool = False  # that host would fail again: without another host the job fails
    is_full_disk: bool = False  # that host has no room: without another host the job waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(Event):
    """A rank's process exited; its agent recorded the exit before reporting it."""

    job: JobId
    attempt: int
    generation: int  # under which it ran; reports of former generations are ignored
    host: HostId
    rank: int
    end: RankEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrphaned(Event):
    """A rank lost its peers or ran out of memory; it holds its state of the end of `step` and waits."""

    job: JobId
    attempt: int
    generation: int
    rank: int
    step: int  # -1: the state is torn, the rank was in the middle of an update
    can_finish_step: bool = False  # it has received all that the next step needs from its peers
    out_of_memory: bool = False  # its plan does not fit its device; never set by the peers that it aborts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopped(Event):
    """No process of the attempt is left on the host."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgressed(Event):
    """The job trained on; this step is the newest since the last such event."""

    job: JobId
    attempt: int
    step: int
    loss: float | None
    step_time_s: float
    first_loss: float | None = None  # of step 1; in the first such event only
    is_nan: bool | None = None  # there is a loss, and it is not a number; None: unknown, of an older agent
    start: tuple[tuple[str, float], ...] = ()  # "began_s" and phases of rank 0's start; in the first such event only
    input_share: float | None = None  # of the newest timed step, in which the device waited for its input


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlenessObserved(Event):
    """The devices of an attempt have done nothing since `since_s`; None: they work again."""

    job: JobId
    attempt: int
    since_s: float | None
    reclaim_at_s: float | None = None  # when something is done about it; None: never
    reclaim: Reclaim = Reclaim.SHELLS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemoryObserved(Event):
    """A job holds more of the memory of a shared device than its part, or does no more."""

    job: JobId
    attempt: int
    device: DeviceId
    used_bytes: int
    part_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTaken(Event):
    """The job's whole state of the end of `step` is in a checkpoint on disk."""

    job: JobId
    attempt: int
    step: int
    path: str  # "HOST:/folder" where only that host sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint that nobody waits for, periodic or at a stop, could not be written."""

    job: JobId
    attempt: int
    step: int
    why: str


# --- migrations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequested(Event):
    """A user asked for another plan or other devices for a running job."""

    job: JobId
    plan: Plan | None = None  # None: the current plan
    devices: tuple[DeviceId, ...] = ()  # rank by rank; empty: the scheduler chooses
    pin: bool = False  # keep it there afterwards
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUnpinned(Event):
    """A user allowed the scheduler to change the job's plan and devices again."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationAdvanced(Event):
    """A phase of a migration ended."""

    job: JobId
    attempt: int
    generation: int  # of the target ranks
    phase: str
    seconds: float
    what: str = ""  # bytes or ranks, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationVerified(Event):
    """The target ranks hold the whole, verified state of `step`; only now may the switch happen."""

    job: JobId
    attempt: int
    generation: int
    step: int
    network_bytes: int
    local_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationFinished(Event):
    """The target ranks train; `downtime_s` runs from the last step before to the first step after."""

    job: JobId
    attempt: int
    generation: int
    downtime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationFailed(Event):
    """The migration failed before the switch and was undone; the source ranks go on."""

    job: JobId
    attempt: int
    generation: int
    phase: str
    why: str
    host: HostId | None = None  # that failed to start the target ranks
    out_of_memory: bool = False  # a target rank ran out of memory on its device
    refused: str = ""  # a target rank's reason why the job cannot train under the plan


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        DaemonStarted, SettingsReloaded, ClockSet, TimerFired, HostAdded, HostRemoved, HostDrained, HostUndrained,
        HostConnected, HostDisconnected, HostChanged, DevicesClaimed, DeviceClaimRemoved, AccountConnected,
        AccountDisconnected, NoticePosted,
        JobSubmitted, JobCancelled, JobReprioritised, JobEdited, JobHeld, JobReleased, JobRequeued, JobPaused,
        JobUnpaused, JobsArchived, JobRecalled,
        ModelDescribed, ModelNotDescribed, SpeedLearned, CompletionPredicted, TrialProposed, TrialMeasured,
        EnvironmentBuildStarted, EnvironmentBuilt, AttemptLaunched, LaunchFailed, RankExited, RankOrphaned,
        AttemptStopped, AttemptProgressed, IdlenessObserved, DeviceMemoryObserved,
        CheckpointTaken, CheckpointFailed, MigrationRequested,
        JobUnpinned, MigrationAdvanced, MigrationVerified, MigrationFinished, MigrationFailed,
    )
}  # fmt: skip
"""Event classes by the name that the journal stores."""
