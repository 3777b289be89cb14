"""Source and target ranks that do not fit side by side: the job stops, keeps its state in host memory, and restarts."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.plans.memory import estimate
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId, JobId, RankEnd, Reason
from tests.core.conftest import Lab, facts
from tests.core.lifecycle.test_trials import measured, progress, propose, running
from tests.plans.test_reshard import gpt

WISH = Plan(dp=4, zero=1)


@pytest.fixture
def full(lab: Lab) -> tuple[Lab, JobId]:
    """A job that takes more than half of its devices' memory; a fifth and sixth device are free."""
    lab.host("a", gpus=6)
    job = running(lab, devices=4)
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=facts("a", gpus=6, gpu_bytes=int(each * 1.8))))
    return lab, job


def ask(lab: Lab, job: JobId, plan: Plan, *devices: str) -> list[d.Decision]:
    chosen = tuple(DeviceId(f"a:{name}") for name in devices)
    return lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=plan, devices=chosen, by="ann"))


def test_it_stops_with_its_state_kept_and_starts_again_under_the_new_plan(full: tuple[Lab, JobId]) -> None:
    lab, job = full
    decided = ask(lab, job, WISH, "gpu1", "gpu2", "gpu3", "gpu5")
    assert d.StartMigration.match(decided, job=job) is None
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None and stop.keep and stop.grace_s >= 60
    assert "trains on the same device" in lab.why(job)
    decided = lab.stopped(job)
    launch = d.LaunchAttempt.match(decided, job=job)
    assert launch is not None and launch.plan == WISH
    assert [p.device for p in launch.ranks] == ["a:gpu1", "a:gpu2", "a:gpu3", "a:gpu5"]
    lab.tell(e.AttemptLaunched(**lab.at(), job=job, attempt=2, generation=1, restored_step=7))
    progress(lab, job, 8)
    (move,) = lab.scheduler.state.jobs[job].restarts
    assert (move.plan, move.step, move.failure) == (WISH, 7, "")
    assert move.downtime_s is not None and [name for name, _, _ in move.phases] == ["stop", "start"]
    assert set(lab.scheduler.state.holders) == {f"a:gpu{i}" for i in (1, 2, 3, 5)}


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_clock_that_is_set_meanwhile_is_no_part_of_what_it_cost(
    full: tuple[Lab, JobId], by_s: float, is_stopped: bool
) -> None:
    """A restart that took an hour by the new clock: the model's jobs were never restarted again, or all the time."""
    lab, job = full
    ask(lab, job, WISH)
    if is_stopped:
        lab.stopped(job)
    lab.now_s += by_s
    lab.tell(e.ClockSet(**lab.at(), by_s=by_s))
    if not is_stopped:
        lab.stopped(job)
    lab.tell(e.AttemptLaunched(**lab.at(), job=job, attempt=2, generation=1, restored_step=7))
    progress(lab, job, 8)
    (move,) = lab.scheduler.state.jobs[job].restarts
    assert move.downtime_s is not None and 0 < move.downtime_s < 60
    assert all(0 <= seconds < 60 for _, seconds, _ in move.phases)
    assert 0 < lab.scheduler.state.restart_costs_s["m"] < 60


def test_nobody_takes_the_devices_that_it_will_start_on(full: tuple[Lab, JobId]) -> None:
    lab, job = full
    ask(lab, job, WISH, "gpu1", "gpu2", "gpu3", "gpu5")
    other, decided = lab.submit(devices=2)
    assert d.LaunchAttempt.match(decided, job=other) is None
    lab.stopped(job)
    assert lab.state(job) == "starting"
    lab.run(job)
    assert lab.state(other) == "starting"
    assert {p.device for p in lab.attempt(other).ranks.values() for p in [p.place]} == {"a:gpu0", "a:gpu4"}


@pytest.mark.parametrize("is_trial", [False, True])
def test_nobody_takes_what_comes_free_host_by_host(lab: Lab, is_trial: bool) -> None:
    """One host is clean before the other: its devices went to who waited, and the job that trained to the queue."""
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    job = running(lab, devices=4)
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    for host in ("a", "b"):
        small = facts(host, gpus=2, gpu_bytes=int(each * 1.8))
        lab.tell(e.HostChanged(**lab.at(), host=HostId(host), facts=small))
    other, _ = lab.submit(devices=2)
    if is_trial:
        propose(lab, job, WISH)
    else:
        lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=WISH, by="ann"))
    lab.stopped(job)
    assert (lab.state(job), lab.attempt(job).plan, len(lab.attempt(job).devices)) == ("starting", WISH, 4)
    assert lab.state(other) == "queued"


def test_a_host_that_is_drained_meanwhile_leaves_the_job_in_the_queue(full: tuple[Lab, JobId]) -> None:
    lab, job = full
    ask(lab, job, WISH, "gpu1", "gpu2", "gpu3", "gpu5")
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), why="a fan"))
    decided = lab.stopped(job)
    assert d.LaunchAttempt.match(decided, job=job) is None
    (move,) = lab.scheduler.state.jobs[job].restarts
    assert move.failure == "a is drained (a fan)" and lab.state(job) == "queued"
    assert lab.scheduler.state.holders == {}


def test_a_cancelled_job_does_not_start_again(full: tuple[Lab, JobId]) -> None:
    lab, job = full
    ask(lab, job, WISH, "gpu1", "gpu2", "gpu3", "gpu5")
    lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    lab.stopped(job)
    assert lab.state(job) == "cancelled" and lab.scheduler.state.holders == {}


def test_with_room_for_both_it_is_moved_as_ever(full: tuple[Lab, JobId]) -> None:
    lab, job = full
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=facts("a", gpus=6, gpu_bytes=int(each * 3))))
    assert d.StartMigration.match(ask(lab, job, WISH), job=job)


def test_who_is_preempted_keeps_its_state_and_who_is_cancelled_does_not(lab: Lab) -> None:
    """The steps since the last state snapshot are worth the second that saving them takes."""
    lab.host("a", gpus=4)
    job = running(lab, devices=4)
    decided: list[Any] = lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None and not stop.keep


def test_a_policy_grows_a_job_through_host_memory_where_that_pays(lab: Lab) -> None:
    """Hours are left; the pause is worth it, and is made though old and new ranks have no room side by side."""
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    lab.host("a", gpus=6, gpu_bytes=int(each * 1.8))
    estimates = tuple(
        Estimate(
            plan=Plan(dp=n), device_type="cuda", shape=(n,), step_time_s=t, lower_s=t, upper_s=t, device_bytes=each
        )
        for n, t in ((4, 2.2), (6, 1.2))
    )
    table = PerformanceTable(estimates, global_batch=gpt().global_batch, measured=7)
    lab.tell(e.SpeedLearned(**lab.at(), model="m", table=table, why="trials"))
    other, _ = lab.submit(devices=2)
    lab.run(other)
    job = running(lab, devices=4)
    lab.now_s += 500
    decided = lab.finish(other)
    assert d.StartMigration.match(decided, job=job) is None
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None and stop.keep and "through host memory" in stop.reason
    launch = d.LaunchAttempt.match(lab.stopped(job), job=job)
    assert launch is not None and launch.plan == Plan(dp=6)


def test_a_plan_is_tried_through_host_memory_and_left_again_in_the_same_way(full: tuple[Lab, JobId]) -> None:
    """The trial outlives the attempt that it began in; nobody else gets the devices meanwhile."""
    lab, job = full
    before = set(lab.scheduler.state.holders)
    decided = propose(lab, job, WISH)
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None and stop.keep
    launch = d.LaunchAttempt.match(lab.stopped(job), job=job)
    assert launch is not None and launch.plan == WISH
    assert set(lab.scheduler.state.holders) == before
    lab.tell(e.AttemptLaunched(**lab.at(), job=job, attempt=2, generation=1, restored_step=7))
    progress(lab, job, 8)
    known = lab.scheduler.state.jobs[job]
    assert known.trials.current is not None and known.trials.current.from_step == 8
    measured(lab, job, 3.0)
    rows = tuple(
        Estimate(plan=plan, device_type="cuda", shape=(4,), step_time_s=t, lower_s=t, upper_s=t)
        for plan, t in ((Plan(dp=4), 1.0), (WISH, 3.0))
    )
    lab.tell(e.SpeedLearned(**lab.at(), model="m", table=PerformanceTable(rows, global_batch=12, measured=2)))
    decided = propose(lab, job, None)
    assert d.StopAttempt.match(decided, job=job, attempt=2)
    launch = d.LaunchAttempt.match(lab.stopped(job), job=job)
    assert launch is not None and launch.plan == Plan(dp=4)
    assert [trial.failure for trial in known.trials.finished] == [""]


def test_a_smaller_plan_is_not_tried_through_host_memory(full: tuple[Lab, JobId]) -> None:
    """The devices would be idle while the job restarts."""
    lab, job = full
    decided = propose(lab, job, Plan(dp=2))
    assert not d.StopAttempt.match(decided, job=job)
    (trial,) = lab.scheduler.state.jobs[job].trials.finished
    assert "trains on the same device" in trial.failure and not trial.is_refused


def test_its_time_limit_goes_on(lab: Lab) -> None:
    """A move that loses no step gives no time either; a fault, after which steps are done again, does."""
    lab.host("a", gpus=6)
    job = running(lab, devices=4, time_limit_s=3600.0)
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=facts("a", gpus=6, gpu_bytes=int(each * 1.8))))
    began_s = lab.attempt(job).started_s
    lab.now_s = began_s + 3000.0
    ask(lab, job, WISH, "gpu1", "gpu2", "gpu3", "gpu5")
    lab.stopped(job)
    assert lab.attempt(job).number == 2
    assert lab.scheduler.state.timers[Timer(TimerKind.LIMIT, job)] == pytest.approx(lab.now_s + 600.0, abs=5.0)
    lab.run(job)
    progress(lab, job, 8)
    lab.now_s += 500.0
    for rank in range(4):
        lab.exit(job, rank, RankEnd(reason=Reason.LOST))
    lab.stopped(job)
    assert lab.attempt(job).number == 3
    assert lab.scheduler.state.timers[Timer(TimerKind.LIMIT, job)] == pytest.approx(lab.now_s + 3600.0, abs=5.0)
