"""Jobs that restart with other sizes, end at a target loss, or get late events on the way."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobId, JobKind, JobSpec, RankEnd, RankReport, Reason, Resources, Tenant
from tests.core.conftest import Lab
from tests.plans.test_reshard import gpt

ASKED_TO_STOP = RankEnd(reason=Reason.STOPPED, exit_code=0)


def submit(lab: Lab, **what: Any) -> tuple[JobId, list[d.Decision]]:
    lab.jobs += 1
    job = JobId(str(lab.jobs))
    plans = what.pop("plans", (Plan(dp=4), Plan(dp=2)))
    hosts = what.pop("hosts", ())
    resources = Resources(devices=max(p.ranks for p in plans), plans=plans, hosts=hosts)
    spec = JobSpec(name="own", kind=JobKind.CHECKPOINTABLE, command=("train",), resources=resources, **what)
    return job, lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))


def stopped_in_good_order(lab: Lab, job: JobId) -> list[d.Decision]:
    """Every rank saved and exited with 0, as it was asked to."""
    ranks = lab.attempt(job).ranks
    return lab.stopped(job, *(RankReport(rank=r, end=ASKED_TO_STOP) for r in ranks))


def test_the_best_size_that_there_is_room_for(lab: Lab) -> None:
    lab.host("a", gpus=4)
    other, _ = lab.submit(devices=2)
    lab.run(other)
    job, decided = submit(lab)
    launch = d.LaunchAttempt.match(decided, job=job)
    assert launch is not None and launch.plan == Plan(dp=2)


def test_another_size_is_a_stop_a_save_and_a_start(lab: Lab) -> None:
    """The job exits with 0 on request: neither its normal end nor a failure."""
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    assert d.StopAttempt.match(decided, job=job)
    decided = stopped_in_good_order(lab, job)
    launch = d.LaunchAttempt.match(decided, job=job)
    assert launch is not None and (launch.plan, launch.attempt) == (Plan(dp=2), 2)
    assert lab.scheduler.state.jobs[job].failures.of_job == 0
    requeued = d.RequeueJob.match(decided, job=job)
    assert requeued is not None and "what it saved" in requeued.reason


def test_a_job_may_go_back_to_the_one_plan_that_it_was_submitted_with(lab: Lab) -> None:
    """Its command reads tp from elsewhere."""
    lab.host("a", gpus=4)
    job, own = JobId("1"), Plan(dp=2, tp=2)
    spec = JobSpec(
        name="own", kind=JobKind.CHECKPOINTABLE, command=("train",), resources=Resources(devices=4, plan=own)
    )
    lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))
    for plan in (Plan(dp=2), own):
        lab.run(job)
        lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=plan, by="ann"))
        stopped_in_good_order(lab, job)
        assert lab.attempt(job).plan == plan, lab.why(job)


def test_the_size_that_a_person_chose_is_kept_until_it_is_unpinned(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    stopped_in_good_order(lab, job)
    assert lab.scheduler.state.jobs[job].pinned
    lab.tell(e.JobUnpinned(**lab.at(), job=job, by="ann"))
    assert not lab.scheduler.state.jobs[job].pinned


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(dp=4), "tenant vision may hold 2"),
        (Plan(dp=8), "tenant vision may hold 2"),
        (Plan(tp=2), "its command has no place for all of tp=2: it would be told of dp=1 alone"),
    ],
)
def test_a_job_runs_on_where_another_size_could_never_start(lab: Lab, plan: Plan, why: str) -> None:
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2, tenants={"vision": Tenant(quota=2)}))
    lab.host("a", gpus=8)
    job, _ = submit(lab, plans=(Plan(dp=2),), tenant="vision")
    lab.run(job)
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=plan, by="ann"))
    assert not d.StopAttempt.match(decided, job=job)
    assert lab.state(job) == "running" and not lab.scheduler.state.jobs[job].pinned
    assert why in lab.why(job)


def test_only_hosts_and_devices_that_a_job_may_have_count_for_its_size(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    job, _ = submit(lab, plans=(Plan(dp=2),), hosts=(HostId("a"),))
    lab.run(job)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=4), by="ann"))
    assert "asks for 4 devices, its hosts (a) have 2 GPUs" in lab.why(job)


def test_a_cancelled_job_that_exits_in_good_order_is_cancelled(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    stopped_in_good_order(lab, job)
    assert lab.state(job) == "cancelled"


def test_a_target_is_reached_when_the_loss_stays_there(lab: Lab) -> None:
    """Three looks in a row; a lucky one does not count. The job is finished."""
    lab.host("a", gpus=4)
    job, _ = submit(lab, target_loss=2.0)
    lab.run(job)

    def loss(step: int, value: float) -> list[d.Decision]:
        attempt = lab.attempt(job).number
        return lab.tell(
            e.AttemptProgressed(**lab.at(), job=job, attempt=attempt, step=step, loss=value, step_time_s=0.1)
        )

    for step, value in enumerate((1.9, 2.4, 1.9, 1.8), start=1):
        assert not d.StopAttempt.match(loss(step, value), job=job)
    stop = d.StopAttempt.match(loss(5, 1.7), job=job)
    assert stop is not None and stop.done, "its ranks leave what it was trained for"
    assert stop.grace_s >= 600, "and have the time for it"
    stopped_in_good_order(lab, job)
    assert lab.state(job) == "finished"
    assert "reached 2 by step 5" in lab.why(job)


def test_old_news_does_not_set_a_job_back(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    attempt = lab.attempt(job).number
    for step in (7, 5):
        lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=attempt, step=step, loss=1.0, step_time_s=0.1))
    assert lab.scheduler.state.jobs[job].progress.step == 7


def test_checkpoints_by_the_clock_take_turns_and_wait_for_progress(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job, decided = submit(lab, checkpoint_directory="/shared", checkpoint_every_s=60.0)
    decided = lab.run(job)
    assert d.SetTimer.match(decided, timer=Timer(TimerKind.CHECKPOINT, job))
    timer = e.TimerFired(**lab.at(), timer=Timer(TimerKind.CHECKPOINT, job))
    assert not d.TakeCheckpoint.match(lab.tell(timer), job=job)  # nothing was trained yet
    paths = []
    for step in (10, 20):
        attempt = lab.attempt(job).number
        lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=attempt, step=step, loss=1.0, step_time_s=0.1))
        taken = d.TakeCheckpoint.match(lab.fire(Timer(TimerKind.CHECKPOINT, job)), job=job)
        assert taken is not None
        paths.append(taken.path)
        lab.tell(e.CheckpointTaken(**lab.at(), job=job, attempt=attempt, step=step, path=taken.path))
    assert sorted(path[-2:] for path in paths) == ["/0", "/1"]


def test_a_job_can_be_pinned_where_it_is(lab_with_two_hosts: Lab) -> None:
    """Nothing moves, and nobody else moves it."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=2)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={**gpt().to_dict(), "steps": 1000}, model="m"))
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=5, loss=1.0, step_time_s=1.0))
    attempt = lab.attempt(job)
    decided = lab.tell(
        e.MigrationRequested(**lab.at(), job=job, plan=attempt.plan, devices=attempt.devices, pin=True, by="ann")
    )
    assert not d.StartMigration.match(decided, job=job)
    assert lab.scheduler.state.jobs[job].pinned and "ann" in lab.why(job)


def test_a_command_on_several_devices_is_over_when_its_one_process_is(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job, _ = lab.submit(devices=2)
    lab.run(job)
    lab.exit(job, rank=0)
    lab.stopped(job)
    assert lab.state(job) == "finished"


def test_a_command_that_no_host_can_hold_says_so(lab_with_two_hosts: Lab) -> None:
    """Otherwise it would wait for ever: one process cannot use devices of two hosts."""
    job, _ = lab_with_two_hosts.submit(devices=5)
    assert lab_with_two_hosts.why(job) == ("asks for 5 devices on one host (see --nodes); no host has more than 4")


def test_a_size_that_ran_out_of_device_memory_fails_with_that_reason(lab: Lab) -> None:
    """Nothing is known of its model that another size could be chosen by: the daemon ended."""
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    lab.exit(job, end=RankEnd(reason=Reason.DEVICE_OOM, exit_code=95))
    lab.stopped(job)
    assert lab.state(job) == "failed"
    assert "out of device memory" in lab.why(job)


def test_it_leaves_a_drained_host_once_there_is_room_elsewhere(lab: Lab) -> None:
    """Somebody wants a machine for maintenance on Friday; the job on it would run till Tuesday."""
    lab.host("a", gpus=4)
    job, _ = submit(lab)
    lab.run(job)
    lab.host("b", gpus=2)
    decided = lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None and not stop.keep
    assert "a is drained: it saves" in lab.why(job) and "dp=2 on b" in lab.why(job)
    other, decided = lab.submit(devices=2)
    assert d.LaunchAttempt.match(decided, job=other) is None, "that is kept for it"
    launch = d.LaunchAttempt.match(stopped_in_good_order(lab, job), job=job)
    assert launch is not None and (launch.plan, launch.attempt) == (Plan(dp=2), 2)
    assert {place.host for place in launch.ranks} == {"b"}
    lab.run(job)
    (move,) = lab.scheduler.state.jobs[job].restarts
    assert move.ended_s is not None and move.downtime_s is not None and not move.failure
    assert not lab.scheduler.state.restart_costs_s, "what it took says nothing of jobs that keep their state"


def test_it_stays_on_a_drained_host_as_long_as_there_is_no_room(lab: Lab) -> None:
    """The job is not asked to save needlessly, and keeps as many of its devices as may be used."""
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    job, _ = submit(lab, plans=(Plan(dp=4), Plan(dp=3)))
    lab.run(job)
    decided = lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    assert d.StopAttempt.match(decided, job=job) is None
    assert "until devices are free elsewhere" in lab.why(job)
    decided = lab.host("c", gpus=1)
    assert d.StopAttempt.match(decided, job=job)
    launch = d.LaunchAttempt.match(stopped_in_good_order(lab, job), job=job)
    assert launch is not None and launch.plan == Plan(dp=3)
    assert {place.host for place in launch.ranks} == {"b", "c"}
