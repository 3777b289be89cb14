"""Scenarios with jobs of known speed: plans, rights, migrations that pay, and reasons."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobId, JobKind, JobSpec, Resources
from tests.core.conftest import Lab

TIMES = {1: 8.0, 2: 4.2, 4: 2.2, 8: 1.2}


def known(uncertainty: float = 0.05, measured: int = 7) -> PerformanceTable:
    """A model that scales well on one host; ZeRO is a fifth slower."""
    return PerformanceTable(
        tuple(
            Estimate(
                plan=Plan(dp=n, zero=zero),
                device_type="cuda",
                shape=(n,),
                step_time_s=t * slow,
                lower_s=t * slow * (1 - uncertainty),
                upper_s=t * slow * (1 + uncertainty),
            )
            for n, t in TIMES.items()
            for zero, slow in ((0, 1.0), (2, 1.2))
        ),
        global_batch=16,
        measured=measured,
    )


@pytest.fixture
def host_of_eight(lab: Lab) -> Lab:
    """One host of eight GPUs, and a model of which enough is known."""
    lab.host("a", gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    return lab


def submit(
    lab: Lab, name: str, steps: int, devices: int = 1, model: str = "net", **what: Any
) -> tuple[JobId, list[d.Decision]]:
    lab.jobs += 1
    job = JobId(str(lab.jobs))
    resources = Resources(devices=devices, plan=what.pop("plan", None))
    spec = JobSpec(name=name, kind=JobKind.ELASTIC, command=("x",), resources=resources, **what)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": steps}
    stamp = lab.at()
    decided = lab.tell(
        e.JobSubmitted(**stamp, job=job, spec=spec),
        e.ModelDescribed(**{**stamp, "id": e.EventId(stamp["id"] + 1)}, job=job, shape=shape, model=model),
    )
    return job, decided


def progress(lab: Lab, job: JobId, step: int) -> None:
    attempt = lab.attempt(job)
    lab.run(job)
    step_s = TIMES[len(attempt.ranks)]
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=attempt.number, step=step, loss=None, step_time_s=step_s))


def moved(lab: Lab, start: d.StartMigration) -> list[d.Decision]:
    """The move comes to its end, and the old ranks go."""
    who = {"job": start.job, "attempt": start.attempt, "generation": start.new_generation}
    decided = lab.tell(e.MigrationVerified(**lab.at(), **who, step=100, network_bytes=1, local_bytes=1))
    decided += lab.tell(e.MigrationFinished(**lab.at(), **who, downtime_s=2.0))
    old = {"job": start.job, "attempt": start.attempt, "generation": start.generation}
    return decided + lab.tell(e.AttemptStopped(**lab.at(), **old, host=HostId("a")))


def test_a_job_alone_gets_all_that_makes_it_faster_under_the_best_plan(host_of_eight: Lab) -> None:
    """The job asks for one device and a slow plan, which the policy improves on."""
    _, decided = submit(host_of_eight, "net-1", 1000, plan=Plan(zero=2))
    launch = d.LaunchAttempt.match(decided)
    assert launch is not None
    assert (launch.plan, len(launch.ranks)) == (Plan(dp=8), 8)
    assert "to go, by what is known of its speed" in launch.reason


def test_beliefs_about_hardware_alone_change_no_plan(lab: Lab) -> None:
    """Fewer than three plans were measured: the job runs as it asks to."""
    lab.host("a", gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(measured=1)))
    _, decided = submit(lab, "net-1", 1000, devices=1)
    assert len((d.LaunchAttempt.match(decided) or pytest.fail("not started")).ranks) == 1


def test_a_long_job_shrinks_for_a_short_one_and_grows_back(host_of_eight: Lab) -> None:
    """Ten hours are left of the one, a minute and a half of the other."""
    lab = host_of_eight
    long, _ = submit(lab, "long", 30_000)
    progress(lab, long, 10)
    short, decided = submit(lab, "short", 40)
    shrink = d.StartMigration.match(decided, job=long)
    assert shrink is not None and shrink.devices < 8
    assert "devices to short" in shrink.reason
    assert shrink.reason.endswith("it would be 9h59m worse off otherwise"), "without what that costs the long one"
    decided = moved(lab, shrink)
    launch = d.LaunchAttempt.match(decided, job=short)
    assert launch is not None
    lab.run(short)
    lab.now_s += 400
    decided = lab.finish(short)
    grow = d.StartMigration.match(decided, job=long)
    assert grow is not None and grow.devices == 8
    assert "saves" in grow.reason


def test_a_job_that_is_nearly_over_is_left_alone(host_of_eight: Lab) -> None:
    """Twelve seconds are left: the newcomer waits them out."""
    lab = host_of_eight
    first, _ = submit(lab, "first", 1000)
    progress(lab, first, 990)
    second, decided = submit(lab, "second", 1000)
    assert d.StartMigration.match(decided) is None
    assert "waits for" in lab.why(second) and "is worth it" in lab.why(second)


def test_a_pinned_job_is_not_moved(host_of_eight: Lab) -> None:
    """The user pinned it."""
    lab = host_of_eight
    job, _ = submit(lab, "pinned", 30_000)
    progress(lab, job, 10)
    lab.scheduler.state.jobs[job].pinned = Plan(dp=1)
    _, decided = submit(lab, "short", 40)
    assert d.StartMigration.match(decided) is None


def test_a_guaranteed_job_makes_others_shrink_and_is_never_slower_than_it_asked(host_of_eight: Lab) -> None:
    """Four devices under ZeRO were asked for: 2.64 s per step; four without are surer than that."""
    lab = host_of_eight
    other, _ = submit(lab, "other", 3000)
    progress(lab, other, 10)
    job, decided = submit(lab, "paper", 3000, devices=4, guaranteed=True, plan=Plan(dp=4, zero=2))
    shrink = d.StartMigration.match(decided, job=other)
    assert shrink is not None and shrink.devices <= 4
    assert "to paper: it is guaranteed" in shrink.reason
    launch = d.LaunchAttempt.match(moved(lab, shrink), job=job)
    assert launch is not None and launch.plan == Plan(dp=4)
    progress(lab, job, 10)
    _, decided = submit(lab, "short", 40)
    assert d.StartMigration.match(decided, job=job) is None, "fewer devices would be slower than promised"


def test_a_higher_priority_takes_precedence_over_less_work(host_of_eight: Lab) -> None:
    """Both wait for the same devices."""
    lab = host_of_eight
    first, _ = submit(lab, "first", 1000)
    progress(lab, first, 995)
    urgent, _ = submit(lab, "urgent", 20_000, priority=5)
    short, _ = submit(lab, "short", 10)
    decided = lab.finish(first)
    started = [x.job for x in decided if isinstance(x, d.LaunchAttempt)]
    assert started[0] == urgent
    assert short not in started or started.index(short) > 0


def test_replay_gives_the_same_state(host_of_eight: Lab, replayed: Any) -> None:
    """The pipeline keeps nothing but what follows from the state."""
    lab = host_of_eight
    long, _ = submit(lab, "long", 30_000)
    progress(lab, long, 10)
    _, decided = submit(lab, "short", 40)
    moved(lab, d.StartMigration.match(decided) or pytest.fail("no move"))
    again = replayed(lab)
    assert [j.reason for j in again.state.jobs.values()] == [j.reason for j in lab.scheduler.state.jobs.values()]


@pytest.mark.parametrize("guaranteed", [False, True])
def test_a_drained_host_is_left_by_what_is_known_of_the_job(host_of_eight: Lab, guaranteed: bool) -> None:
    """The job migrates to the fastest remaining devices, and stays where it would lose its guarantee."""
    lab = host_of_eight
    job, _ = submit(lab, "net-1", 30_000, devices=8, guaranteed=guaranteed)
    progress(lab, job, 10)
    lab.host("b", gpus=5, cores=64)
    decided = lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), why="new fan"))
    start = d.StartMigration.match(decided, job=job)
    if guaranteed:
        assert start is None
    else:
        assert start is not None
        assert (start.new_plan, {p.host for p in start.new_ranks}) == (Plan(dp=4), {"b"})
        assert start.reason == "dp=4: a is drained"


def test_an_answer_about_a_job_that_is_forgotten_changes_nothing(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = submit(lab, "net", 1000)
    for name in (job, JobId("77")):
        lab.tell(e.CompletionPredicted(**lab.at(), job=name, predictable=True, steps=500, why="its losses"))
    progress = lab.scheduler.state.jobs[job].progress
    assert (progress.predictable, progress.predicted_steps) == (True, 500)
