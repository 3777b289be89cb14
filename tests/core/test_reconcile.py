"""What an agent says it has against what we believe it has."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import events as e
from clusterd.core.reconcile import reconcile
from clusterd.core.state import Attempt, Rank
from clusterd.types import AttemptReport, AttemptState, DeviceId, HostId, RankPlace, RankReport
from tests.core.conftest import OK, Lab


@pytest.mark.parametrize(
    ("generation", "ended", "orphans"),
    [
        (1, True, 0),  # left behind by a move: records that the agent keeps until the attempt is over
        (3, True, 1),  # of a move that failed: its launch may have come after the word to end it
        (1, False, 1),  # it must not run any more
    ],
)
def test_records_of_old_generations_are_no_orphans(generation: int, ended: bool, orphans: int) -> None:
    """After a daemon's restart a job that was moved eight times is not cleaned up after eight times."""
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    state = lab.scheduler.state
    host = state.hosts[HostId("a")]
    place = RankPlace(rank=0, host=HostId("a"), device=DeviceId("a:gpu0"))
    attempt = Attempt(job, 1, 2, None, {0: Rank(place)}, 0.0, state=AttemptState.RUNNING, last_generation=3)
    attempt.past[1] = {0: host.id}
    state.jobs[job].attempts = [attempt]
    reports = [
        AttemptReport(job=job, attempt=1, generation=2, ranks=(RankReport(rank=0, end=None),)),
        AttemptReport(
            job=job, attempt=1, generation=generation, ranks=(RankReport(rank=0, end=OK if ended else None),)
        ),
    ]
    assert len(reconcile(state, host, reports).orphans) == orphans


def test_a_rank_that_nobody_has(lab_with_two_hosts: Lab) -> None:
    """What an agent says must not end the daemon."""
    lab = lab_with_two_hosts
    job, _ = lab.submit()
    lab.run(job)
    which: dict[str, Any] = {"job": job, "attempt": 1, "generation": 1, "rank": 7}
    lab.tell(e.RankExited(**lab.at(), **which, host=HostId("a"), end=OK))
    lab.tell(e.RankOrphaned(**lab.at(), **which, step=3))
    lab.finish(job)
    assert lab.state(job) == "finished"
