"""A plan that runs out of memory: the job gets a smaller one, and fails only where none is left."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.state import NO_BOUNDS
from clusterd.plans.memory import estimate
from clusterd.plans.plan import Plan
from clusterd.types import JobId, JobKind, JobSpec, RankEnd, Reason, Resources
from tests.core.conftest import Lab
from tests.plans.test_reshard import gpt

OOM = RankEnd(reason=Reason.DEVICE_OOM, exit_code=95)
MODEL = gpt(layers=8, width=2048)


def need(plan: Plan) -> int:
    return estimate(plan, MODEL, kind="cuda").device_bytes


def submitted(lab: Lab, plan: Plan | None = None, devices: int = 4) -> JobId:
    """An elastic job of a large model on some of four GPUs, with its ranks up."""
    lab.host("a", gpus=4)
    job = JobId("1")
    asked = Resources(devices=devices, plan=plan)
    spec = JobSpec(name="large", kind=JobKind.ELASTIC, command=("python", "t.py"), resources=asked)
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
        lab.scheduler.state.jobs[job].failures.bounds = NO_BOUNDS
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=2, step=5, loss=1.0, step_time_s=10.0))
    lab.now_s += 500
    table = PerformanceTable((row(Plan(dp=4), 1.0), row(small, 10.0)), global_batch=MODEL.global_batch, measured=7)
    decided = lab.tell(e.SpeedLearned(**lab.at(), model="m", table=table, why="trials"))
    assert (d.StartMigration.match(decided, job=job, new_plan=Plan(dp=4)) is not None) == room


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_that_runs_out_beside_those_of_a_move_is_not_its_plan_s_fault(lab: Lab, devices: int) -> None:
    """The plan had trained for hours; the migration's ranks took more memory than estimated, so that migration is not
    repeated.
    """
    asked = Plan(dp=devices)
    job, at = submitted(lab, asked, devices), {"attempt": 1}
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, **at, step=500, loss=1.0, step_time_s=1.0))
    other = Plan(dp=devices, checkpointing=True)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=other, by="ann"))
    gone = e.AttemptStopped(
        **lab.at(), job=job, **at, generation=lab.attempt(job).migration.generation, host=lab.attempt(job).hosts[0]
    )
    lab.exit(job, rank=0, end=OOM)
    if devices > 1:  # a replica of it is left, and makes room
        lab.tell(e.RankOrphaned(**lab.at(), job=job, **at, generation=1, rank=1, step=500))
        start = d.StartMigration.match(lab.tell(gone), job=job)
        assert start is not None
        assert (start.source_releases_memory, start.lost) == (True, (0,))
        return
    lab.tell(gone)
    lab.stopped(job)
    assert lab.state(job) == "starting"
    assert lab.attempt(job).plan == asked
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=2, step=500, loss=1.0, step_time_s=1.0))
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=other, by="ann"))
    assert d.StartMigration.match(decided, job=job) is None  # but through host memory
    assert d.StopAttempt.match(decided, job=job) is not None


@pytest.mark.parametrize("why", ["memory", "mode"])
def test_where_new_ranks_find_no_place_beside_the_old_the_job_moves_through_host_memory(lab: Lab, why: str) -> None:
    """Each try took memory from the ranks that train, or found a GPU that lets nobody else in."""
    asked, other = Plan(dp=2), Plan(dp=2, checkpointing=True)
    job, at = submitted(lab, asked, 2), {"attempt": 1}
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, **at, step=500, loss=1.0, step_time_s=1.0))
    if why == "memory":
        lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=other, by="ann"))
        new = lab.attempt(job).migration.generation
        failed = {"phase": "prepare", "why": "rank 0 of generation 2: out of device memory", "out_of_memory": True}
        lab.tell(e.MigrationFailed(**lab.at(), job=job, **at, generation=new, **failed))
        gone = {"host": lab.attempt(job).hosts[0], "generation": new}
        lab.tell(e.AttemptStopped(**lab.at(), job=job, **at, **gone))
    else:
        host = lab.scheduler.state.hosts[lab.attempt(job).hosts[0]]
        alone = tuple(replace(device, exclusive=True) for device in host.devices)
        host.facts = replace(host.facts, devices=alone)
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=other, by="ann"))
    assert d.StartMigration.match(decided, job=job) is None
    assert d.StopAttempt.match(decided, job=job) is not None


def test_a_large_job_with_long_steps_has_time_to_leave_its_state(lab: Lab) -> None:
    """Regression: the job was killed after a minute, in the middle of the copy, and steps were lost."""
    job, at = submitted(lab, Plan(dp=2), 2), {"attempt": 1}
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, **at, step=500, loss=1.0, step_time_s=60.0))
    lab.scheduler.state.jobs[job].failures.needs_exclusive_memory = True
    decided = lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2, checkpointing=True), by="ann"))
    stop = d.StopAttempt.match(decided, job=job)
    assert stop is not None
    assert stop.grace_s > 4 * 60.0 + MODEL.state_bytes / 1e9
