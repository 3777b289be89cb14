"""The head node's wall clock is set, forward or back, while jobs run and wait."""

from __future__ import annotations

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import RankEnd, Reason
from tests.core.conftest import Lab

HOUR_S = 3600.0


def set_clock(lab: Lab, by_s: float) -> None:
    lab.now_s += by_s
    lab.tell(e.ClockSet(**lab.at(), by_s=by_s))


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_time_limit_is_of_time_that_passed(lab: Lab, by_s: float) -> None:
    """With NTP's first word after a boot, a job of twenty seconds had run for an hour."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=1800.0)
    lab.run(job)
    timer, began_s = Timer(TimerKind.LIMIT, job), lab.now_s
    due_s = lab.scheduler.state.timers[timer]
    set_clock(lab, by_s)
    assert not d.StopAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=job), "posted by the old clock"
    assert lab.scheduler.state.timers[timer] == due_s + by_s
    assert lab.scheduler.state.jobs[job].started_s == pytest.approx(began_s + by_s, abs=10.0)
    lab.now_s = due_s + by_s
    assert d.StopAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=job)


def test_a_retry_comes_when_it_was_due(lab: Lab) -> None:
    """The clock went back by an hour: so long nothing was tried again."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(retries=3)
    for _ in range(2):  # the first is at once
        lab.run(job)
        lab.exit(job, end=RankEnd(reason=Reason.EXIT, exit_code=3))
        lab.stopped(job)
    timer = Timer(TimerKind.RETRY, job)
    left_s = lab.scheduler.state.timers[timer] - lab.now_s
    set_clock(lab, -HOUR_S)
    lab.now_s += left_s
    assert d.LaunchAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=job)
