"""Faults in any order: no device leased twice, every job ends once faults stop, replay equals live."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.invariants import violations
from clusterd.core.migrations import held_on
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import Attempt
from clusterd.types import (
    AttemptReport,
    AttemptState,
    DeviceId,
    HostId,
    HostState,
    JobId,
    JobKind,
    JobSpec,
    JobState,
    RankEnd,
    RankReport,
    Reason,
    Resources,
)
from plans.plan import Plan
from tests.core.conftest import CRASH, OK, facts
from tests.plans.test_reshard import gpt

LOST = RankEnd(reason=Reason.LOST)
STOPPED = RankEnd(reason=Reason.STOPPED)
EFFECTS = (d.LaunchAttempt, d.StopAttempt, d.DescribeModel, d.StartMigration, d.ResumeAttempt)
PLANS = [Plan(), Plan(dp=2), Plan(tp=2), Plan(dp=2, tp=2), Plan(dp=3), Plan(dp=4, zero=3)]
SHAPE = {**gpt().to_dict(), "steps": 1000}
HOSTS = {HostId("a"): 2, HostId("b"): 2, HostId("c"): 4}


@dataclass
class Agent:
    """What truly runs on a host."""

    running: dict[tuple[JobId, int, int], dict[int, RankEnd | None]] = field(default_factory=dict)
    owners: dict[str, tuple[JobId, int]] = field(default_factory=dict)  # device -> who uses it, for real

    def reports(self) -> tuple[AttemptReport, ...]:
        return tuple(
            AttemptReport(
                job=job,
                attempt=attempt,
                generation=generation,
                ranks=tuple(RankReport(rank=r, end=end) for r, end in ranks.items()),
            )
            for (job, attempt, generation), ranks in self.running.items()
        )


class Cluster(RuleBasedStateMachine):
    """The scheduler against agents that do what they are told, late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.now_s = 0.0
        self.log: list[tuple[e.Event, ...]] = []
        self.todo: list[d.Decision] = []
        self.agents = {host: Agent() for host in HOSTS}
        self.jobs = 0
        self.epoch = 1

    def tell(self, *events: e.Event) -> None:
        self.log.append(events)
        for decision in self.scheduler.handle(*events):
            if isinstance(
                decision, d.LaunchAttempt | d.StopAttempt | d.DescribeModel | d.StartMigration | d.ResumeAttempt
            ):
                self.todo.append(decision)
            elif isinstance(decision, d.AbortMigration):
                self.todo = [x for x in self.todo if not isinstance(x, d.StartMigration) or x.job != decision.job]

    def at(self) -> dict[str, float]:
        self.now_s += 1.0
        return {"at_s": self.now_s}

    # --- what operators and users do ----------------------------------------------------------------------------------

    @initialize()
    def build(self) -> None:
        self.tell(e.DaemonStarted(**self.at(), epoch=1))
        for host in HOSTS:
            self.tell(e.HostAdded(**self.at(), host=host))
            self.connect(host)

    @rule(devices=st.integers(0, 4), priority=st.integers(0, 2), retries=st.integers(0, 1), limit=st.booleans())
    def submit(self, devices: int, priority: int, retries: int, limit: bool) -> None:
        self.jobs += 1
        spec = JobSpec(
            name=f"job{self.jobs}",
            command=("true",),
            resources=Resources(devices=devices),
            priority=priority,
            retries=retries,
            time_limit_s=50.0 if limit else None,
        )
        self.tell(e.JobSubmitted(**self.at(), job=JobId(str(self.jobs)), spec=spec))

    @rule(devices=st.integers(1, 4), guaranteed=st.booleans(), priority=st.integers(0, 2))
    def submit_elastic(self, devices: int, guaranteed: bool, priority: int) -> None:
        self.jobs += 1
        spec = JobSpec(
            name=f"job{self.jobs}",
            kind=JobKind.ELASTIC,
            command=("python", "train.py"),
            resources=Resources(devices=devices),
            priority=priority,
            guaranteed=guaranteed,
        )
        self.tell(e.JobSubmitted(**self.at(), job=JobId(str(self.jobs)), spec=spec))
        self.calm_down()  # what moves can only be seen once something runs

    def elastic_running(self) -> list[JobId]:
        jobs = (self.scheduler.state.jobs[job] for job in self.scheduler.state.active)
        return [job.id for job in jobs if job.spec.kind is JobKind.ELASTIC and job.state is JobState.RUNNING]

    @rule(data=st.data(), devices=st.integers(1, 3), plan=st.sampled_from(PLANS))
    def move_in_the_open(self, data: st.DataObject, devices: int, plan: Plan) -> None:
        """A job that trains is asked to move, and nothing stands in its way but what comes next."""
        self.submit_elastic(devices=devices, guaranteed=False, priority=0)
        running = self.elastic_running()
        if running:
            job = data.draw(st.sampled_from(running))
            self.tell(e.MigrationRequested(**self.at(), job=job, plan=plan))

    @precondition(lambda self: self.elastic_running())
    @rule(data=st.data(), plan=st.sampled_from([None, *PLANS]))
    def migrate(self, data: st.DataObject, plan: Plan | None) -> None:
        job = data.draw(st.sampled_from(self.elastic_running()))
        self.tell(e.MigrationRequested(**self.at(), job=job, plan=plan))

    @precondition(lambda self: self.elastic_running())
    @rule(data=st.data(), plan=st.sampled_from([None, *PLANS]))
    def try_plan(self, data: st.DataObject, plan: Plan | None) -> None:
        """A plan is to be tried on a job, which trains; None: that was all."""
        job = data.draw(st.sampled_from(self.elastic_running()))
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None
        self.tell(e.AttemptProgressed(**self.at(), job=job, attempt=attempt.number, step=5, loss=1.0, step_time_s=1.0))
        self.tell(e.TrialProposed(**self.at(), job=job, plan=plan, steps=10))

    @precondition(lambda self: self.elastic_running())
    @rule(data=st.data())
    def measure(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.elastic_running()))
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None and attempt.plan is not None
        self.tell(
            e.TrialMeasured(
                **self.at(), job=job, plan=attempt.plan, shape=(attempt.plan.ranks,), device_type="cuda",
                step_time_s=1.0, steps=10,
            )
        )  # fmt: skip

    @precondition(lambda self: self.elastic_running())
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.elastic_running()))
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None
        self.tell(e.AttemptProgressed(**self.at(), job=job, attempt=attempt.number, step=5, loss=1.0, step_time_s=1.0))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.scheduler.state.jobs[JobId(str(data.draw(st.integers(1, self.jobs))))]
        if not job.state.is_final:
            self.tell(e.JobCancelled(**self.at(), job=job.id))

    @rule(host=st.sampled_from(list(HOSTS)), drained=st.booleans())
    def drain(self, host: HostId, drained: bool) -> None:
        kind = e.HostDrained if drained else e.HostUndrained
        self.tell(kind(**self.at(), host=host))

    # --- what the world does ------------------------------------------------------------------------------------------

    @rule(host=st.sampled_from(list(HOSTS)))
    def connect(self, host: HostId) -> None:
        reports = self.agents[host].reports()
        self.tell(e.HostConnected(**self.at(), host=host, facts=facts(host, gpus=HOSTS[host]), attempts=reports))

    @rule()
    def calm_down(self) -> None:
        """A quiet hour: all hosts are there, and all that was asked is done. Faults need something to break."""
        for host in HOSTS:
            self.tell(e.HostUndrained(**self.at(), host=host))
            self.connect(host)
        for _ in range(30):
            if not self.todo:
                break
            self.carry_out_one(self.todo[0])

    @rule(host=st.sampled_from(list(HOSTS)))
    def disconnect(self, host: HostId) -> None:
        self.tell(e.HostDisconnected(**self.at(), host=host, why="cable"))

    @rule(host=st.sampled_from(list(HOSTS)))
    def reboot(self, host: HostId) -> None:
        """Ranks die; the agent comes back with their records."""
        self.disconnect(host)
        for ranks in self.agents[host].running.values():
            for rank, end in ranks.items():
                ranks[rank] = end or LOST
        self.connect(host)

    @rule()
    def kill_daemon(self) -> None:
        """Decisions that were not carried out are forgotten, as by kill -9."""
        self.todo.clear()
        self.epoch += 1
        self.tell(e.DaemonStarted(**self.at(), epoch=self.epoch))

    @precondition(lambda self: self.scheduler.state.timers)
    @rule()
    def fire_next_timer(self) -> None:
        timer, at_s = min(self.scheduler.state.timers.items(), key=lambda item: item[1])
        self.now_s = max(self.now_s, at_s)
        self.tell(e.TimerFired(**self.at(), timer=timer))

    @precondition(lambda self: self.todo)
    @rule(data=st.data(), refuses=st.booleans())
    def carry_out(self, data: st.DataObject, refuses: bool) -> None:
        self.carry_out_one(data.draw(st.sampled_from(self.todo)), refuses)

    def carry_out_one(self, decision: d.Decision, refuses: bool = False) -> None:
        self.todo.remove(decision)
        if isinstance(decision, d.LaunchAttempt):
            # As the executor does: a stop overtakes a launch of the same attempt.
            self._launch(decision, refuses)
        elif isinstance(decision, d.StopAttempt):
            self.todo = [
                x
                for x in self.todo
                if not (isinstance(x, d.LaunchAttempt) and (x.job, x.attempt) == (decision.job, decision.attempt))
            ]
            self._stop(decision)
        elif isinstance(decision, d.DescribeModel):
            if self._is_reachable(decision.host):
                self.tell(e.ModelDescribed(**self.at(), job=decision.job, shape=SHAPE))
        elif isinstance(decision, d.StartMigration):
            self._migrate(decision, refuses)
        elif isinstance(decision, d.ResumeAttempt):
            who = {"job": decision.job, "attempt": decision.attempt, "generation": decision.generation}
            if all(self._is_reachable(host) for host in decision.hosts):
                self.tell(e.MigrationFinished(**self.at(), **who, downtime_s=0.1))

    def _migrate(self, start: d.StartMigration, fails: bool) -> None:
        who = {"job": start.job, "attempt": start.attempt, "generation": start.new_generation}
        key = (start.job, start.attempt, start.new_generation)
        old = (start.job, start.attempt, start.generation)
        for place in start.new_ranks:
            if not self._is_reachable(place.host):
                self.tell(e.MigrationFailed(**self.at(), **who, phase="prepare", why="host lost"))
                return
            agent = self.agents[place.host]
            agent.running.setdefault(key, {})[place.rank] = None
            taken = agent.owners.get(place.device or "")
            assert taken in (None, key[:2]), f"{place.device} is used by {taken} and {start.job}"
            agent.owners[place.device or ""] = key[:2]
        left = [p for p in start.ranks if p.rank not in start.lost]
        whole = all(self.agents[p.host].running.get(old, {}).get(p.rank, OK) is None for p in left)
        if fails or not whole or not all(self._is_reachable(p.host) for p in left):
            self.tell(e.MigrationFailed(**self.at(), **who, phase="quiesce", why="a rank was lost"))
            return
        self.tell(e.MigrationVerified(**self.at(), **who, step=5, network_bytes=1, local_bytes=1))

    def _is_reachable(self, host: HostId) -> bool:
        return self.scheduler.state.hosts[host].state is HostState.UP

    def _launch(self, launch: d.LaunchAttempt, refuses: bool) -> None:
        who = {"job": launch.job, "attempt": launch.attempt, "generation": launch.generation}
        attempt = self.scheduler.state.attempt(*who.values())
        if attempt is None or attempt.state is not AttemptState.LAUNCHING:
            return  # as the executor does: a launch that was held up is looked at again before it is asked for
        for host in launch.hosts:
            if not self._is_reachable(host):
                return
            if refuses:
                self.tell(e.LaunchFailed(**self.at(), **who, host=host, why="disk full"))
                return
            agent = self.agents[host]
            key = (launch.job, launch.attempt, launch.generation)
            if key not in agent.running:
                agent.running[key] = {p.rank: None for p in launch.ranks if p.host == host}
                for place in launch.ranks:
                    if place.host == host and place.device is not None:
                        taken = agent.owners.get(place.device)
                        assert taken is None, f"{place.device} is used by {taken} and {launch.job}"
                        agent.owners[place.device] = (launch.job, launch.attempt)
        self.tell(e.AttemptLaunched(**self.at(), **who))

    def _stop(self, stop: d.StopAttempt) -> None:
        if not self._is_reachable(stop.host):
            return
        agent = self.agents[stop.host]
        ranks = agent.running.pop((stop.job, stop.attempt, stop.generation), {})
        if not any(key[:2] == (stop.job, stop.attempt) for key in agent.running):
            agent.owners = {dev: who for dev, who in agent.owners.items() if who != (stop.job, stop.attempt)}
        else:  # another generation is still there: what it does not hold is free
            attempt = self.scheduler.state.attempt(stop.job, stop.attempt)
            still = self._in_use(attempt, stop) if attempt is not None else set()
            agent.owners = {
                dev: who for dev, who in agent.owners.items() if who != (stop.job, stop.attempt) or dev in still
            }
        self.tell(
            e.AttemptStopped(
                **self.at(),
                job=stop.job,
                attempt=stop.attempt,
                generation=stop.generation,
                host=stop.host,
                ranks=tuple(RankReport(rank=r, end=end or STOPPED) for r, end in ranks.items()),
            )
        )

    @staticmethod
    def _in_use(attempt: Attempt, stop: d.StopAttempt) -> set[DeviceId]:
        """By ranks: what is leased for trials has none."""
        kept, attempt.kept = attempt.kept, {}
        still = held_on(attempt, stop.host, without=stop.generation)
        attempt.kept = kept
        return still

    def running(self) -> list[tuple[HostId, tuple[JobId, int, int], int]]:
        return [
            (host, key, rank)
            for host, agent in self.agents.items()
            for key, ranks in agent.running.items()
            for rank, end in ranks.items()
            if end is None
        ]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), end=st.sampled_from([OK, OK, CRASH, LOST]))
    def exit(self, data: st.DataObject, end: RankEnd) -> None:
        self.exit_one(*data.draw(st.sampled_from(self.running())), end)

    def exit_one(self, host: HostId, key: tuple[JobId, int, int], rank: int, end: RankEnd) -> None:
        self.agents[host].running[key][rank] = end
        if self._is_reachable(host):
            job, attempt, generation = key
            self.tell(
                e.RankExited(
                    **self.at(), job=job, attempt=attempt, generation=generation, host=host, rank=rank, end=end
                )
            )

    @precondition(lambda self: self.elastic_running())
    @rule(data=st.data(), survivors=st.booleans())
    def a_rank_dies(self, data: st.DataObject, survivors: bool) -> None:
        """One rank of an elastic job is killed; its peers notice, and wait, or are never heard of."""
        job = data.draw(st.sampled_from(self.elastic_running()))
        attempt = self.scheduler.state.jobs[job].attempt
        assert attempt is not None
        self.tell(e.AttemptProgressed(**self.at(), job=job, attempt=attempt.number, step=5, loss=1.0, step_time_s=1.0))
        mine = [r for r in self.running() if r[1] == (job, attempt.number, attempt.generation)]
        if len(mine) < 2:
            return
        self.exit_one(*mine[0], RankEnd(reason=Reason.SIGNAL, signal=9))
        for host, (_, number, generation), rank in mine[1:]:
            if survivors and self._is_reachable(host):
                who = {"job": job, "attempt": number, "generation": generation}
                self.tell(e.RankOrphaned(**self.at(), **who, rank=rank, step=5))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_violated(self) -> None:
        assert violations(self.scheduler.state) == []

    def teardown(self) -> None:
        """Faults stop: everything asked is carried out, every rank ends well, timers fire."""
        if not self.log:
            return
        for host in HOSTS:
            self.tell(e.HostUndrained(**self.at(), host=host))
            self.connect(host)
        for _ in range(400):
            if all(job.state.is_final for job in self.scheduler.state.jobs.values()):
                break
            if self.todo:
                self.carry_out_one(self.todo[0])
            elif self.running():
                self.exit_one(*self.running()[0], OK)
            elif self.scheduler.state.timers:
                self.fire_next_timer()
            else:
                break
        left = {
            job.id: (job.state.value, job.reason)
            for job in self.scheduler.state.jobs.values()
            if not job.state.is_final
        }
        assert left == {}
        assert self.scheduler.state.leases == {}
        again = Scheduler()
        for batch in self.log:
            again.handle(*batch)
        assert again.state == self.scheduler.state


Cluster.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCluster = Cluster.TestCase
