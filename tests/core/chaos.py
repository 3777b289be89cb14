"""Faults and requests of a cluster as rules of a hypothesis state machine."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.queueing.dependencies import split
from clusterd.core.state import Job
from clusterd.core.timers import Timer, TimerKind, account_on
from clusterd.daemon.journal import codec
from clusterd.plans.plan import Plan
from clusterd.types import DeviceClaim, DeviceId, HostId, JobId, JobKind, JobSpec, JobState, RankEnd, Reason, Reclaim
from tests.core import strategies
from tests.core.conftest import CRASH, OK
from tests.core.properties import replayed
from tests.core.strategies import HOSTS, MODELS, PLANS
from tests.core.world import World

LOST = RankEnd(reason=Reason.LOST)
ENDS = [OK, OK, CRASH, RankEnd(reason=Reason.SIGNAL, signal=9)]
ENDS += [RankEnd(reason=r) for r in Reason if r not in (Reason.STOPPED, Reason.CROWDED, Reason.EXIT, Reason.SIGNAL)]
ROUNDS = 1500
HOST = st.sampled_from(list(HOSTS))
PLAN = st.sampled_from([None, *PLANS])


class Chaos(RuleBasedStateMachine):
    """The scheduler among users, operators and faults."""

    policies = ("default",)

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.policy = data.draw(st.sampled_from(self.policies))
        self.world = World(POLICIES[self.policy]())
        self.jobs = 0
        self.claims = 0
        self.archived: dict[JobId, Job] = {}
        self.epoch = 0
        self.kill_daemon()
        for host in HOSTS:
            self.world.tell(e.HostAdded(**self.world.at(), host=host))
            self.world.connect(host)

    def some_job(self, data: st.DataObject) -> Job:
        """Any job; an archived one is recalled, as by the daemon before it serves a request about it."""
        state, job = self.world.scheduler.state, JobId(str(data.draw(st.integers(1, self.jobs))))
        if job not in state.jobs:
            self.world.tell(e.JobRecalled(**self.world.at(), job=job, record=self.archived[job]))
            self.world.handle()
        return state.jobs[job]

    def reported_job(self, data: st.DataObject) -> Job:
        """Any job, perhaps archived: something is reported late."""
        job = JobId(str(data.draw(st.integers(1, self.jobs))))
        return self.world.scheduler.state.jobs.get(job) or self.archived[job]

    def trains(self) -> list[Job]:
        """Elastic jobs whose ranks are known to run."""
        jobs = (self.world.scheduler.state.jobs[job] for job in self.world.scheduler.state.active)
        return [job for job in jobs if job.spec.kind is JobKind.ELASTIC and job.state is JobState.RUNNING]

    # --- users and operators ------------------------------------------------------------------------------------------

    @rule(spec=strategies.specs(), after=st.sampled_from([0, 0, 1, 2]))
    def submit(self, spec: JobSpec, after: int = 0) -> None:
        """`after`: so many jobs, the newest there are; an archived one is recalled first where somebody names it."""
        self.jobs += 1
        awaited = [JobId(str(number)) for number in range(max(self.jobs - after, 1), self.jobs)]
        spec = replace(spec, after=tuple(job for job in awaited if job in self.world.scheduler.state.jobs))
        if self.policy != "default":  # the others look at devices alone: at no quota, and at nothing beside them
            plain = replace(spec.resources, hosts=(), cpus=0, memory_bytes=0)
            spec = replace(spec, resources=plain, tenant="default")
        self.world.tell(e.JobSubmitted(**self.world.at(), job=JobId(str(self.jobs)), spec=spec))
        self.world.handle()

    @rule(spec=strategies.specs(JobKind.ELASTIC), step=st.integers(0, 5))
    def train(self, spec: JobSpec, step: int) -> None:
        """An elastic job, in a quiet hour: what moves can only be seen once something runs."""
        self.submit(spec)
        self.calm_down()
        for job in self.trains() if step else []:
            self.progress_of(job, step)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), plan=PLAN, pin=st.booleans(), there=st.booleans())
    def ask_to_move(self, data: st.DataObject, plan: Plan | None, pin: bool, there: bool) -> None:
        running = self.trains()
        job = data.draw(st.sampled_from(running)) if running else self.some_job(data)
        devices: tuple[DeviceId, ...] = ()
        if there:
            known = sorted(d.id for facts in self.world.facts.values() for d in facts.devices)
            devices = tuple(data.draw(st.permutations(known)))[: plan.ranks if plan else 2]
        self.world.tell(
            e.MigrationRequested(**self.world.at(), job=job.id, plan=plan, pin=pin, devices=devices, by="ann")
        )

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), priority=st.integers(0, 3))
    def change_job(self, data: st.DataObject, priority: int) -> None:
        job = self.some_job(data).id
        if priority == 3:
            self.world.tell(e.JobUnpinned(**self.world.at(), job=job))
        else:
            self.world.tell(e.JobReprioritised(**self.world.at(), job=job, priority=priority))

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        since_s=st.sampled_from([None, 0.0, 3600.0]),
        reclaim_s=st.sampled_from([None, 60.0]),
        reclaim=st.sampled_from(Reclaim),
    )
    def idle(self, data: st.DataObject, since_s: float | None, reclaim_s: float | None, reclaim: Reclaim) -> None:
        job, now_s = self.reported_job(data), self.world.now_s
        event = e.IdlenessObserved(
            **self.world.at(),
            job=job.id,
            attempt=len(job.attempts),
            since_s=None if since_s is None else now_s - since_s,
            reclaim_at_s=None if reclaim_s is None else now_s + reclaim_s,
            reclaim=reclaim,
        )
        self.world.tell(event)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), used_bytes=st.sampled_from([0, 1, 2]))
    def hold_memory(self, data: st.DataObject, used_bytes: int) -> None:
        job = self.reported_job(data)
        devices = job.attempts[-1].devices if job.attempts else ()
        event = e.DeviceMemoryObserved(
            **self.world.at(),
            job=job.id,
            attempt=len(job.attempts),
            device=devices[0] if devices else DeviceId("a:gpu0"),
            used_bytes=used_bytes,
            part_bytes=1,
        )
        self.world.tell(event)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), devices=st.integers(0, 3), limit_s=st.sampled_from([None, 60.0, 3600.0]), books=st.booleans())
    def edit(self, data: st.DataObject, devices: int, limit_s: float | None, books: bool) -> None:
        """`books`: a place in the newest claim, which need not be a booking, nor last."""
        job = self.some_job(data)
        wanted = job.spec.resources
        plain = job.spec.kind is JobKind.COMMAND and wanted.plan is None and wanted.nodes == 1
        fewer = min(wanted.devices, devices)  # always fits where the job itself does
        resources = replace(wanted, devices=fewer) if plain and job.attempt is None else wanted
        booking = str(self.claims) if books and self.claims else ""
        booking = booking if job.state is JobState.QUEUED else job.spec.booking
        spec = replace(job.spec, time_limit_s=limit_s, resources=resources, booking=booking, user="ann")
        self.world.tell(e.JobEdited(**self.world.at(), job=job.id, spec=spec, what="edited", by="ann"))

    @rule(
        host=HOST, data=st.data(), begin_s=st.sampled_from([0.0, 300.0]), drain=st.booleans(),
        lasts_s=st.sampled_from([None, 600.0, 3600.0]), is_booking=st.booleans(),
    )  # fmt: skip
    def claim(
        self, host: HostId, data: st.DataObject, begin_s: float, drain: bool, lasts_s: float | None, is_booking: bool
    ) -> None:
        """Some devices of a host, for some time or until they are released; or a booking of them."""
        known = [device.id for device in self.world.facts[host].devices]
        devices = tuple(data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))) if known else ()
        at = self.world.at()
        self.claims += 1
        lasts_s = 600.0 if is_booking and lasts_s is None else lasts_s
        until_s = None if lasts_s is None else at["at_s"] + begin_s + lasts_s
        made = DeviceClaim(
            id=str(self.claims),
            devices=devices,
            from_s=at["at_s"] + begin_s,
            until_s=until_s,
            reason="fan",
            drain=drain and not is_booking,
            owner="ann" if is_booking else "",
        )
        self.world.tell(e.DevicesClaimed(**at, claim=made))

    @rule(host=HOST, kind=st.sampled_from(list(JobKind)), data=st.data(), begin_s=st.sampled_from([0.0, 300.0]))
    def book(self, host: HostId, kind: JobKind, data: st.DataObject, begin_s: float) -> None:
        """All devices of a host, and a job for them."""
        at, spec = self.world.at(), data.draw(strategies.specs(kind))
        self.claims += 1
        devices = tuple(device.id for device in self.world.facts[host].devices)
        from_s = at["at_s"] + begin_s
        booking = DeviceClaim(
            id=str(self.claims), devices=devices, from_s=from_s, until_s=from_s + 1800.0, reason="", owner="ann"
        )
        self.world.tell(e.DevicesClaimed(**at, claim=booking))
        resources = replace(spec.resources, hosts=())
        self.submit(replace(spec, booking=booking.id, user="ann", resources=resources))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), verb=st.sampled_from(["hold", "release", "pause", "unpause", "requeue", "requeue and hold"]))
    def queue_verb(self, data: st.DataObject, verb: str) -> None:
        job, at = self.some_job(data), self.world.at()
        kinds = {"hold": e.JobHeld, "release": e.JobReleased, "pause": e.JobPaused, "unpause": e.JobUnpaused}
        if verb in kinds:
            self.world.tell(kinds[verb](**at, job=job.id, by="ann"))
        else:
            self.world.tell(e.JobRequeued(**at, job=job.id, by="ann", hold=verb != "requeue"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.tell(e.JobCancelled(**self.world.at(), job=self.some_job(data).id))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), host=HOST, done=st.booleans())
    def build_environment(self, data: st.DataObject, host: HostId, done: bool) -> None:
        """A host builds the environment of a job, perhaps of an attempt that is over by now."""
        job, at = self.reported_job(data), self.world.at()
        attempt = {"job": job.id, "attempt": len(job.attempts), "generation": 1, "host": host}
        built = e.EnvironmentBuilt(**at, **attempt, seconds=1.0)
        self.world.tell(built if done else e.EnvironmentBuildStarted(**at, **attempt))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def archive(self, data: st.DataObject) -> None:
        """Jobs that are over leave the state, however much is still reported about them."""
        self.world.handle()
        state = self.world.scheduler.state
        over = [job.id for job in state.jobs.values() if job.state.is_final]
        jobs = tuple(data.draw(st.lists(st.sampled_from(over), unique=True))) if over else ()
        jobs = tuple(
            dict.fromkeys((*jobs, self.reported_job(data).id))
        )  # in any state: the scheduler leaves what is still needed
        self.archived |= {job: codec.job(codec.encode(state.jobs[job])) for job in jobs if job in state.jobs}
        self.world.tell(e.JobsArchived(**self.world.at(), jobs=jobs))

    @precondition(lambda self: self.archived)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.archived)))
        self.world.tell(e.JobRecalled(**self.world.at(), job=job, record=self.archived[job]))

    @rule(host=HOST, drained=st.booleans(), jobs_stay=st.booleans())
    def drain(self, host: HostId, drained: bool, jobs_stay: bool) -> None:
        if drained:
            self.world.tell(e.HostDrained(**self.world.at(), host=host, jobs_stay=jobs_stay))
        else:
            self.world.tell(e.HostUndrained(**self.world.at(), host=host))

    @rule(host=HOST)
    def remove(self, host: HostId) -> None:
        """The host is added again when it next reports."""
        self.world.tell(e.HostRemoved(**self.world.at(), host=host))

    # --- speed --------------------------------------------------------------------------------------------------------

    @rule(model=st.sampled_from(MODELS), table=strategies.performance_tables())
    def learn(self, model: str, table: strategies.PerformanceTable) -> None:
        self.world.tell(e.SpeedLearned(**self.world.at(), model=model, table=table, why="trials"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), plan=PLAN)
    def propose_trial(self, data: st.DataObject, plan: Plan | None) -> None:
        """None: that was all."""
        self.world.tell(e.TrialProposed(**self.world.at(), job=self.reported_job(data).id, plan=plan, steps=10))

    @precondition(lambda self: self.trains())
    @rule(data=st.data(), tried=st.booleans())
    def measure(self, data: st.DataObject, tried: bool) -> None:
        job = data.draw(st.sampled_from(self.trains()))
        plan = job.trials.current.plan if tried and job.trials.current is not None else job.attempts[-1].plan or Plan()
        what = {"shape": (plan.ranks,), "device_type": "slow", "step_time_s": 1.0, "steps": 10}
        self.world.tell(e.TrialMeasured(**self.world.at(), job=job.id, plan=plan, **what))

    @precondition(lambda self: self.trains())
    @rule(
        data=st.data(), step=st.integers(1, strategies.STEPS), loss=st.sampled_from([2.0, 0.5]), foreseen=st.booleans()
    )
    def progress(self, data: st.DataObject, step: int, loss: float, foreseen: bool) -> None:
        job = data.draw(st.sampled_from(self.trains()))
        self.progress_of(job, step, loss)
        if foreseen:
            self.world.tell(
                e.CompletionPredicted(**self.world.at(), job=job.id, predictable=loss > 1.0, steps=2 * step)
            )

    def progress_of(self, job: Job, step: int, loss: float = 2.0) -> None:
        what = {"job": job.id, "attempt": job.attempts[-1].number, "step": step}
        self.world.answer(e.AttemptProgressed(**self.world.at(), **what, loss=loss, step_time_s=1.0))
        if step % 2 and job.spec.checkpoint_directory is not None:
            self.world.answer(e.CheckpointTaken(**self.world.at(), **what, path="/shared/0"))

    # --- faults -------------------------------------------------------------------------------------------------------

    @rule(host=HOST)
    def connect(self, host: HostId) -> None:
        if host not in self.world.scheduler.state.hosts:
            self.world.tell(e.HostAdded(**self.world.at(), host=host))
        self.world.connect(host)

    @rule(host=HOST)
    def disconnect(self, host: HostId) -> None:
        self.world.disconnect(host)

    @rule(host=HOST, for_ever=st.integers(0, 9))
    def lose(self, host: HostId, for_ever: int) -> None:
        """The host is declared lost."""
        self.world.disconnect(host)
        self.world.handle()
        timer = Timer(TimerKind.HOST_LOST, host)
        if timer in self.world.scheduler.state.timers:
            self.world.now_s = max(self.world.now_s, self.world.scheduler.state.timers[timer])
            self.world.tell(e.TimerFired(**self.world.at(), timer=timer))
        if for_ever == 0 and not self.world.gone:
            self.world.gone.add(host)

    @rule(host=HOST)
    def log_in(self, host: HostId) -> None:
        self.world.log_in(host, "ann")

    @rule(host=HOST)
    def log_out(self, host: HostId) -> None:
        self.world.tell(e.AccountDisconnected(**self.world.at(), host=host, account="ann", why="no login"))

    @rule(host=HOST)
    def lose_account(self, host: HostId) -> None:
        """Ranks of the account are declared lost, and may still run."""
        self.log_out(host)
        self.world.handle()
        timer = Timer(TimerKind.ACCOUNT_LOST, account_on(host, "ann"))
        if timer in self.world.scheduler.state.timers:
            self.world.now_s = max(self.world.now_s, self.world.scheduler.state.timers[timer])
            self.world.tell(e.TimerFired(**self.world.at(), timer=timer))

    @rule(host=HOST, forgets=st.booleans())
    def reboot(self, host: HostId, forgets: bool) -> None:
        """Ranks die; the agent comes back with their records, or with an empty disk."""
        self.world.disconnect(host)
        for ran in self.world.running[host].values():
            ran.waiting.clear()
            ran.ends = {rank: end or LOST for rank, end in ran.ends.items()}
        if forgets:
            self.world.running[host].clear()
        self.connect(host)

    @rule(data=st.data(), host=HOST)
    def change_host(self, data: st.DataObject, host: HostId) -> None:
        self.world.facts[host] = data.draw(strategies.changed(host))
        if self.world.is_up(host):
            self.world.tell(e.HostChanged(**self.world.at(), host=host, facts=self.world.facts[host]))

    @rule(by_s=st.sampled_from([3600.0, -3600.0, 86400.0, -86400.0]))
    def set_clock(self, by_s: float) -> None:
        self.world.now_s += by_s
        self.world.tell(e.ClockSet(**self.world.at(), by_s=by_s))

    @rule()
    def kill_daemon(self) -> None:
        """Decisions that were not carried out are forgotten, as by kill -9."""
        self.world.todo.clear()
        self.epoch += 1
        self.world.tell(e.DaemonStarted(**self.world.at(), epoch=self.epoch, tenants=strategies.TENANTS))
        self.world.handle()

    @rule(events=st.integers(1, 3))
    def dawdle(self, events: int) -> None:
        """Delay events, so that the following ones are handled together."""
        self.world.holds = events

    @precondition(lambda self: self.world.said)
    @rule(data=st.data())
    def hear_again(self, data: st.DataObject) -> None:
        self.world.hear_again(data.draw(st.sampled_from(self.world.said)))

    @precondition(lambda self: self.world.scheduler.state.timers)
    @rule(times=st.integers(1, 3))
    def fire(self, times: int) -> None:
        for _ in range(times if self.world.scheduler.state.timers else 0):
            if self.world.scheduler.state.timers:
                self.world.fire()
                self.world.handle()

    @precondition(lambda self: self.world.todo)
    @rule(data=st.data(), refuses=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def carry_out(self, data: st.DataObject, refuses: int) -> None:
        self.world.carry_out(data.draw(st.sampled_from(self.world.todo)), refuses)

    @precondition(lambda self: self.world.live())
    @rule(data=st.data(), end=st.sampled_from(ENDS))
    def exit(self, data: st.DataObject, end: RankEnd) -> None:
        self.world.end(*data.draw(st.sampled_from(self.world.live())), end)

    @precondition(lambda self: self.trains())
    @rule(data=st.data(), dies=st.sampled_from([None, *ENDS[3:]]), oom=st.booleans())
    def a_rank_is_lost(self, data: st.DataObject, dies: RankEnd | None, oom: bool) -> None:
        """A rank is killed, or runs out of memory and waits; its peers notice, and wait, or are never heard of."""
        job = data.draw(st.sampled_from(self.trains()))
        mine = [r for r in self.world.live() if r[1] == (job.id, len(job.attempts), job.attempts[-1].generation)]
        if dies is not None and len(mine) > 1:
            self.world.end(*mine.pop(0), dies)
        for host, key, rank in mine:
            if data.draw(st.integers(0, 3)):
                step, can_finish_step = data.draw(st.sampled_from([(5, False), (5, False), (4, True), (4, False)]))
                oom_here = oom and dies is None and job.attempts[-1].generation > 1
                self.world.orphan(host, key, rank, step=step, can_finish_step=can_finish_step, out_of_memory=oom_here)

    @rule()
    def calm_down(self) -> None:
        """A quiet hour: all hosts are there, and all that was asked is done. Faults need something to break."""
        self.world.handle()
        for host in HOSTS:
            self.world.tell(e.HostUndrained(**self.world.at(), host=host))
            if not self.world.is_up(host):
                self.connect(host)
            self.world.log_in(host, "ann")
        for _ in range(30):
            if not self.world.todo:
                break
            self.world.carry_out(self.world.todo[0])

    # --- what must come of it -----------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Faults stop: all that is asked is done, ranks end well, timers fire; then every job is over."""
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.scheduler.state
        world.handle()
        there = {name: 1.0 for host, (_, name) in HOSTS.items() if host not in world.gone}
        for host in HOSTS:
            world.tell(e.HostUndrained(**world.at(), host=host))
            if world.facts[host] != strategies.whole(host) and world.is_up(host):
                world.tell(e.HostChanged(**world.at(), host=host, facts=strategies.whole(host)))
            world.facts[host] = strategies.whole(host)
            if not world.is_up(host):
                self.connect(host)
            world.log_in(host, "ann")
        for number in list(state.device_claims):
            world.tell(e.DeviceClaimRemoved(**world.at(), claim=number))
        for job in list(state.jobs):
            world.tell(e.JobReleased(**world.at(), job=job))
            spec = replace(state.jobs[job].spec, booking="")
            if state.jobs[job].state is JobState.QUEUED and spec != state.jobs[job].spec:
                world.tell(e.JobEdited(**world.at(), job=job, spec=spec, what="booking 1 -> none"))
        for model in MODELS:
            table = strategies.believed((1, 2, 3, 4, 6), there)
            world.tell(e.SpeedLearned(**world.at(), model=model, table=table))
        for _ in range(ROUNDS):
            if not self.one_round():
                break
        assert {*state.jobs, *self.archived} == {str(number + 1) for number in range(self.jobs)}
        left = {job.id: (job.state.value, job.reason) for job in state.jobs.values() if not job.state.is_final}
        waits = {job for job in left if state.jobs[job].state is JobState.QUEUED}
        held = {job for job in waits if state.jobs[job].spec.booking}  # queued again after the end of its booking
        while more := {job for job in waits - held if {split(x)[0] for x in state.jobs[job].spec.after} & held}:
            held |= more
        assert set(left) <= (waits if world.gone else held), f"{self.policy}: {left}"
        assert state.holders == {}
        assert [host.unusable for host in state.hosts.values() if host.unusable and host.id not in world.gone] == []
        assert replayed(world.log, POLICIES[self.policy](), snapshot_at=len(world.log) // 2) == state

    def one_round(self) -> bool:
        """The next thing that happens where nothing goes wrong; whether anything did."""
        world = self.world
        well = [r for r in world.live() if world.is_up(r[0]) and not world.is_broken(r[1])]
        known = [r for r in well if world.scheduler.state.attempt(*r[1]) is not None]
        waiting = [(h, k, r) for h, here in world.running.items() for k, ran in here.items() for r in ran.waiting]
        timers = world.scheduler.state.timers
        if world.todo:
            world.carry_out(world.todo[0])
        elif all(job.state.is_final for job in world.scheduler.state.jobs.values()):
            return False
        elif known:
            world.end(*known[0], OK)
        elif waiting and not any(timer.kind is TimerKind.RECOVER for timer in timers):
            world.end(*waiting[0], CRASH)  # nobody came for what it holds
        elif timers:
            world.fire()
        else:
            return False
        return True
