"""A plan under which a job cannot train is replaced, and not chosen again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.plans.plan import Plan
from clusterd.types import JobId, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_plans_out_of_memory import MODEL, need, submitted

WRITES = RankEnd(reason=Reason.PLAN, exit_code=96, message="the forward pass writes into blocks.0.weight")
AT = {"attempt": 1}


def refuses(lab: Lab, job: JobId) -> list[d.Decision]:
    lab.exit(job, rank=max(lab.attempt(job).ranks), end=WRITES)
    return lab.stopped(job)


def running_on_one(lab: Lab, step_time_s: float = 10.0) -> JobId:
    """A job on one of four GPUs, thousands of seconds from its end."""
    job = submitted(lab, Plan(), 1)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, **AT, step=5, loss=1.0, step_time_s=step_time_s))
    lab.now_s += 500
    return job


def row(plan: Plan, seconds: float) -> Estimate:
    which: dict[str, Any] = {"plan": plan, "device_type": "cuda", "shape": (plan.ranks,), "device_bytes": need(plan)}
    return Estimate(**which, step_time_s=seconds, lower_s=seconds, upper_s=seconds)


def wanted(lab: Lab, *others: Estimate) -> list[d.Decision]:
    """Decisions when other plans turn out to be this fast."""
    table = PerformanceTable((*others, row(Plan(), 10.0)), global_batch=MODEL.global_batch, measured=7)
    return lab.tell(e.SpeedLearned(**lab.at(), model="m", table=table, why="trials"))


def fails(lab: Lab, job: JobId, **more: Any) -> None:
    """The move that is under way, before anything was moved."""
    generation = lab.attempt(job).migration.generation
    lab.tell(
        e.MigrationFailed(**lab.at(), job=job, **AT, generation=generation, phase="prepare", why="rank 0: no", **more)
    )
    lab.tell(e.AttemptStopped(**lab.at(), job=job, **AT, generation=generation, host=lab.attempt(job).hosts[0]))


def test_the_next_attempt_leaves_out_what_the_refused_plan_did_until_none_is_left(lab: Lab) -> None:
    job = submitted(lab)
    refused: list[Plan] = []
    while lab.state(job) == "running":
        plan = lab.attempt(job).plan
        assert not any(other.techniques <= plan.techniques for other in refused)
        refused.append(plan)
        decided = refuses(lab, job)
        if lab.state(job) == "starting":
            said = next(x.reason for x in decided if isinstance(x, d.RequeueJob))
            assert "writes into blocks.0.weight; it gets another plan" in said
            lab.run(job)
    assert len(refused) >= 2
    assert refused[-1].ranks == 1
    assert lab.state(job) == "failed"
    assert "the forward pass writes into blocks.0.weight" in lab.why(job)


def test_a_job_for_which_no_plan_is_left_on_its_devices_gets_fewer_and_is_told(lab: Lab) -> None:
    job = submitted(lab)
    asked = lab.attempt(job).plan.ranks
    while lab.attempt(job).plan.ranks == asked:
        started = d.LaunchAttempt.match(refuses(lab, job), job=job)
        lab.run(job)
    assert started is not None
    assert f"on 1 of the {asked} devices that it asked for: no plan on {asked} devices: under " in started.reason
    assert "the forward pass writes into blocks.0.weight" in started.reason
    assert len(lab.attempt(job).devices) == 1


def test_a_plan_that_was_asked_for_fails_as_it_is(lab: Lab) -> None:
    job = submitted(lab, Plan(dp=4))
    refuses(lab, job)
    assert lab.state(job) == "failed"
    assert "the forward pass writes into blocks.0.weight" in lab.why(job)


def test_a_job_that_grew_into_such_a_plan_shrinks_and_does_not_fail(lab: Lab) -> None:
    job = running_on_one(lab)
    start = d.StartMigration.match(wanted(lab, row(Plan(dp=2), 1.0)), job=job)
    assert start is not None
    generation = start.new_generation
    lab.tell(
        e.MigrationVerified(**lab.at(), job=job, **AT, generation=generation, step=6, network_bytes=0, local_bytes=1)
    )
    lab.tell(e.AttemptStopped(**lab.at(), job=job, **AT, generation=1, host=start.ranks[0].host))
    refuses(lab, job)
    assert lab.state(job) == "starting"
    assert lab.attempt(job).plan == Plan()


@pytest.mark.parametrize("refused", ["", "the forward pass writes into blocks.0.weight"])
def test_where_new_ranks_cannot_train_the_job_is_not_asked_to_move_again(lab: Lab, refused: str) -> None:
    job = running_on_one(lab)
    assert d.StartMigration.match(wanted(lab, row(Plan(dp=2), 1.0)), job=job) is not None
    fails(lab, job, refused=refused)
    lab.now_s += 50_000
    again = d.StartMigration.match(wanted(lab, row(Plan(dp=2), 1.0)), job=job)
    assert (again is None) == bool(refused)
    if refused:
        assert d.StartMigration.match(wanted(lab, row(Plan(dp=4), 0.5)), job=job) is None
        lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
        assert f"its plan dp=2 cannot be: {refused}" in lab.why(job)
        assert d.StartMigration.match(wanted(lab, row(Plan(tp=2), 1.0)), job=job) is not None


def test_a_pin_to_such_plans_is_over_when_it_has_been_tried(lab: Lab) -> None:
    """One that is like a refused plan is its user's to try, once."""
    job = running_on_one(lab)
    state = lab.scheduler.state.jobs[job]
    state.failures.reject_plan(Plan(dp=2), "it writes")
    state.pinned = Plan(dp=4)
    lab.exit(job, rank=0, end=RankEnd(reason=Reason.LOST))
    lab.stopped(job)
    assert lab.attempt(job).plan == Plan(dp=4)
    lab.run(job)
    refuses(lab, job)
    assert lab.attempt(job).plan == Plan()


def test_moves_that_fail_again_and_again_are_tried_ever_more_rarely(lab: Lab) -> None:
    job = running_on_one(lab)
    tried_s: list[float] = []
    decided = wanted(lab, row(Plan(dp=2), 1.0))
    while len(tried_s) < 6:
        if d.StartMigration.match(decided, job=job) is not None:
            tried_s.append(lab.now_s)
            fails(lab, job)
        lab.now_s += 5.0
        decided = wanted(lab, row(Plan(dp=2), 1.0))
    gaps = [b - a for a, b in pairwise(tried_s)]
    assert all(1.5 * a < b < 3 * a for a, b in pairwise(gaps)), gaps
