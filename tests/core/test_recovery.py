"""Ranks die while their job is being moved: replicas stand in, as soon as there is room for new ranks."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import RankEnd, Reason
from plans.plan import Plan
from tests.core.conftest import Lab
from tests.core.test_trials import running

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
