"""A plan that was thought to fit and does not: the job gets one that needs less, and fails only when there is none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.outlook import Estimate, Outlook
from clusterd.types import JobId, JobKind, JobSpec, RankEnd, Reason, Resources
from plans.memory import estimate
from plans.plan import Plan
from tests.core.conftest import Lab
from tests.plans.test_reshard import gpt

OOM = RankEnd(reason=Reason.DEVICE_OOM, exit_code=95)
MODEL = gpt(layers=8, width=2048)


def need(plan: Plan) -> int:
    return estimate(plan, MODEL, kind="cuda").device_bytes


def submitted(lab: Lab, plan: Plan | None = None) -> JobId:
    """An elastic job of a large model on four GPUs, with its ranks up."""
    lab.host("a", gpus=4)
    job = JobId("1")
    spec = JobSpec(
        name="large", kind=JobKind.ELASTIC, command=("python", "t.py"), resources=Resources(devices=4, plan=plan)
    )
    lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={**MODEL.to_dict(), "steps": 1000}, model="m"))
    lab.run(job)
    return job


def runs_out(lab: Lab, job: JobId) -> list[d.Decision]:
    lab.exit(job, rank=1, end=OOM)
    return lab.stopped(job)


def test_the_next_attempt_needs_less_until_nothing_does(lab: Lab) -> None:
    job = submitted(lab)
    plans: list[Plan] = []
    while lab.state(job) == "running":
        plans.append(lab.attempt(job).plan)
        decided = runs_out(lab, job)
        if lab.state(job) == "starting":
            assert "needs less" in next(x.reason for x in decided if isinstance(x, d.RequeueJob))
            lab.run(job)
    assert 2 <= len(plans) <= 10
    assert all(need(b) <= 0.9 * need(a) for a, b in pairwise(plans))
    assert lab.state(job) == "failed"
    assert "out of device memory" in lab.why(job)


def test_a_plan_that_was_asked_for_fails_as_it_is(lab: Lab) -> None:
    job = submitted(lab, Plan(dp=4))
    runs_out(lab, job)
    assert lab.state(job) == "failed"


@pytest.mark.parametrize("room", [True, False])
def test_a_policy_offers_nothing_that_needs_as_much(lab: Lab, room: bool) -> None:
    """The fastest plan by the table is the one that did not fit."""
    job = submitted(lab)
    runs_out(lab, job)
    lab.run(job)
    small = lab.attempt(job).plan

    def row(plan: Plan, seconds: float) -> Estimate:
        which: dict[str, Any] = {"plan": plan, "device_type": "cuda", "shape": (4,), "device_bytes": need(plan)}
        return Estimate(**which, step_time_s=seconds, lower_s=seconds, upper_s=seconds)

    if room:
        lab.scheduler.state.jobs[job].at_most_bytes = None
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=2, step=5, loss=1.0, step_time_s=10.0))
    lab.now_s += 500
    outlook = Outlook((row(Plan(dp=4), 1.0), row(small, 10.0)), global_batch=MODEL.global_batch, measured=7)
    decided = lab.tell(e.SpeedLearned(**lab.at(), model="m", outlook=outlook, why="trials"))
    assert (d.StartMigration.match(decided, job=job, new_plan=Plan(dp=4)) is not None) == room
