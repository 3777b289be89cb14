"""Jobs on devices of several types: assignment, batch shares, and single types where these are faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.estimates.heterogeneous_speed import believed as believed_of
from clusterd.core.estimates.job_forecast import Inventory
from clusterd.core.events import Timer, TimerKind
from clusterd.core.ledger import of_ranks
from clusterd.core.performance_table import Estimate, PerformanceTable, Shape
from clusterd.core.placement.heterogeneous_search import HeterogeneousEstimates
from clusterd.core.policies import POLICIES
from clusterd.core.state import Job
from clusterd.plans.memory import estimate as memory_of
from clusterd.plans.model_shape import LayerShape, ModelShape, ParameterShape
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId, JobId, JobKind, JobSpec, RankPlace, Resources, Tenant
from tests.core.conftest import GIB, Lab, facts

BATCH = 48
SECONDS = {"new": 1.0, "old": 2.0, "older": 4.0}
"""Of a step on one device."""


def step_s(name: str, shape: Shape) -> float:
    """Nearly as fast as there are devices; a tenth slower over hosts."""
    return SECONDS[name] / sum(shape) ** 0.95 * (1.1 if len(shape) > 1 else 1.0)


def known(here: dict[str, list[int]], plans: tuple[Plan, ...] = ()) -> PerformanceTable:
    """Plain replicas (or these plans) on shapes of 1, 2, 4 and 8 devices, as a cluster with these hosts would know."""
    together = sorted((n for counts in here.values() for n in counts), reverse=True)
    shapes = [(1,), (2,), (4,), (2, 2), (8,), (4, 4), (4, 2), (4, 4, 4)]
    offered: list[Estimate] = []
    beyond: list[Estimate] = []
    for name, counts in here.items():
        for shape in shapes:
            for plan in plans or (Plan(dp=sum(shape)),):
                if plan.ranks != sum(shape) or not holds(together, shape):
                    continue
                time = step_s(name, shape)
                (offered if holds(sorted(counts, reverse=True), shape) else beyond).append(
                    Estimate(
                        plan=plan,
                        device_type=name,
                        shape=shape,
                        step_time_s=time,
                        lower_s=0.95 * time,
                        upper_s=1.05 * time,
                    )
                )
    return PerformanceTable(tuple(offered), BATCH, measured=7, beyond=tuple(beyond))


def holds(counts: list[int], shape: Shape) -> bool:
    return len(shape) <= len(counts) and all(n <= m for n, m in zip(shape, counts, strict=False))


class MixedLab(Lab):
    """Hosts of named device types, and one model of which enough is known on each."""

    def __init__(self, here: dict[str, list[int]], table: PerformanceTable | None = None) -> None:
        super().__init__()
        self.types: dict[str, str] = {}
        for name, counts in here.items():
            for number, count in enumerate(counts):
                self.typed_host(f"{name}{number}", name, count)
        self.tell(e.SpeedLearned(**self.at(), model="net", table=table or known(here), why="trials"))

    def typed_host(self, host: str, name: str, count: int) -> None:
        plain = facts(host, gpus=count, cores=64)
        typed = replace(plain, devices=tuple(replace(device, name=name) for device in plain.devices))
        self.tell(e.HostAdded(**self.at(), host=HostId(host)))
        self.tell(e.HostConnected(**self.at(), host=HostId(host), facts=typed))
        self.types |= {device.id: device.name for device in typed.devices}

    def net(self, name: str, steps: int, devices: int = 1, **what: Any) -> tuple[JobId, list[d.Decision]]:
        """Submit a job of the model."""
        self.jobs += 1
        job = JobId(str(self.jobs))
        wanted = {name: what.pop(name) for name in ("plan", "hosts", "cpus", "max_devices") if name in what}
        resources = Resources(devices=devices, **wanted)
        spec = JobSpec(name=name, kind=JobKind.ELASTIC, command=("x",), resources=resources, **what)
        shape = {"parameters": [], "layers": [], "samples": BATCH, "global_batch": BATCH, "steps": steps}
        stamp = self.at()
        return job, self.tell(
            e.JobSubmitted(**stamp, job=job, spec=spec),
            e.ModelDescribed(**{**stamp, "id": e.EventId(stamp["id"] + 1)}, job=job, shape=shape, model="net"),
        )

    def progress(self, job: JobId, step: int) -> list[d.Decision]:
        self.run(job)
        number = self.attempt(job).number
        believed = believed_of(
            self.scheduler.state.performance_tables["net"],
            self.attempt(job).plan,
            of_ranks(self.scheduler.state.hosts, self.attempt(job)),
        )
        return self.tell(
            e.AttemptProgressed(
                **self.at(), job=job, attempt=number, step=step, loss=None, step_time_s=believed.step_time_s
            )
        )

    def kinds(self, ranks: tuple[RankPlace, ...]) -> list[str]:
        """Device type of each rank."""
        return [self.types[place.device] for place in ranks if place.device is not None]

    def now(self, job: JobId) -> list[str]:
        return self.kinds(tuple(rank.place for rank in self.attempt(job).ranks.values()))

    def moved(self, start: d.StartMigration) -> list[d.Decision]:
        who = {"job": start.job, "attempt": start.attempt, "generation": start.new_generation}
        decided = self.tell(e.MigrationVerified(**self.at(), **who, step=100, network_bytes=1, local_bytes=1))
        decided += self.tell(e.MigrationFinished(**self.at(), **who, downtime_s=2.0))
        old = {"job": start.job, "attempt": start.attempt, "generation": start.generation}
        for host in sorted({place.host for place in start.ranks}):
            decided += self.tell(e.AttemptStopped(**self.at(), **old, host=host))
        return decided


def launch(decided: list[d.Decision], job: JobId) -> d.LaunchAttempt:
    found = d.LaunchAttempt.match(decided, job=job)
    assert found is not None, "not started"
    return found


def test_a_long_job_alone_uses_both_types_with_shares_by_their_speed() -> None:
    """Four new devices and four old ones, half as fast: two thirds of the batch go to the new."""
    lab = MixedLab({"new": [4], "old": [4]})
    job, decided = lab.net("net-1", 1000)
    start = launch(decided, job)
    assert start.plan == Plan(dp=8, shares=(8, 8, 8, 8, 4, 4, 4, 4))
    assert lab.kinds(start.ranks) == ["new"] * 4 + ["old"] * 4
    assert "new and old by their speed" in start.reason


def test_devices_of_two_types_are_no_more_than_the_job_may_have() -> None:
    lab = MixedLab({"new": [4], "old": [4]})
    job, decided = lab.net("long", 100_000, max_devices=6)
    assert sorted(lab.kinds(launch(decided, job).ranks)) == ["new"] * 4 + ["old"] * 2


def test_a_type_that_brings_nothing_is_left_alone() -> None:
    """Two of the older on another host: the way between hosts costs more than they do."""
    here = {"new": [4], "older": [2]}
    job, decided = (lab := MixedLab(here)).net("net-1", 1000)
    alone = step_s("new", (4,))
    assert step_s("new", (4, 2)) * 6 / (4 + 2 / 4) > 0.97 * alone, "the scene"
    assert lab.kinds(launch(decided, job).ranks) == ["new"] * 4


def test_a_running_job_grows_over_devices_of_another_type_where_the_move_pays() -> None:
    """A host of old devices joins; the job has hours left, then seconds."""
    table = known({"new": [4], "old": [4]})
    for steps, grows in ((30_000, True), (40, False)):
        lab = MixedLab({"new": [4]}, table)
        job, decided = lab.net("net-1", steps)
        assert launch(decided, job).plan == Plan(dp=4)
        lab.progress(job, 10)
        lab.typed_host("old0", "old", 4)
        move = d.StartMigration.match(lab.decisions, job=job)
        assert (move is not None) == grows
        if move is not None:
            assert move.new_plan == Plan(dp=8, shares=(8, 8, 8, 8, 4, 4, 4, 4))
            assert {p.device for p in move.ranks} <= {p.device for p in move.new_ranks}, "it keeps what it has"
            assert "saves" in move.reason and "new and old by their speed" in move.reason


def test_what_runs_mixed_is_known_and_shrinks_to_one_type_for_a_newcomer() -> None:
    """A short job comes: the long one, which is understood on its mixed devices, gives one type up."""
    lab = MixedLab({"new": [4], "old": [4]})
    long, _ = lab.net("long", 30_000)
    lab.progress(long, 10)
    short, decided = lab.net("short", 100)
    shrink = d.StartMigration.match(decided, job=long)
    assert shrink is not None and len(set(lab.kinds(shrink.new_ranks))) == 1
    assert not shrink.new_plan.shares, "on one type its batch is cut evenly again"
    assert "devices to short" in shrink.reason
    decided = lab.moved(shrink)
    assert len(set(lab.kinds(launch(decided, short).ranks))) == 1


def test_nobody_is_moved_off_fast_devices_that_come_free_soon_enough() -> None:
    """The newcomer starts on the slow one and is moved when the fast one is free: that is hardly later."""
    for left, moves in ((400, False), (10_000, True)):
        lab = MixedLab({"new": [1], "older": [1]})
        first, decided = lab.net("first", 20_000)
        assert lab.kinds(launch(decided, first).ranks) == ["new"]
        lab.progress(first, 20_000 - left)
        newcomer, decided = lab.net("newcomer", 1000)
        assert (d.StartMigration.match(decided, job=first) is not None) == moves
        if not moves:
            assert lab.kinds(launch(decided, newcomer).ranks) == ["older"]


def test_a_guaranteed_job_is_mixed_only_where_it_keeps_what_it_asked_for() -> None:
    """Mixing four new devices with the old ones is faster; replacing some of them would be slower."""
    lab = MixedLab({"new": [4], "old": [4]})
    job, decided = lab.net("net-1", 1000, devices=4, guaranteed=True, plan=Plan(dp=4))
    start = launch(decided, job)
    assert lab.kinds(start.ranks).count("new") == 4
    for guaranteed in (False, True):  # a promise is of what there is
        here = {"new": [2, 2], "old": [2, 2]} if guaranteed else {"new": [4], "old": [4]}
        lab = MixedLab({"new": [2, 2], "old": [2, 2]}, known(here))
        lab.net("other", 100, devices=2, priority=5, guaranteed=True)
        job, decided = lab.net("net-1", 1000, devices=4, guaranteed=guaranteed, plan=Plan(dp=4))
        starts = d.LaunchAttempt.match(decided, job=job)
        assert (starts is None) == guaranteed
        if starts is not None:
            assert lab.kinds(starts.ranks) == ["new", "new", "old", "old"]


def test_a_quota_counts_devices_of_every_type() -> None:
    """Five devices may be used: mixed shapes of eight are none."""
    lab = MixedLab({"new": [4], "old": [4]})
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, tenants={"lab": Tenant(quota=5)}))
    for host in ("new0", "old0"):
        lab.connect(host)
    job, decided = lab.net("net-1", 1000, tenant="lab")
    assert len(launch(decided, job).ranks) <= 5


def test_cpu_and_gpu_are_never_in_one_job() -> None:
    """Torch's collectives do not mix them."""
    lab = MixedLab({"new": [4]}, known({"new": [4], "old": [4]}))
    plain = facts("c0", cpus=4, cores=64)
    typed = replace(plain, devices=tuple(replace(device, name="old") for device in plain.devices))
    lab.tell(e.HostAdded(**lab.at(), host=HostId("c0")))
    lab.tell(e.HostConnected(**lab.at(), host=HostId("c0"), facts=typed))
    job, decided = lab.net("net-1", 1000)
    assert lab.kinds(launch(decided, job).ranks) == ["new"] * 4


def test_a_drained_host_is_left_for_devices_of_two_types() -> None:
    """Two of the new devices are elsewhere, and two old ones: together they are faster than the two alone."""
    lab = MixedLab({"new": [4, 2], "old": [2]})
    job, decided = lab.net("net-1", 30_000)
    assert "new0" in {place.host for place in launch(decided, job).ranks}
    lab.progress(job, 10)
    move = d.StartMigration.match(lab.tell(e.HostDrained(**lab.at(), host=HostId("new0"), why="new fan")), job=job)
    assert move is not None and "new0 is drained" in move.reason
    assert sorted(lab.kinds(move.new_ranks)) == ["new", "new", "old", "old"]


@settings(max_examples=40, deadline=None)
@given(
    hosts=st.dictionaries(
        st.sampled_from(["new", "old", "older"]), st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1
    ),
    jobs=st.lists(st.tuples(st.integers(10, 50_000), st.booleans()), min_size=1, max_size=6),
)
def test_whatever_comes_every_mixed_plan_is_legal_and_the_books_add_up(
    hosts: dict[str, list[int]], jobs: list[tuple[int, bool]]
) -> None:
    """Invariants are asked after every event (`Lab.tell`); shares make up the batch, a replica has one type."""
    lab = MixedLab(hosts, known(hosts))
    for number, (steps, ends) in enumerate(jobs):
        job, _ = lab.net(f"net-{number}", steps)
        attempt = lab.scheduler.state.jobs[job].attempt
        if attempt is None:
            continue
        lab.progress(job, 1)
        if ends and lab.scheduler.state.jobs[job].attempt is not None and attempt.migration is None:
            lab.finish(job)
        for start in [x for x in lab.decisions if isinstance(x, d.StartMigration)]:
            going = lab.scheduler.state.jobs[start.job].attempt
            if going is not None and going.migration is not None:
                lab.moved(start)
    for made in lab.decisions:
        if isinstance(made, d.LaunchAttempt | d.StartMigration):
            plan, ranks = (
                (made.plan, made.ranks) if isinstance(made, d.LaunchAttempt) else (made.new_plan, made.new_ranks)
            )
            assert plan is not None and plan.ranks == len(ranks)
            kinds = lab.kinds(ranks)
            if len(set(kinds)) > 1:
                shares = plan.batch_shares(BATCH)
                speed = {kind: {s for s, k in zip(shares, kinds, strict=True) if k == kind} for kind in set(kinds)}
                by_speed = sorted(speed, key=lambda kind: SECONDS[kind])
                for fast, slow in pairwise(by_speed):
                    assert min(speed[fast]) >= max(speed[slow]), "the faster type has the larger shares"


def test_a_move_by_hand_splits_the_batch_by_speed(replayed: Any) -> None:
    """Two devices of each type were named, in a mixed order; shares that somebody writes down are theirs."""
    lab = MixedLab({"new": [2], "old": [2]}, known({"new": [2], "old": [2]}))
    job, _ = lab.net("net-1", 30_000)
    lab.progress(job, 10)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("old0"), why="new fan"))
    leaves = d.StartMigration.match(lab.decisions, job=job)
    assert leaves is not None
    lab.moved(leaves)
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("old0")))
    named = tuple(DeviceId(n) for n in ("new0:gpu0", "old0:gpu0", "new0:gpu1", "old0:gpu1"))
    for plan, shares in ((Plan(dp=4), (16, 8, 16, 8)), (Plan(dp=4, shares=(12, 12, 12, 12)), (12, 12, 12, 12))):
        lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=plan, devices=named, by="ada", pin=True))
        going = lab.attempt(job).migration
        assert going.plan.batch_shares(BATCH) == shares, going
        move = [x for x in lab.decisions if isinstance(x, d.StartMigration)][-1]
        lab.moved(move)
    assert lab.attempt(job).plan.shares == (12, 12, 12, 12)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=None, devices=named[::2], by="ada"))
    assert "needs 4 devices" in lab.why(job)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), devices=named[::2], by="ada"))
    assert lab.attempt(job).migration.plan == Plan(dp=2), "even again on one type"
    assert replayed(lab).state == lab.scheduler.state


def test_a_move_by_hand_to_gpus_and_cpus_is_refused() -> None:
    """In words, and the job goes on."""
    lab = MixedLab({"new": [2]})
    lab.host("c0", cpus=2, cores=64)
    job, _ = lab.net("net-1", 30_000)
    lab.progress(job, 10)
    mixed = (DeviceId("new0:gpu0"), DeviceId("c0:cpu0"))
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), devices=mixed, by="ada"))
    assert lab.attempt(job).migration is None
    assert "devices of one kind, not cpu and cuda" in lab.why(job)


def uneven_speedups() -> tuple[PerformanceTable, PerformanceTable]:
    """One model that is hardly faster on the new type, and one that is three times as fast there."""
    found = []
    for factor in (1.1, 3.0):
        estimates = tuple(
            Estimate(plan=Plan(dp=4), device_type=name, shape=(4,), step_time_s=t, lower_s=0.95 * t, upper_s=1.05 * t)
            for name, t in (("new", 1.0), ("old", factor))
        )
        found.append(PerformanceTable(estimates, BATCH, measured=7))
    return found[0], found[1]


def test_jobs_that_start_together_share_types_so_that_they_end_earlier_in_all() -> None:
    """The first in order would take the new devices, which bring it little; the other needs them."""
    little, much = uneven_speedups()
    lab = MixedLab({"new": [4], "old": [4]}, little)
    lab.tell(e.SpeedLearned(**lab.at(), model="other", table=much, why="trials"))
    resources, ids = Resources(devices=4), []
    events: list[e.Event] = []
    for number, (model, steps) in enumerate((("net", 1000), ("other", 1100)), 1):
        job = JobId(str(number))
        spec = JobSpec(name=model, kind=JobKind.ELASTIC, command=("x",), resources=resources)
        shape = {"parameters": [], "layers": [], "samples": BATCH, "global_batch": BATCH, "steps": steps}
        events.append(e.JobSubmitted(**lab.at(), job=job, spec=spec))
        events.append(e.ModelDescribed(**lab.at(), job=job, shape=shape, model=model))
        ids.append(job)
    decided = lab.tell(*events)
    assert lab.kinds(launch(decided, ids[0]).ranks) == ["old"] * 4
    assert lab.kinds(launch(decided, ids[1]).ranks) == ["new"] * 4


def test_sampling_placement_splits_jobs_over_types() -> None:
    """The baseline of that name: one job alone has all workers, with shares by their speed."""
    lab = MixedLab({"new": [4], "old": [4]})
    lab.scheduler.policy = POLICIES["sampling"]()
    job, decided = lab.net("net-1", 10_000, plan=Plan(dp=4), devices=4)
    start = launch(decided, job)
    assert start.plan == Plan(dp=8, shares=(8, 8, 8, 8, 4, 4, 4, 4))
    assert lab.kinds(start.ranks) == ["new"] * 4 + ["old"] * 4
    lab.progress(job, 10)
    for _ in range(2):
        lab.now_s += 60.0
        lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    assert d.StartMigration.match(lab.decisions) is None, "it stays as it is"
    other, _ = lab.net("net-2", 10_000, plan=Plan(dp=4), devices=4)
    lab.now_s += 60.0
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    shrink = d.StartMigration.match(lab.decisions, job=job)
    assert shrink is not None
    decided = lab.moved(shrink)
    devices = {p.device for p in shrink.new_ranks} & {p.device for p in launch(lab.decisions, other).ranks}
    assert not devices


def test_shares_stay_within_each_types_memory() -> None:
    """The faster type has room for ten samples beside the model; by speed it would take twelve of sixteen."""
    model = ModelShape(
        parameters=(ParameterShape("net.weight", (1024, 1024), 4, 0),),
        layers=(LayerShape("net", activation_bytes=GIB),),
        global_batch=16,
        samples=1000,
    )
    plan = Plan(dp=2)
    needs = memory_of(plan, model, kind="cuda").device_bytes
    estimates = tuple(
        Estimate(plan=plan, device_type=name, shape=(1, 1), step_time_s=s, lower_s=s, upper_s=s, device_bytes=needs)
        for name, s in (("fast", 1.0), ("slow", 3.0))
    )
    table = PerformanceTable((), 16, measured=7, beyond=estimates)
    spec = JobSpec(name="net", kind=JobKind.ELASTIC, command=("x",), resources=Resources())
    job = Job(JobId("1"), spec, priority=0, submitted_s=0.0, queued_s=0.0)
    job.inspection.shape = model.to_dict()
    for fast_bytes, shares in ((80 * GIB, (12, 4)), (12 * GIB + GIB // 2, (10, 6)), (4 * GIB, None)):
        there = Inventory(
            {"fast": 1, "slow": 1}, {"fast": "cuda", "slow": "cuda"}, {"fast": fast_bytes, "slow": 10 * GIB}
        )
        mixtures = HeterogeneousEstimates()
        mixtures.on(there)
        (known,) = mixtures.shapes(job.inspection.model, table, ("fast", "slow"))
        found = mixtures.predict_heterogeneous(table, job, known, ("fast", "slow"), plan, there)
        assert (found.plan.shares if found is not None else None) == shares
        if found is not None:
            assert found.device_bytes == memory_of(found.plan, model, kind="cuda").device_bytes


def test_steps_slower_than_believed_are_no_reason_to_move() -> None:
    """A third slower than what is known of its devices: as it runs is still best, and is not proposed as a move."""
    lab = MixedLab({"new": [4, 4]})
    job, decided = lab.net("net-1", 30_000)
    start = launch(decided, job)
    lab.run(job)
    believed = believed_of(
        lab.scheduler.state.performance_tables["net"], start.plan, of_ranks(lab.scheduler.state.hosts, lab.attempt(job))
    )
    lab.tell(
        e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=10, loss=None, step_time_s=1.33 * believed.step_time_s)
    )
    lab.host("c0", cpus=1, cores=64)  # something that makes a pass
    assert d.StartMigration.match(lab.decisions) is None
    assert "refused" not in lab.why(job), lab.why(job)
