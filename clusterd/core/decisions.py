"""What is to be done: the only output of the scheduler.

Decisions are imperative and complete: whoever carries them out chooses nothing. Each names the event that caused it and
gives its reason in words, which is kept: `clusterd why` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from clusterd.core.events import EventId
from clusterd.types import HostId, JobId, RankPlace
from plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Something to do, or to say, and why."""

    cause: EventId
    reason: str

    @classmethod
    def match(cls, decisions: Iterable[Decision], **fields: Any) -> Self | None:
        """The first of `decisions` that is of this class and has these field values."""
        for decision in decisions:
            if isinstance(decision, cls) and all(getattr(decision, n) == v for n, v in fields.items()):
                return decision
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeModel(Decision):
    """Let the job's script tell its model on this host, without devices."""

    job: JobId
    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttempt(Decision):
    """Start these ranks, all of them."""

    job: JobId
    attempt: int
    generation: int
    plan: Plan | None
    ranks: tuple[RankPlace, ...]
    restore: str | None = None  # checkpoint to go on from

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Each host once, that of rank 0 first."""
        return tuple(dict.fromkeys(place.host for place in self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt(Decision):
    """End what is left of the attempt on this host, and report when nothing is."""

    job: JobId
    attempt: int
    generation: int
    host: HostId
    grace_s: float
    keep: bool = False  # ranks that can leave the state of their last step in the hosts' memory first
    done: bool = False  # the job is where it was to get: ranks leave its result as after the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMigration(Decision):
    """Move the running attempt to these ranks, in memory, up to the point where only the switch is left."""

    job: JobId
    attempt: int
    generation: int  # of the ranks that run
    plan: Plan
    ranks: tuple[RankPlace, ...]
    new_generation: int
    new_plan: Plan
    new_ranks: tuple[RankPlace, ...]
    lost: tuple[int, ...] = ()  # old ranks that are dead, or behind those that are left
    step: int | None = None  # with lost ranks: that those that are left are to end, if they have not
    makes_room: bool = False  # new ranks find memory only where the old ones, who wait, have handed over and let go

    @property
    def devices(self) -> int:
        """How many the job will have."""
        return len(self.new_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRanks(Decision):
    """A word for the ranks of one generation, on these hosts."""

    job: JobId
    attempt: int
    generation: int
    hosts: tuple[HostId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortMigration(ToRanks):
    """Let the ranks of `generation`, if they wait for a switch, train on; the new ones are stopped apart from this."""

    new_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAttempt(ToRanks):
    """The switch is made: the ranks of `generation` train from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOffSurvivors(ToRanks):
    """Tell ranks that peers of theirs are gone: a host that lost its power closes no connection, and they wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCheckpoint(ToRanks):
    """Have the ranks write the job's state to a directory that its hosts share, while they train on."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCores(ToRanks):
    """Have each rank compute on so many CPU cores from its next step on."""

    each: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Decision):
    """Report back at this time; a timer of the same name is replaced."""

    timer: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldJob(Decision):
    """Leave the job where it is: nothing to carry out, something to tell its user."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob(Decision):
    """The job reached its end; what was kept for running it can go."""

    job: JobId
    state: str
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueJob(Decision):
    """The attempt is over, the job is not."""

    job: JobId
    attempt: int
