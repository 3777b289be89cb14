"""Reports of a connecting agent against the scheduler's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.lifecycle.reconcile import reconcile
from clusterd.core.state import Attempt, Former, Rank
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
    attempt.former[1] = Former(None, {0: host.id})
    state.jobs[job].attempts = [attempt]
    reports = [
        AttemptReport(job=job, attempt=1, generation=2, ranks=(RankReport(rank=0, end=None),)),
        AttemptReport(
            job=job, attempt=1, generation=generation, ranks=(RankReport(rank=0, end=OK if ended else None),)
        ),
    ]
    assert len(reconcile(state, host, "", reports).orphans) == orphans


def test_what_is_over_is_not_ended_again(lab: Lab) -> None:
    """A thousand finished jobs kept a host from work for seconds at each of its returns."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.finish(job)
    report = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=OK),))
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    assert d.StopAttempt.match(lab.connect("a", report), job=job) is None
    assert lab.scheduler.state.hosts[HostId("a")].unusable is None


def test_what_was_given_up_is_ended_once(lab: Lab) -> None:
    """The host could not confirm that no process was left, though the ranks ended meanwhile."""
    (report,) = left_behind(lab, 1)
    over = replace(report, ranks=(RankReport(rank=0, end=OK),))
    assert d.StopAttempt.match(lab.connect("a", over), job=report.job, attempt=1) is not None
    what: dict[str, Any] = {"job": report.job, "attempt": 1, "generation": 1, "host": HostId("a")}
    lab.tell(e.AttemptStopped(**lab.at(), **what))
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    assert d.StopAttempt.match(lab.connect("a", over), job=report.job, attempt=1) is None


def test_a_rank_that_nobody_has(lab_with_two_hosts: Lab) -> None:
    """A report about an unknown rank must not stop the daemon."""
    lab = lab_with_two_hosts
    job, _ = lab.submit()
    lab.run(job)
    which: dict[str, Any] = {"job": job, "attempt": 1, "generation": 1, "rank": 7}
    lab.tell(e.RankExited(**lab.at(), **which, host=HostId("a"), end=OK))
    lab.tell(e.RankOrphaned(**lab.at(), **which, step=3))
    lab.finish(job)
    assert lab.state(job) == "finished"


def left_behind(lab: Lab, *generations: int) -> list[AttemptReport]:
    """A job runs on the only GPU of host a, which is given up; what its agent has when it is back."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    ranks = (RankReport(rank=0, end=None),)
    return [AttemptReport(job=job, attempt=1, generation=generation, ranks=ranks) for generation in generations]


def test_a_host_is_clean_when_every_generation_that_was_found_there_is_gone(lab: Lab) -> None:
    """With the first of two gone its device was given away, which the other still used."""
    reports = left_behind(lab, 1, 2)
    lab.connect("a", *reports)
    job = reports[0].job
    for generation, state in ((1, "queued"), (2, "starting")):
        what: dict[str, Any] = {"job": job, "attempt": 1, "generation": generation, "host": HostId("a")}
        lab.tell(e.AttemptStopped(**lab.at(), **what))
        assert lab.state(job) == state


def test_what_was_found_and_is_not_there_any_more_is_not_waited_for(lab: Lab) -> None:
    """The host rebooted before it could say that it had stopped it: it was never used again."""
    reports = left_behind(lab, 1)
    lab.connect("a", *reports)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    lab.connect("a")
    assert lab.state(reports[0].job) == "starting", lab.why(reports[0].job)
