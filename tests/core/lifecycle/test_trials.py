"""Trial runs: a job migrates to the plan under trial, and to its best plan when trials are over."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.transitions import MigrationState, TrialState
from clusterd.errors import InvalidTransition
from clusterd.plans.memory import estimate
from clusterd.plans.plan import Plan
from clusterd.types import DeviceClaim, HostId, JobId, JobKind, RankEnd, Reason
from tests.core.conftest import Lab, facts
from tests.plans.test_reshard import gpt

SHAPE = {**gpt().to_dict(), "steps": 1000}


def running(lab: Lab, devices: int = 4, **what: Any) -> JobId:
    """An elastic job that trains."""
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=devices, **what)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE, model="m"))
    lab.run(job)
    progress(lab, job, 5)
    return job


def progress(lab: Lab, job: JobId, step: int) -> list[d.Decision]:
    attempt = lab.attempt(job).number
    return lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=attempt, step=step, loss=1.0, step_time_s=1.0))


def propose(lab: Lab, job: JobId, plan: Plan | None) -> list[d.Decision]:
    return lab.tell(e.TrialProposed(**lab.at(), job=job, plan=plan, steps=10, why="to know"))


def move(lab: Lab, job: JobId) -> None:
    """The move under way succeeds, and the old ranks go."""
    attempt = lab.attempt(job)
    old, new = attempt.generation, attempt.migration.generation
    hosts = attempt.hosts
    who: dict[str, Any] = {"job": job, "attempt": attempt.number}
    lab.tell(
        e.MigrationVerified(**lab.at(), **who, generation=new, step=9, network_bytes=0, local_bytes=1),
        e.MigrationFinished(**lab.at(), **who, generation=new, downtime_s=0.1),
    )
    for host in hosts:
        lab.tell(e.AttemptStopped(**lab.at(), **who, generation=old, host=host))


def measured(lab: Lab, job: JobId, step_time_s: float) -> None:
    plan = lab.attempt(job).plan
    lab.tell(
        e.TrialMeasured(
            **lab.at(), job=job, plan=plan, shape=(plan.ranks,), device_type="cuda", step_time_s=step_time_s, steps=10
        )
    )


def learned(lab: Lab, **seconds: float) -> None:
    plans = {"dp4": Plan(dp=4), "tp4": Plan(tp=4)}
    rows = tuple(
        Estimate(plan=plans[name], device_type="cuda", shape=(4,), step_time_s=s, lower_s=s * 0.9, upper_s=s * 1.1)
        for name, s in seconds.items()
    )
    lab.tell(e.SpeedLearned(**lab.at(), model="m", table=PerformanceTable(rows, measured=2)))


def test_a_trial_keeps_the_devices_that_it_leaves_idle(lab_with_two_hosts: Lab) -> None:
    """The idle devices are not granted to others; after the trial the job uses all of them under the fastest plan."""
    lab = lab_with_two_hosts
    job = running(lab)
    before = set(lab.attempt(job).devices)
    assert d.StartMigration.match(propose(lab, job, Plan(dp=2)), new_plan=Plan(dp=2))
    move(lab, job)
    state = lab.scheduler.state
    assert len(lab.attempt(job).devices) == 2
    assert {device for device, holder in state.holders.items() if holder.job == job} == before
    other, _ = lab.submit(devices=4, hosts=(lab.attempt(job).hosts[0],))
    assert lab.state(other) == "queued"
    measured(lab, job, 2.0)
    learned(lab, dp4=1.0, tp4=0.5)
    decided = propose(lab, job, None)
    back = d.StartMigration.match(decided, new_plan=Plan(tp=4))
    assert back is not None and {place.device for place in back.new_ranks} == before
    move(lab, job)
    assert lab.attempt(job).reserved_devices == {} and set(lab.attempt(job).devices) == before


def test_a_trial_waits_for_the_first_step_and_is_measured_where_it_runs(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    plan = lab.attempt(job).plan
    propose(lab, job, plan)
    assert lab.attempt(job).migration is None  # it runs so already
    assert lab.scheduler.state.jobs[job].trials.current.from_step == 5  # type: ignore[union-attr]
    measured(lab, job, 1.5)
    assert lab.scheduler.state.jobs[job].trials.finished[-1].step_time_s == 1.5


def test_a_failed_trial_is_over_and_the_old_plan_goes_on(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    plan = lab.attempt(job).plan
    propose(lab, job, Plan(tp=4))
    attempt = lab.attempt(job)
    generation = attempt.migration.generation
    who: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": generation}
    lab.tell(e.MigrationFailed(**lab.at(), **who, phase="prepare", why="rank 0: out of device memory"))
    for host in attempt.hosts:
        lab.tell(e.AttemptStopped(**lab.at(), **who, host=host))
    known = lab.scheduler.state.jobs[job]
    assert known.trials.current is None and "out of device memory" in known.trials.finished[-1].failure
    assert attempt.plan == plan
    assert {holder.job for holder in lab.scheduler.state.holders.values()} == {job}


def test_a_person_who_moves_a_job_ends_its_trial(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(tp=4), by="ann"))
    assert d.StartMigration.match(decided, new_plan=Plan(tp=4))
    assert "ann" in lab.scheduler.state.jobs[job].trials.finished[-1].failure


@pytest.mark.parametrize("why", ["drained", "claimed"])
def test_a_trial_does_not_keep_a_job_on_a_host_that_it_must_leave(lab_with_two_hosts: Lab, why: str) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(tp=4))
    move(lab, job)
    attempt = lab.attempt(job)
    (host,) = attempt.hosts
    if why == "drained":
        decided = lab.tell(e.HostDrained(**lab.at(), host=host))
    else:
        claim = DeviceClaim(id="1", devices=attempt.devices, from_s=lab.now_s, reason="fan", drain=True)
        decided = lab.tell(e.DevicesClaimed(**lab.at(), claim=claim))
    away = d.StartMigration.match(decided)
    assert away is not None and {place.host for place in away.new_ranks} == {HostId("b" if host == "a" else "a")}
    assert lab.scheduler.state.jobs[job].trials.current is None


def test_a_trial_that_nobody_measures_is_given_up(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    lab.now_s += 200.0
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.TRIAL, job)))
    known = lab.scheduler.state.jobs[job]
    assert known.trials.current is None and "not measured" in known.trials.finished[-1].failure


def test_a_job_that_ends_in_a_trial_leaves_no_device_held(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    lab.finish(job)
    assert lab.scheduler.state.holders == {} and lab.state(job) == "finished"


def test_a_trial_that_would_take_the_memory_of_who_trains_is_not_made(lab: Lab) -> None:
    """Old and new ranks share devices until the switch; one that finds no memory may be the one that trains."""
    lab.host("a", gpus=4)
    job = running(lab, devices=4)
    each = estimate(Plan(dp=4), gpt(), kind="cuda").device_bytes
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=facts("a", gpus=4, gpu_bytes=int(each * 1.8))))
    propose(lab, job, Plan(dp=2))
    (trial,) = lab.scheduler.state.jobs[job].trials.finished
    assert not trial.is_refused and "trains on the same device" in trial.failure
    assert lab.state(job) == "running"


def test_a_move_by_hand_that_fails_leaves_no_job_under_a_plan_that_was_only_tried(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job = running(lab)
    assert lab.attempt(job).plan == Plan(dp=4)
    propose(lab, job, Plan(tp=4))
    move(lab, job)
    learned(lab, dp4=1.0, tp4=1.1)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2, tp=2), by="ann"))
    what = {"job": job, "attempt": 1, "generation": lab.attempt(job).migration.generation}
    lab.tell(e.MigrationFailed(**lab.at(), **what, phase="prepare", why="no room"))
    decided = lab.tell(e.AttemptStopped(**lab.at(), **what, host=HostId("a")))
    back = d.StartMigration.match(decided, new_plan=Plan(dp=4))
    assert back is not None
    assert back.reason == "dp=4: the fastest known for its devices, 1.0s a step, 1.1s with tp=4"


def test_a_trial_that_nobody_follows_up_leaves_no_job_under_its_plan(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job = running(lab)
    propose(lab, job, Plan(tp=4))
    move(lab, job)
    measured(lab, job, 50.0)
    learned(lab, dp4=1.0, tp4=1.1)
    lab.now_s = lab.scheduler.state.timers[Timer(TimerKind.TRIAL, job)]
    decided = lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.TRIAL, job)))
    back = d.StartMigration.match(decided, new_plan=Plan(dp=4))
    assert back is not None and "the fastest known" in back.reason


def test_a_job_with_a_dead_rank_begins_no_trial_and_returns_from_none(lab_with_two_hosts: Lab) -> None:
    """Each pass began another migration, which failed for want of that rank, until its peers had reported."""
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    measured(lab, job, 2.0)
    learned(lab, dp4=1.0, tp4=0.5)
    decided = lab.exit(job, rank=1, end=RankEnd(reason=Reason.SIGNAL, signal=9))
    decided += propose(lab, job, None)
    assert d.StartMigration.match(decided, job=job) is None
    assert lab.attempt(job).migration is None


def test_a_trial_of_a_job_whose_model_is_unknown_fails_with_that_reason(lab_with_two_hosts: Lab) -> None:
    """Regression: the shape was missing in an older state, and the scheduler raised an exception."""
    lab = lab_with_two_hosts
    job = running(lab)
    lab.scheduler.state.jobs[job].inspection.shape = None
    propose(lab, job, Plan(dp=2))
    (trial,) = lab.scheduler.state.jobs[job].trials.finished
    assert (trial.state, trial.failure) == (TrialState.FAILED, "its model has not been inspected")


def test_an_illegal_step_of_a_migration_tells_its_history(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job = running(lab)
    propose(lab, job, Plan(dp=2))
    move(lab, job)
    migration = lab.scheduler.state.jobs[job].migrations[-1]
    with pytest.raises(InvalidTransition, match=r"no step from done to preparing .*preparing until .*resuming until"):
        migration.go(MigrationState.PREPARING, lab.now_s)
