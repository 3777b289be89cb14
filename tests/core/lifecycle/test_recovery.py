"""Ranks die during a migration: replicas take over as soon as new ranks have devices."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.plans.memory import estimate
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId, JobId, JobKind, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import move, propose, running
from tests.plans.test_reshard import gpt

KILLED = RankEnd(reason=Reason.SIGNAL, signal=9)


@pytest.mark.parametrize("switched", [False, True])
def test_a_rank_that_dies_in_a_move_is_stood_in_for_once_the_other_side_is_gone(
    lab_with_two_hosts: Lab, switched: bool
) -> None:
    """Before the switch an old rank, after it a new one; the job must not start over because somebody is on his way."""
    lab = lab_with_two_hosts
    job = running(lab, devices=2)
    attempt = lab.attempt(job)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2, zero=1), by="ann", pin=True))
    who: dict[str, Any] = {"job": job, "attempt": attempt.number}
    leaving = attempt.migration.generation
    assert attempt.plan == Plan(dp=2)
    if switched:
        leaving = attempt.generation
        new = attempt.migration.generation
        lab.tell(e.MigrationVerified(**lab.at(), **who, generation=new, step=9, network_bytes=0, local_bytes=1))
        assert lab.scheduler.state.jobs[job].resuming is not None
        attempt.plan = Plan(dp=2)
    decided = lab.exit(job, rank=1, end=KILLED)
    decided += lab.tell(e.RankOrphaned(**lab.at(), **who, generation=attempt.generation, rank=0, step=9))
    assert not d.StopAttempt.match(decided, job=job, generation=attempt.generation)
    assert d.StartMigration.match(decided, job=job) is None
    for host in sorted(attempt.retired[leaving].pending):
        decided = lab.tell(e.AttemptStopped(**lab.at(), **who, generation=leaving, host=host))
    start = d.StartMigration.match(decided, job=job)
    assert start is not None
    assert start.lost == (1,)
    assert lab.scheduler.state.jobs[job].resuming is None


def orphan(lab: Lab, job: str, rank: int, step: int, **more: Any) -> list[d.Decision]:
    attempt = lab.attempt(job)
    who: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": attempt.generation}
    return lab.tell(e.RankOrphaned(**lab.at(), **who, rank=rank, step=step, **more))


@pytest.mark.parametrize("share", [0.8, 0.3])
def test_survivors_make_room_where_new_ranks_find_none_beside_them(lab: Lab, share: float) -> None:
    """They hold parameters and optimizer state there: the new ranks ran out of memory, and steps were lost."""
    shape = gpt(layers=8, width=2048)
    need = estimate(Plan(dp=2), shape, kind="cuda").device_bytes
    lab.host("a", gpus=2, gpu_bytes=int(need / share))
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=2)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={**shape.to_dict(), "steps": 1000}, model="m"))
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=500, loss=1.0, step_time_s=1.0))
    lab.exit(job, rank=1, end=KILLED)
    start = d.StartMigration.match(orphan(lab, job, 0, 500), job=job)
    assert start is not None and start.source_releases_memory == (share > 0.5)


def test_a_gpu_that_failed_is_not_gone_on_with(lab: Lab) -> None:
    lab.host("a", gpus=3)
    job = running(lab, devices=2)
    lab.attempt(job).plan = Plan(dp=2)
    faulty = lab.attempt(job).ranks[1].place.device
    lab.exit(job, rank=1, end=RankEnd(reason=Reason.DEVICE_FAULT, exit_code=93))
    start = d.StartMigration.match(orphan(lab, job, 0, 12), job=job)
    assert start is not None
    assert len(start.new_ranks) == 2
    assert faulty not in {place.device for place in start.new_ranks}


def test_a_trial_that_runs_out_of_memory_takes_its_job_back(lab_with_two_hosts: Lab) -> None:
    """Every rank holds the state of the last step; the plan is known not to fit, and the job is not failed."""
    lab = lab_with_two_hosts
    job = running(lab, devices=4)
    before = lab.attempt(job).plan
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    decided = orphan(lab, job, 0, 12, out_of_memory=True)
    assert d.StartMigration.match(decided, job=job) is None
    decided = orphan(lab, job, 1, 12)
    start = d.StartMigration.match(decided, job=job)
    assert start is not None
    assert (start.new_plan, start.lost) == (before, ())
    (trial,) = lab.scheduler.state.jobs[job].trials.finished
    assert trial.is_refused
    move(lab, job)
    assert lab.state(job) == "running"


@pytest.mark.parametrize("torn", [(1,), (0, 1)])
def test_parameters_of_no_step_are_not_gone_on_from(lab_with_two_hosts: Lab, torn: tuple[int, ...]) -> None:
    """A GPU had queued its next update behind sums that never came."""
    lab = lab_with_two_hosts
    job = running(lab, devices=4)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    for rank in (0, 1):
        decided = orphan(lab, job, rank, -1 if rank in torn else 12, out_of_memory=rank == 0)
    assert d.StartMigration.match(decided, job=job) is None
    assert d.StopAttempt.match(decided, job=job) is not None
    assert "while other ranks changed their parameters" in lab.attempt(job).stop.why


@pytest.mark.parametrize("torn", [1, 2])
def test_who_holds_parameters_of_no_step_counts_as_dead(lab: Lab, torn: int) -> None:
    lab.host("a", gpus=4)
    job = running(lab, devices=3)
    lab.attempt(job).plan = Plan(dp=3)
    lab.exit(job, rank=2, end=KILLED)
    orphan(lab, job, 1, -1)
    decided = orphan(lab, job, 0, -1 if torn == 2 else 12)
    start = d.StartMigration.match(decided, job=job)
    if torn == 1:
        assert start is not None
        assert (start.lost, start.step) == ((1, 2), 12)
    else:
        assert start is None
        assert "no rank is left of 3" in lab.attempt(job).stop.why


def test_where_the_way_back_fails_too_the_job_starts_again(lab_with_two_hosts: Lab) -> None:
    """There are no old ranks that could go on."""
    lab = lab_with_two_hosts
    job = running(lab, devices=4)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    orphan(lab, job, 0, 12, out_of_memory=True)
    orphan(lab, job, 1, 12)
    attempt = lab.attempt(job)
    who: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": attempt.migration.generation}
    decided = lab.tell(e.MigrationFailed(**lab.at(), **who, phase="prepare", why="no room"))
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None
    assert "dp=2 ran out of memory" in attempt.stop.why


def test_a_trial_that_was_interrupted_may_be_made_again(lab_with_two_hosts: Lab) -> None:
    """The interruption is not the plan's fault."""
    lab = lab_with_two_hosts
    job = running(lab, devices=4)
    propose(lab, job, Plan(dp=2))
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2, zero=1), by="ann"))
    (trial,) = lab.scheduler.state.jobs[job].trials.finished
    assert trial.failure
    assert not trial.is_refused


@pytest.fixture
def spread(lab: Lab) -> tuple[Lab, JobId]:
    """A job of four replicas on two hosts, and two free devices on a third."""
    for host in "abc":
        lab.host(host, gpus=2)
    job = running(lab, devices=4)
    assert lab.attempt(job).hosts == ("a", "b")
    lab.attempt(job).plan = Plan(dp=4)
    return lab, job


def fire(lab: Lab, timer: Timer) -> list[d.Decision]:
    assert timer in lab.scheduler.state.timers
    return lab.fire(timer)


def test_ranks_that_do_not_notice_are_told_before_they_are_given_up(spread: tuple[Lab, JobId]) -> None:
    """A collective may wait for the dead for half an hour."""
    lab, job = spread
    lab.exit(job, rank=0, end=KILLED)
    orphan(lab, job, 1, 9)
    decided = fire(lab, Timer(TimerKind.RECOVER, job))
    told = d.AbortCollectives.match(decided, job=job)
    assert told is not None
    assert told.hosts == ("a", "b")
    assert "ranks [2, 3]" in told.reason
    assert not d.StopAttempt.match(decided)
    orphan(lab, job, 2, 9)
    start = d.StartMigration.match(orphan(lab, job, 3, 9), job=job)
    assert start is not None
    assert start.lost == (0,)


def test_ranks_that_stay_silent_are_given_up(spread: tuple[Lab, JobId]) -> None:
    lab, job = spread
    lab.exit(job, rank=0, end=KILLED)
    fire(lab, Timer(TimerKind.RECOVER, job))
    decided = fire(lab, Timer(TimerKind.RECOVER, job))
    assert d.StopAttempt.match(decided, job=job)
    assert "ranks [1, 2, 3] did not report their state" in lab.attempt(job).stop.why


@pytest.mark.parametrize("noticed", [True, False])
def test_a_job_outlives_a_host_without_power(spread: tuple[Lab, JobId], noticed: bool) -> None:
    """The job recovers whether or not its peers notice; declaring the host lost must not requeue it a second time."""
    lab, job = spread
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("b"), why="no answer"))
    if noticed:
        orphan(lab, job, 0, 9)
    else:
        assert d.AbortCollectives.match(fire(lab, Timer(TimerKind.HOST_LOST, "b")), job=job, hosts=("a",))
        orphan(lab, job, 0, 9)
    start = d.StartMigration.match(orphan(lab, job, 1, 9), job=job)
    assert start is not None
    assert start.lost == (2, 3)
    assert {place.host for place in start.new_ranks} == {"a", "c"}
    attempt = lab.attempt(job)
    who: dict[str, Any] = {"job": job, "attempt": attempt.number}
    old, new = attempt.generation, attempt.migration.generation
    lab.tell(
        e.MigrationVerified(**lab.at(), **who, generation=new, step=9, network_bytes=0, local_bytes=1),
        e.MigrationFinished(**lab.at(), **who, generation=new, downtime_s=0.1),
        e.AttemptStopped(**lab.at(), **who, generation=old, host=HostId("a")),
    )
    if noticed:
        assert not d.StopAttempt.match(fire(lab, Timer(TimerKind.HOST_LOST, "b")), job=job)
    assert lab.state(job) == "running"
    assert attempt.number == 1
    assert not attempt.retired
    assert not [device for device in lab.scheduler.state.holders if device.startswith("b:")]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_lost_host_is_not_waited_for_when_nothing_came_of_its_survivors(
    spread: tuple[Lab, JobId], is_cancelled: bool
) -> None:
    """The job was stopping until the host came back, which may be never."""
    lab, job = spread
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("b"), why="power"))
    fire(lab, Timer(TimerKind.HOST_LOST, "b"))
    assert lab.state(job) == "running"
    if is_cancelled:
        lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    else:
        fire(lab, Timer(TimerKind.RECOVER, job))
    assert lab.attempt(job).stop.pending == {"a"}
    lab.stopped(job)
    assert lab.state(job) == ("cancelled" if is_cancelled else "starting")
    assert lab.scheduler.state.hosts[HostId("b")].cores_used == 0
    assert not [holder for holder in lab.scheduler.state.holders.values() if holder.host == "b"]


def test_a_host_that_dies_under_a_move_to_it_does_not_take_the_job(spread: tuple[Lab, JobId]) -> None:
    lab, job = spread
    lab.tell(
        e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), devices=(DeviceId("c:gpu0"), DeviceId("c:gpu1")))
    )
    assert lab.attempt(job).migration is not None
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("c"), why="no answer"))
    decided = fire(lab, Timer(TimerKind.HOST_LOST, "c"))
    assert lab.attempt(job).migration is None
    assert not d.StopAttempt.match(decided, generation=1)
    assert lab.state(job) == "running"
    assert not [device for device in lab.scheduler.state.holders if device.startswith("c:")]


@pytest.mark.parametrize("can_finish_step", [True, False])
def test_a_survivor_a_step_behind_makes_that_step_or_is_left_out(
    spread: tuple[Lab, JobId], can_finish_step: bool
) -> None:
    """One got through the last reduction of the step, the other did not; the step that was made is not lost."""
    lab, job = spread
    lab.exit(job, rank=0, end=KILLED)
    orphan(lab, job, 1, 9, can_finish_step=can_finish_step)
    orphan(lab, job, 2, 10)
    start = d.StartMigration.match(orphan(lab, job, 3, 10), job=job)
    assert start is not None
    assert start.step == 10
    assert start.lost == ((0,) if can_finish_step else (0, 1))


def test_a_command_that_runs_for_days_between_its_hosts_faults_is_not_given_up(lab: Lab) -> None:
    """Commands report no steps, and six host faults in a month are no crash loop."""
    for host in ("a", "b"):
        lab.host(host, gpus=1)
    job, _ = lab.submit(devices=1, kind=JobKind.COMMAND)
    for _ in range(8):
        lab.run(job)
        lab.now_s += 5 * 86400.0
        host = lab.attempt(job).hosts[0]
        lab.tell(e.HostDisconnected(**lab.at(), host=host, why="power"))
        lab.now_s = lab.scheduler.state.timers[Timer(TimerKind.HOST_LOST, host)]
        lab.fire(Timer(TimerKind.HOST_LOST, host))
        assert lab.state(job) == "starting", "on the other host, at once"
        lab.connect(host)
