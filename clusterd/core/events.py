"""What happened: the only input of the scheduler.

Events are facts, named in the past tense and written to the journal before they are handled. Each carries the time at
which it happened (`at_s`, seconds since the epoch) and the number the journal gave it (`id`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

from clusterd.types import AttemptReport, HostFacts, HostId, JobId, JobSpec, RankEnd, RankReport

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotDescribed(Event):
    """The job's script could not be brought to tell its model."""

    job: JobId
    why: str
    is_infrastructure: bool = False  # the host's fault: another may do it


# --- attempts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLaunched(Event):
    """Every rank of the attempt was started."""

    job: JobId
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed(Event):
    """A host did not start its ranks."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    why: str
    is_infrastructure: bool = True


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


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        DaemonStarted,
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
        AttemptLaunched,
        LaunchFailed,
        RankExited,
        AttemptStopped,
        AttemptProgressed,
    )
}
"""By the name under which the journal keeps them: a class may move, its name may not change."""
