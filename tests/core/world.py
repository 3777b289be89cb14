"""A scheduler with simulated hosts, whose agents obey late, twice, or never."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.invariants import violations
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.core.view import Policy
from clusterd.types import (
    AttemptReport,
    AttemptState,
    DeviceId,
    HostFacts,
    HostId,
    HostState,
    JobId,
    RankEnd,
    RankPlace,
    RankReport,
    Reason,
)
from tests.core.conftest import OK
from tests.core.properties import Generations, broken
from tests.core.strategies import HOSTS, MODELS, SHAPE, whole

STOPPED = RankEnd(reason=Reason.STOPPED)
Key = tuple[JobId, int, int]
"""Job, attempt, generation."""

Done = d.LaunchAttempt | d.StopAttempt | d.DescribeModel | d.StartMigration | d.ResumeAttempt | d.AbortCollectives


@dataclass(frozen=True)
class Verify:
    """The rest of a move whose new ranks are there."""

    start: d.StartMigration


@dataclass
class Ran:
    """Ranks of one generation on one host: there until they are stopped, however they ended."""

    places: tuple[RankPlace, ...]
    ends: dict[int, RankEnd | None] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # for somebody to take their state

    @property
    def devices(self) -> set[DeviceId]:
        return {place.device for place in self.places if place.device is not None}


class World:
    """Time, hosts, and the journal."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.scheduler = Scheduler(policy)
        self.now_s = 1e6
        self.events = 0
        self.log: list[Batch] = []
        self.todo: list[Done | Verify] = []
        self.said: list[e.Event] = []  # answers, any of which may be heard once more
        self.held: list[e.Event] = []
        self.holds = 0  # events that are to be handled together
        self.running: dict[HostId, dict[Key, Ran]] = {host: {} for host in HOSTS}
        self.facts: dict[HostId, HostFacts] = {host: whole(host) for host in HOSTS}
        self.gone: set[HostId] = set()  # for ever
        self.generations = Generations()

    # --- what the scheduler hears -------------------------------------------------------------------------------------

    def at(self) -> dict[str, Any]:
        self.now_s += 1.0
        self.events += 1
        return {"at_s": self.now_s, "id": e.EventId(self.events)}

    def tell(self, *events: e.Event) -> None:
        self.held += events
        if len(self.held) > self.holds:
            self.handle()

    def answer(self, event: e.Event) -> None:
        self.said = [*self.said[-30:], event]
        self.tell(event)

    def handle(self) -> None:
        """One batch of what was told; everything that was promised holds after it."""
        events, self.held, self.holds = tuple(self.held), [], 0
        decided = self.scheduler.handle(*events)
        self.log.append(Batch(events, self.scheduler.proposed))
        self.generations.follow(decided)
        assert violations(self.scheduler.state) + broken(self.scheduler.state) == []
        for decision in decided:
            if isinstance(decision, Done):
                self.todo.append(decision)
            elif isinstance(decision, d.AbortMigration):
                self.todo = [x for x in self.todo if not (_start(x) and _start(x).job == decision.job)]  # type: ignore[union-attr]

    def is_up(self, host: HostId) -> bool:
        known = self.scheduler.state.hosts.get(host)
        return known is not None and known.state is HostState.UP

    def connect(self, host: HostId) -> None:
        if host not in self.gone:
            reports = self.reports(host, "")
            self.tell(e.HostConnected(**self.at(), host=host, facts=self.facts[host], attempts=reports))

    def log_in(self, host: HostId, account: str) -> None:
        if host not in self.gone:
            self.tell(e.AccountConnected(**self.at(), host=host, account=account, attempts=self.reports(host, account)))

    def reports(self, host: HostId, account: str) -> tuple[AttemptReport, ...]:
        """Attempts that an account's agent has records of."""
        return tuple(
            AttemptReport(
                job=job, attempt=attempt, generation=generation,
                ranks=tuple(RankReport(rank=r, end=end) for r, end in ran.ends.items()),
            )
            for (job, attempt, generation), ran in self.running[host].items()
            if self.scheduler.state.jobs[job].spec.account == account
        )  # fmt: skip

    def disconnect(self, host: HostId) -> None:
        self.tell(e.HostDisconnected(**self.at(), host=host, why="cable"))

    def fire(self) -> None:
        """The timer that is due next."""
        timer, at_s = min(self.scheduler.state.timers.items(), key=lambda item: item[1])
        self.now_s = max(self.now_s, at_s)
        self.tell(e.TimerFired(**self.at(), timer=timer))

    # --- what hosts do ------------------------------------------------------------------------------------------------

    def live(self) -> list[tuple[HostId, Key, int]]:
        """Ranks that have not ended."""
        return [
            (host, key, rank)
            for host, here in self.running.items()
            for key, ran in here.items()
            for rank, end in ran.ends.items()
            if end is None
        ]

    def _shares(self, key: Key) -> bool:
        return self.scheduler.state.jobs[key[0]].spec.resources.share > 1

    def begin(self, key: Key, places: tuple[RankPlace, ...], host: HostId) -> None:
        """Ranks start; another job's may be on their devices only where both share them."""
        ran = Ran(tuple(p for p in places if p.host == host))
        for other, there in self.running[host].items():
            both = ran.devices & there.devices
            may = other[:2] == key[:2] or (self._shares(other) and self._shares(key))
            assert may or not both, f"{sorted(both)} are used by {other} and given to {key}"
        ran.ends = {place.rank: None for place in ran.places}
        self.running[host].setdefault(key, ran)

    def end(self, host: HostId, key: Key, rank: int, end: RankEnd) -> None:
        ran = self.running[host][key]
        ran.ends[rank] = end
        ran.waiting.discard(rank)
        if self.is_up(host):
            self.answer(e.RankExited(**self.at(), **_who(key), host=host, rank=rank, end=end))

    def orphan(self, host: HostId, key: Key, rank: int, **what: Any) -> None:
        self.running[host][key].waiting.add(rank)
        if self.is_up(host):
            self.answer(e.RankOrphaned(**self.at(), **_who(key), rank=rank, **what))

    def is_broken(self, key: Key) -> bool:
        """A rank of it failed or waits: its peers will not end well."""
        mine = [here[key] for here in self.running.values() if key in here]
        return any(ran.waiting or any(x and not x.is_success for x in ran.ends.values()) for ran in mine)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def carry_out(self, decision: Done | Verify, refuses: int = 0) -> None:
        """`refuses`: 0 it works, else in which way it does not."""
        self.todo.remove(decision)
        match decision:
            case d.LaunchAttempt():
                self._launch(decision, refuses)
            case d.StopAttempt():
                self._stop(decision)
            case d.DescribeModel() if self.is_up(decision.host):
                self._describe(decision, refuses)
            case d.StartMigration():
                self._prepare(decision, refuses)
            case Verify():
                self._verify(decision.start, refuses)
            case d.ResumeAttempt():
                key = (decision.job, decision.attempt, decision.generation)
                if all(self.is_up(host) for host in decision.hosts) and not self.is_broken(key):
                    self.answer(e.MigrationFinished(**self.at(), **_who(key), downtime_s=0.1))
            case d.AbortCollectives():
                key = (decision.job, decision.attempt, decision.generation)
                for host in decision.hosts if refuses == 0 else ():
                    for rank in [rank for h, k, rank in self.live() if (h, k) == (host, key)]:
                        self.orphan(host, key, rank, step=5)

    def _launch(self, launch: d.LaunchAttempt, refuses: int) -> None:
        key = (launch.job, launch.attempt, launch.generation)
        attempt = self.scheduler.state.attempt(*key)
        if attempt is None or attempt.state is not AttemptState.LAUNCHING:
            return  # as the executor does: a launch that was held up is looked at again before it is asked for
        for host in launch.hosts:
            if not self.is_up(host):
                return
            if refuses:
                how = {"is_infrastructure": refuses != 2, "is_permanent": refuses != 1}
                self.answer(e.LaunchFailed(**self.at(), **_who(key), host=host, why="disk full", **how))
                return
            if key not in self.running[host]:
                self.begin(key, launch.ranks, host)
        self.answer(e.AttemptLaunched(**self.at(), **_who(key)))

    def _stop(self, stop: d.StopAttempt) -> None:
        # As the executor does: a stop overtakes a launch of the same attempt.
        who = (stop.job, stop.attempt)
        self.todo = [x for x in self.todo if not (isinstance(x, d.LaunchAttempt) and (x.job, x.attempt) == who)]
        if not self.is_up(stop.host):
            return
        key = (*who, stop.generation)
        ran = self.running[stop.host].pop(key, Ran(()))
        ranks = tuple(RankReport(rank=r, end=end or STOPPED) for r, end in ran.ends.items())
        self.answer(e.AttemptStopped(**self.at(), **_who(key), host=stop.host, ranks=ranks))

    def _describe(self, asked: d.DescribeModel, refuses: int) -> None:
        if refuses == 0:
            model = MODELS[int(asked.job) % 2]
            self.answer(e.ModelDescribed(**self.at(), job=asked.job, shape=SHAPE, model=model))
        else:
            how = {"is_infrastructure": refuses != 2, "is_permanent": refuses == 3}
            self.answer(e.ModelNotDescribed(**self.at(), job=asked.job, why="no torch", **how))

    def _prepare(self, start: d.StartMigration, refuses: int) -> None:
        key = (start.job, start.attempt, start.new_generation)
        for host in dict.fromkeys(place.host for place in start.new_ranks):
            if refuses == 1 or not self.is_up(host):
                at = host if refuses == 1 else None
                self.answer(e.MigrationFailed(**self.at(), **_who(key), phase="prepare", why="no torch", host=at))
                return
            self.begin(key, start.new_ranks, host)
        self.tell(e.MigrationAdvanced(**self.at(), **_who(key), phase="prepare", seconds=1.0))
        self.todo.append(Verify(start))

    def _verify(self, start: d.StartMigration, refuses: int) -> None:
        key = (start.job, start.attempt, start.new_generation)
        old = (start.job, start.attempt, start.generation)
        left = [(old, p) for p in start.ranks if p.rank not in start.lost] + [(key, p) for p in start.new_ranks]
        whole = all(
            self.is_up(p.host) and k in self.running[p.host] and self.running[p.host][k].ends.get(p.rank, OK) is None
            for k, p in left
        )
        if refuses or not whole:
            self.answer(e.MigrationFailed(**self.at(), **_who(key), phase="quiesce", why="a rank was lost"))
        else:
            self.answer(e.MigrationVerified(**self.at(), **_who(key), step=5, network_bytes=1, local_bytes=1))

    def hear_again(self, event: e.Event) -> None:
        """An answer that was given before comes late, or a second time."""
        self.tell(replace(event, **self.at()))


def _start(todo: Done | Verify) -> d.StartMigration | None:
    return todo.start if isinstance(todo, Verify) else todo if isinstance(todo, d.StartMigration) else None


def _who(key: Key) -> dict[str, Any]:
    return {"job": key[0], "attempt": key[1], "generation": key[2]}
