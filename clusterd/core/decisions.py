"""Decisions: the only output of the scheduler.

A decision is imperative and complete: the executor chooses nothing. It names the event that caused it and gives its
reason in words, which `clusterd why` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from clusterd.core.events import EventId, Timer
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId, JobId, RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Base of all decisions."""

    cause: EventId
    reason: str

    @classmethod
    def match(cls, decisions: Iterable[Decision], **fields: Any) -> Self | None:
        """First of `decisions` that is of this class and has these field values; None: there is none."""
        for decision in decisions:
            if isinstance(decision, cls) and all(getattr(decision, n) == v for n, v in fields.items()):
                return decision
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeModel(Decision):
    """Inspect the job's model on this host, without devices."""

    job: JobId
    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttempt(Decision):
    """Start all ranks of an attempt."""

    job: JobId
    attempt: int
    generation: int
    plan: Plan | None
    ranks: tuple[RankPlace, ...]
    restore: str | None = None  # directory of the checkpoint to load

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Each host once, that of rank 0 first."""
        return tuple(dict.fromkeys(place.host for place in self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt(Decision):
    """Stop every process of the attempt on this host, and report when none is left."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    grace_s: float
    keep: bool = False  # ranks first leave the state of their last step in host memory
    done: bool = False  # the job reached its target: ranks write its result as after the last step
    save: str | None = None  # directory of the checkpoint that ranks write first; "": one of the attempt on its host


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMigration(Decision):
    """Prepare the target ranks and transfer the state of the running attempt to them, up to the switch."""

    job: JobId
    attempt: int
    generation: int  # of the source ranks
    plan: Plan
    ranks: tuple[RankPlace, ...]
    new_generation: int
    new_plan: Plan
    new_ranks: tuple[RankPlace, ...]
    lost: tuple[int, ...] = ()  # source ranks that are dead, or a step behind the survivors
    step: int | None = None  # with lost ranks: the step that survivors finish first
    source_releases_memory: bool = False  # the devices hold target ranks only once source ranks have freed their state

    @property
    def devices(self) -> int:
        """Number of devices after the migration."""
        return len(self.new_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRanks(Decision):
    """Base of messages to the ranks of one generation on these hosts."""

    job: JobId
    attempt: int
    generation: int
    hosts: tuple[HostId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortMigration(ToRanks):
    """Let source ranks that wait for the switch train on; target ranks are stopped by a decision of their own."""

    new_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAttempt(ToRanks):
    """Let the ranks of `generation`, to which the attempt has switched, train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCollectives(ToRanks):
    """Abort the collectives of ranks whose peers are gone: a host without power closes no connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCheckpoint(ToRanks):
    """Write a checkpoint to a directory that the job's hosts share, while training goes on."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCores(ToRanks):
    """Give each rank this many CPU cores from its next step on."""

    each: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanks(ToRanks):
    """Send the signal that a job asked for before its time limit; `first_only`: not to the children of its ranks."""

    number: int
    first_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Decision):
    """Fire a timer at this time; it replaces one with the same key."""

    timer: Timer
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldJob(Decision):
    """Record a new reason for the job's state; nothing is carried out."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob(Decision):
    """End the job and free what was stored for running it."""

    job: JobId
    state: str
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueJob(Decision):
    """Queue the job again after an attempt."""

    job: JobId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBooked(Decision):
    """Give devices of a booking to others, as no job of it has used them; its owner is told."""

    claim: str
    user: str
    devices: tuple[DeviceId, ...]


DECISIONS: dict[str, type[Decision]] = {
    kind.__name__: kind
    for kind in (
        DescribeModel,
        LaunchAttempt,
        StopAttempt,
        StartMigration,
        AbortMigration,
        ResumeAttempt,
        AbortCollectives,
        TakeCheckpoint,
        UseCores,
        SignalRanks,
        SetTimer,
        HoldJob,
        EndJob,
        RequeueJob,
        ReleaseBooked,
    )
}
"""Decision classes by the name that the journal stores."""
