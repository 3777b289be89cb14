"""A daemon that starts from a journal snapshot has the same state as one that replays all events."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.scheduler import Batch
from clusterd.plans.plan import Plan
from clusterd.types import RankEnd, Reason
from tests.core.conftest import OK, Lab
from tests.core.lifecycle.test_trials import move, progress, running
from tests.core.properties import replayed


def test_how_ranks_end_after_a_move_is_the_same_after_a_snapshot(lab: Lab) -> None:
    """The ranks were the move's and the attempt's in one: a copy of the state wrote down two."""
    lab.host("a", gpus=4)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2)))
    move(lab, job)
    snapshot_at = len(lab.log)
    lab.exit(job, end=OK)
    log = [Batch((event,)) for event in lab.log]
    assert replayed(log, snapshot_at=snapshot_at) == replayed(log)


def test_a_move_through_memory_is_the_same_after_a_snapshot(lab: Lab) -> None:
    """Regression: the same object held the state of the stopped attempt and of the job."""
    lab.host("a", gpus=4)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(tp=4)))
    lab.exit(job, end=RankEnd(reason=Reason.DEVICE_OOM))
    attempt = lab.attempt(job)
    lab.stopped(job)
    for generation in list(attempt.retired):
        what = {"job": job, "attempt": attempt.number, "generation": generation, "host": attempt.hosts[0]}
        lab.tell(e.AttemptStopped(**lab.at(), **what))
    lab.run(job)
    progress(lab, job, 6)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2)))
    lab.stopped(job)
    snapshot_at = len(lab.log)
    lab.run(job)
    progress(lab, job, 7)
    assert lab.scheduler.state.jobs[job].restarts[-1].ended_s is not None
    log = [Batch((event,)) for event in lab.log]
    assert replayed(log, snapshot_at=snapshot_at) == replayed(log)
