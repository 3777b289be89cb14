"""What happened: the only input of the scheduler.

Events are facts, named in the past tense and written to the journal before they are handled. Each carries the time at
which it happened (`at_s`, seconds since the epoch) and the number the journal gave it (`id`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NewType

from clusterd.core.performance_table import Outlook
from clusterd.types import AttemptReport, DeviceId, HostFacts, HostId, JobId, JobSpec, RankEnd, RankReport, Tenant
from plans.plan import Plan

EventId = NewType("EventId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact."""

    at_s: float
    id: EventId = EventId(0)


# --- the daemon's own -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStarted(Event):
    """A daemon began to serve this journal; nothing is known of any host until its agent reports."""

    epoch: int
    tenants: dict[str, Tenant] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """The wall clock of the head node was set, as by NTP after a boot; `at_s` is by the new one."""

    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """A timer set by `SetTimer` is due."""

    timer: str


# --- hosts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAdded(Event):
    """An operator made a host part of the cluster."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRemoved(Event):
    """An operator took a host, which ran nothing, out of the cluster."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDrained(Event):
    """An operator wants the host empty."""

    host: HostId
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUndrained(Event):
    """The host may be used again."""

    host: HostId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConnected(Event):
    """The host's agent answered, with all that it runs or remembers."""

    host: HostId
    facts: HostFacts
    attempts: tuple[AttemptReport, ...] = ()
    agent: str = ""  # who answered: no two hosts have the same
    agent_home: str | None = None  # where it was looked for: "", the default, or what settings said; None: not told


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDisconnected(Event):
    """The way to the host's agent broke; its ranks may well run on."""

    host: HostId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChanged(Event):
    """The host's devices, or who else uses them, changed."""

    host: HostId
    facts: HostFacts


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Event):
    """A user handed over a job; from here on it is not lost."""

    job: JobId
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(Event):
    """Its user, or an operator, wants the job gone."""

    job: JobId
    by: str = ""
    now: bool = False  # without time to save what it did


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReprioritised(Event):
    """Its user, or an operator, gave the job another priority."""

    job: JobId
    priority: int
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescribed(Event):
    """A host built the job's model without storage and told its shape (`plans.legality.ModelShape.to_dict`)."""

    job: JobId
    shape: dict[str, Any]
    model: str = ""  # signature: jobs of the same share what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotDescribed(Event):
    """The job's script could not be brought to tell its model."""

    job: JobId
    why: str
    is_infrastructure: bool = False  # the host's fault: another may do it
    lasts: bool = False  # and it would fail there again: where no other can, the job fails


# --- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLearned(Event):
    """The performance model has (new) answers for all jobs of a model; they replace the earlier ones."""

    model: str
    outlook: Outlook
    why: str = ""  # in words: from what


@dataclass(frozen=True, slots=True, kw_only=True)
class EndForeseen(Event):
    """The loss curve says when the job will be done, or that it cannot be said."""

    job: JobId
    predictable: bool
    steps: int | None = None  # in all, until the target; None: no target, or never
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProposed(Event):
    """A short run of a job under this plan would teach most; None: its model is known well enough."""

    job: JobId
    plan: Plan | None
    steps: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasured(Event):
    """A plan was run for some steps on some allocation."""

    job: JobId
    plan: Plan
    shape: tuple[int, ...]  # devices on each host, most first
    device_type: str
    step_time_s: float  # median
    steps: int
    predicted_s: float | None = None  # before it was measured


# --- attempts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched(Event):
    """Every rank of the attempt was started."""

    job: JobId
    attempt: int
    generation: int
    restored_step: int | None = None  # whose state was taken from a snapshot in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed(Event):
    """A host did not start its ranks."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    why: str
    is_infrastructure: bool = True
    lasts: bool = False  # and it would fail there again: where no other can, the job fails


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(Event):
    """A rank's process is gone, seen by its parent and written down before it was sent."""

    job: JobId
    attempt: int
    generation: int  # of the lease it ran under; older ones are history, not news
    host: HostId
    rank: int
    end: RankEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrphaned(Event):
    """A rank cannot go on, for lack of peers or of memory; it holds its state of the end of `step`, and waits."""

    job: JobId
    attempt: int
    generation: int
    rank: int
    step: int  # -1: of no step, parameters were torn in the middle of an update
    may_finish: bool = False  # it has all that the next step needs of others, should one of them have made that step
    out_of_memory: bool = False  # its own plan does not fit its device; peers that it cuts off say no such thing


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopped(Event):
    """Nothing of the attempt is left on the host: no rank, no straggler with its tag."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgressed(Event):
    """Training went on; the newest step stands for those since the last event."""

    job: JobId
    attempt: int
    step: int
    loss: float | None
    step_time_s: float
    first_loss: float | None = None  # of step 1, with the first such event


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTaken(Event):
    """The job's whole state of the end of `step` is on disk."""

    job: JobId
    attempt: int
    step: int
    path: str


# --- migrations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequested(Event):
    """A person wants a running job under another plan, or elsewhere."""

    job: JobId
    plan: Plan | None = None  # None: the plan it has
    devices: tuple[DeviceId, ...] = ()  # rank by rank; empty: the scheduler chooses
    pin: bool = False  # and keep it so
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUnpinned(Event):
    """The scheduler may change the job's plan and place again."""

    job: JobId
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationAdvanced(Event):
    """A phase of a migration is over, and took this long."""

    job: JobId
    attempt: int
    generation: int  # of the new ranks
    phase: str
    seconds: float
    what: str = ""  # in words: bytes, ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationVerified(Event):
    """The new ranks hold the whole state of `step`, checked; the old ones wait. Now, and only now, is the switch."""

    job: JobId
    attempt: int
    generation: int
    step: int
    network_bytes: int
    local_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationFinished(Event):
    """The new ranks train; `downtime_s` is from the end of the last old step to the start of the first new one."""

    job: JobId
    attempt: int
    generation: int
    downtime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationFailed(Event):
    """The migration ended before the switch; what could be undone is undone, and the old ranks go on."""

    job: JobId
    attempt: int
    generation: int
    phase: str
    why: str
    host: HostId | None = None  # that could not start the new ranks
    out_of_memory: bool = False  # a new rank found too little on its device
    refused: str = ""  # why the job cannot train under the new plan, in a new rank's words


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        DaemonStarted,
        ClockSet,
        TimerFired,
        HostAdded,
        HostRemoved,
        HostDrained,
        HostUndrained,
        HostConnected,
        HostDisconnected,
        HostChanged,
        JobSubmitted,
        JobCancelled,
        JobReprioritised,
        ModelDescribed,
        ModelNotDescribed,
        SpeedLearned,
        EndForeseen,
        TrialProposed,
        TrialMeasured,
        AttemptLaunched,
        LaunchFailed,
        RankExited,
        RankOrphaned,
        AttemptStopped,
        AttemptProgressed,
        CheckpointTaken,
        MigrationRequested,
        JobUnpinned,
        MigrationAdvanced,
        MigrationVerified,
        MigrationFinished,
        MigrationFailed,
    )
}
"""By the name under which the journal keeps them: a class may move, its name may not change."""
