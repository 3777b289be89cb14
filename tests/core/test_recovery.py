"""Ranks die while their job is being moved: replicas stand in, as soon as there is room for new ranks."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import RankEnd, Reason
from plans.plan import Plan
from tests.core.conftest import Lab
from tests.core.test_trials import move, propose, running

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
        assert attempt.resuming
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
    assert not attempt.resuming


def orphan(lab: Lab, job: str, rank: int, step: int, **more: Any) -> list[d.Decision]:
    attempt = lab.attempt(job)
    who: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": attempt.generation}
    return lab.tell(e.RankOrphaned(**lab.at(), **who, rank=rank, step=step, **more))


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
    (trial,) = lab.scheduler.state.jobs[job].trials
    assert trial.is_refused
    move(lab, job)
    assert lab.state(job) == "running"


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
    assert "dp=2 ran out of memory" in attempt.why


def test_a_trial_that_was_interrupted_may_be_made_again(lab_with_two_hosts: Lab) -> None:
    """Its plan is not at fault."""
    lab = lab_with_two_hosts
    job = running(lab, devices=4)
    propose(lab, job, Plan(dp=2))
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2, zero=1), by="ann"))
    (trial,) = lab.scheduler.state.jobs[job].trials
    assert trial.failure
    assert not trial.is_refused
