"""What the scheduler knows: changed by `clusterd.core.scheduler` alone, read by everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any

from clusterd.core import transitions
from clusterd.core.allocation.first_fit import NO_BOUNDS, Bounds
from clusterd.core.performance_table import Outlook
from clusterd.types import (
    AttemptState,
    Device,
    DeviceId,
    HostFacts,
    HostId,
    HostState,
    JobId,
    JobSpec,
    JobState,
    RankEnd,
    RankPlace,
    Tenant,
)
from plans.plan import Plan

CALM_MOST_S = 3600.0
"""Between a move that failed and the next, however many have failed in a row."""


class Outcome(StrEnum):
    """Why an attempt is being stopped, where its ranks' ends alone do not tell."""

    CANCELLED = "cancelled"
    TIME_LIMIT = "time limit"
    HOST_LOST = "host lost"
    TARGET_REACHED = "target reached"
    LAUNCH_FAILED = "launch failed"
    PREEMPTED = "preempted"
    REFUSED = "refused"  # by a host that could not start it, where others may


class Description(StrEnum):
    """How far we are in learning an elastic job's model before its first launch."""

    NOT_NEEDED = "not needed"
    NEEDED = "needed"
    ASKED = "asked"
    DONE = "done"


@dataclass(slots=True)
class Fault:
    """What a device failed of, under one of our ranks."""

    why: str
    times: int = 1
    is_left_out: bool = True  # until a timer offers it again


@dataclass(slots=True)
class Host:
    """A machine and what its agent last said."""

    id: HostId
    state: HostState = HostState.CONNECTING
    facts: HostFacts | None = None
    agent: str = ""  # that answered last
    agent_home: str | None = None  # as settings had it then; "": its default; None: of earlier versions, not known
    drained: str | None = None  # by whom and why; None: it may be used
    why: str = ""  # it is not up
    since_s: float = 0.0  # in this state
    orphans: set[tuple[JobId, int, int]] = field(default_factory=set)  # generations found there that are being stopped
    strangers: set[tuple[JobId, int, int]] = field(default_factory=set)  # run there, of a later state than this one
    cores_used: int = 0
    memory_used_bytes: int = 0
    faults: dict[DeviceId, Fault] = field(default_factory=dict)  # since somebody has seen to it last

    def go(self, state: HostState, at_s: float, why: str = "") -> None:
        """Take a step of the host's state machine."""
        if state is not self.state:
            self.state = transitions.step(transitions.HOST, self.state, state, f"host {self.id}")
            self.since_s = at_s
        self.why = why

    @property
    def unusable(self) -> str | None:
        """Why nothing may be placed here now; None: something may."""
        if self.state is not HostState.UP:
            return f"{self.id} is {self.state.value}"
        if self.drained is not None:
            return f"{self.id} is drained"
        if self.orphans:
            return f"{self.id} is being cleaned of {len({who[:2] for who in self.orphans})} old attempts"
        return self.strange or None

    @property
    def strange(self) -> str:
        """What runs there that nobody here has started, and what is to be done about it."""
        jobs = sorted({str(job) for job, _, _ in self.strangers}, key=lambda job: (len(job), job))
        if not jobs:
            return ""
        names = f"job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"
        return f"{self.id} runs {names} of a later state of this cluster: clusterd host undrain {self.id} ends that"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices as last reported; one that failed is offered no more than one that somebody else uses."""
        reported = self.facts.devices if self.facts else ()
        if not self.faults:
            return reported
        return tuple(replace(d, foreign=self.faults[d.id].why) if self.is_faulty(d.id) else d for d in reported)

    def is_faulty(self, device: DeviceId) -> bool:
        """It failed, and is not to be used for some time."""
        return device in self.faults and self.faults[device].is_left_out


@dataclass(frozen=True, slots=True)
class Lease:
    """An expiring claim of one attempt on one device; the agent refuses older generations."""

    device: DeviceId
    host: HostId
    job: JobId
    attempt: int
    generation: int
    until_s: float | None  # the job's time limit, or None


@dataclass(slots=True)
class Rank:
    """One rank of an attempt: where it is and how it ended."""

    place: RankPlace
    end: RankEnd | None = None


@dataclass(slots=True)
class Migration:
    """One move of an attempt to other ranks: under way, or history."""

    number: int
    generation: int  # of the new ranks
    plan: Plan
    ranks: dict[int, Rank]
    old_plan: Plan
    reason: str
    started_s: float
    cores: dict[HostId, int] = field(default_factory=dict)  # of the new ranks, in all
    memory_bytes: dict[HostId, int] = field(default_factory=dict)
    phases: list[tuple[str, float, str]] = field(default_factory=list)  # name, seconds, in words
    step: int | None = None
    network_bytes: int = 0
    local_bytes: int = 0
    downtime_s: float | None = None
    ended_s: float | None = None
    lost: tuple[int, ...] = ()  # old ranks that were dead when it began
    restarts: bool = False  # the old ranks end before the new ones are made; the state waits in host memory
    failure: str = ""  # why it failed; empty: it did not
    old_pin: Plan | None = None  # that the job has again where it fails

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Of the new ranks, by number."""
        return tuple(rank.place for _, rank in sorted(self.ranks.items()))


@dataclass(slots=True)
class Retired:
    """Ranks of a generation that is not the attempt's any more, until every host says that they are gone."""

    ranks: dict[int, Rank]
    pending: set[HostId]
    cores: dict[HostId, int]
    memory_bytes: dict[HostId, int]


@dataclass(slots=True)
class Attempt:
    """One numbered run of a job."""

    job: JobId
    number: int
    generation: int
    plan: Plan | None
    ranks: dict[int, Rank]
    started_s: float
    state: AttemptState = AttemptState.LAUNCHING
    step: int = 0  # newest that was heard of
    ended_s: float | None = None
    given_up: set[HostId] = field(default_factory=set)  # hosts that were lost before they could say that it is gone
    outcome: Outcome | None = None
    why: str = ""  # it is being stopped, or ended
    pending: set[HostId] = field(default_factory=set)  # hosts that have not reported it gone
    cut_short: bool = False  # its ranks have no time to save, whatever their job asked for
    cores: dict[HostId, int] = field(default_factory=dict)
    memory_bytes: dict[HostId, int] = field(default_factory=dict)
    last_generation: int = 1  # that was given out
    migration: Migration | None = None  # under way, not switched
    onward: Migration | None = None  # how the job is to go on at once when this attempt has been stopped for it
    resuming: bool = False  # switched, and not known to train yet
    retired: dict[int, Retired] = field(default_factory=dict)  # by generation
    orphaned: dict[int, int] = field(default_factory=dict)  # ranks that lost their peers, and wait, with their step
    may_finish: set[int] = field(default_factory=set)  # of these, what can make one step more alone
    cut_off: bool = False  # ranks that wait for the dead were told
    is_too_large: bool = False  # a rank ran out of memory under the plan that it was moved to
    past: dict[int, dict[int, HostId]] = field(default_factory=dict)  # host by rank of each generation that trained
    past_plans: dict[int, Plan] = field(default_factory=dict)  # of each generation that trained
    told_cores: int | None = None  # beside each device, since its ranks were launched; None: they were told nothing
    kept: dict[DeviceId, HostId] = field(default_factory=dict)  # leased, and idle while a smaller plan is tried

    def go(self, state: AttemptState) -> None:
        """Take a step of the attempt's state machine."""
        self.state = transitions.step(transitions.ATTEMPT, self.state, state, f"attempt {self.job}.{self.number}")

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Each of its hosts once, that of rank 0 first."""
        return tuple(dict.fromkeys(rank.place.host for rank in self.ranks.values()))

    @property
    def all_hosts(self) -> set[HostId]:
        """Those of ranks that come, and of ranks that go, too."""
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


@dataclass(slots=True)
class Trial:
    """A short run of a job under a plan, to learn from: wanted, or under way, or measured."""

    plan: Plan
    steps: int
    why: str
    migration: int | None = None  # number of the move to it, once that was begun
    from_step: int | None = None  # at which the job began to run so
    step_time_s: float | None = None  # median
    predicted_s: float | None = None
    failure: str = ""  # why it was not to be
    is_refused: bool = False  # the plan cannot run there: no use to try it again


@dataclass(slots=True)
class Job:
    """What a user submitted; outlives its attempts."""

    id: JobId
    spec: JobSpec
    priority: int
    submitted_s: float  # follows a clock that is set, as long as the job is not over
    queued_s: float  # since when it waits; a requeued job keeps its place by `submitted_s`
    born_s: float = 0.0  # when it was submitted, as the clock was then: tells it from another job of the same id
    state: JobState = JobState.QUEUED
    reason: str = ""  # in words: why it is where it is
    attempts: list[Attempt] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)  # that are over
    checkpoint: str | None = None  # newest directory with its state, as its hosts see it
    checkpoint_step: int = 0
    pinned: Plan | None = None  # under which its user wants it, and where; a checkpointable one: at its next start too
    description: Description = Description.NOT_NEEDED
    described_on: HostId | None = None
    shape: dict[str, Any] | None = None  # plans.model_shape.ModelShape
    model: str = ""  # signature, by which `State.outlooks` has what is believed of its speed
    predictable: bool | None = None  # by how its loss goes on; None: not judged
    at_target: int = 0  # looks in a row at a loss on target
    foreseen_steps: int | None = None  # in all, until its target loss
    trial: Trial | None = None  # that is wanted or under way
    trials: list[Trial] = field(default_factory=list)  # that are over
    being_tried: bool = False  # between the first trial and the word that there is nothing more to try
    tried: bool = False  # that word was said, and the job is not yet where it belongs
    not_before_s: float = 0.0
    own_failures: int = 0
    at_most_bytes: int | None = None  # per device, as estimated: a plan that was thought to need more ran out of memory
    refused: list[tuple[Plan, str]] = field(default_factory=list)  # under which its ranks cannot train, and why
    needs_room: bool = False  # a rank of it ran out of memory beside another generation's, against all estimates
    lost_in_a_row: int = 0
    unfit: dict[HostId, str] = field(default_factory=dict)  # hosts that could not start it, and why
    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    step_time_s: float | None = None
    progressed_s: float | None = None  # when the newest step was heard of
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None

    def go(self, state: JobState) -> None:
        """Take a step of the job's state machine."""
        self.state = transitions.step(transitions.JOB, self.state, state, f"job {self.id}")

    def admits(self, host: HostId) -> bool:
        """Whether its ranks may be placed there."""
        wanted = self.spec.resources.hosts
        return host not in self.unfit and (not wanted or host in wanted)

    @property
    def bounds(self) -> Bounds:
        """What is known to be impossible for it."""
        known = self.refused or self.at_most_bytes is not None
        return Bounds(self.at_most_bytes, tuple(self.refused)) if known else NO_BOUNDS

    def cannot_train_under(self, plan: Plan, why: str) -> None:
        """Its ranks have said so; the job may train under another."""
        if plan not in dict(self.refused):
            self.refused.append((plan, why))

    def calm_s(self, first_s: float) -> float:
        """For how long it is left alone now that its last moves failed: `first_s`, and twice that for each before it.

        The next would fail like them, and costs the job's devices time to make ready.
        """
        failed = sum(1 for _ in takewhile(lambda move: move.failure, reversed(self.migrations)))
        return min(first_s * 2.0 ** min(failed - 1, 30), CALM_MOST_S) if failed else 0.0

    @property
    def attempt(self) -> Attempt | None:
        """The one that is not over."""
        if self.attempts and self.attempts[-1].state is not AttemptState.ENDED:
            return self.attempts[-1]
        return None


@dataclass(slots=True)
class State:
    """All of it. Serialisable, comparable: replaying the journal gives an equal one."""

    epoch: int = 0
    jobs: dict[JobId, Job] = field(default_factory=dict)
    hosts: dict[HostId, Host] = field(default_factory=dict)
    leases: dict[DeviceId, Lease] = field(default_factory=dict)
    outlooks: dict[str, Outlook] = field(default_factory=dict)  # by model
    tenants: dict[str, Tenant] = field(default_factory=dict)
    move_costs_s: dict[str, float] = field(default_factory=dict)  # by model: what moves took lately
    restart_costs_s: dict[str, float] = field(default_factory=dict)  # likewise, of moves through host memory
    timers: dict[str, float] = field(default_factory=dict)
    queue: dict[JobId, None] = field(default_factory=dict)  # queued jobs, in order of arrival here
    active: dict[JobId, None] = field(default_factory=dict)  # jobs with an attempt that is not over
    recovering: set[HostId] = field(default_factory=set)  # hosts to hear from before anything is placed

    def attempt(self, job: JobId, number: int, generation: int | None = None) -> Attempt | None:
        """The attempt, if it is the job's running one (and of this lease generation)."""
        known = self.jobs.get(job)
        attempt = known.attempt if known else None
        if attempt is None or attempt.number != number:
            return None
        return attempt if generation is None or attempt.generation == generation else None

    def past_attempt(self, job: JobId, number: int) -> Attempt | None:
        """The attempt, over or not."""
        known = self.jobs.get(job)
        return next((a for a in known.attempts if a.number == number), None) if known is not None else None

    def attempts_on(self, host: HostId) -> Iterator[Attempt]:
        """Attempts with a rank on the host, of whatever generation."""
        for job in self.active:
            attempt = self.jobs[job].attempt
            if attempt is not None and host in attempt.all_hosts:
                yield attempt
