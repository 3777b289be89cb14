"""Requests of a job at its submission: when it may begin, where not, a signal before its limit, to be held."""

from __future__ import annotations

import signal

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import JobState
from tests.core.conftest import Lab


def started(decided: list[d.Decision]) -> list[str]:
    return [each.job for each in decided if isinstance(each, d.LaunchAttempt)]


@pytest.mark.parametrize("set_by_s", [0.0, 600.0, -600.0])
def test_a_job_does_not_start_before_the_time_that_it_gives(lab: Lab, set_by_s: float) -> None:
    lab.host("a", gpus=1)
    job, decided = lab.submit(begin_s=2000.0)
    other, ours = lab.submit("other")
    assert (started(decided), started(ours)) == ([], [other])
    if set_by_s:  # it is a time of the wall clock, which somebody has corrected
        lab.now_s += set_by_s
        lab.tell(e.ClockSet(**lab.at(), by_s=set_by_s))
    lab.run(other)
    assert started(lab.finish(other)) == []
    assert lab.why(job) == "waits for the time at which it is to begin"
    assert started(lab.fire(Timer(TimerKind.RETRY, job))) == [job]
    assert lab.now_s == pytest.approx(2001.0)


def test_a_held_job_starts_once_it_is_released(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, decided = lab.submit(hold=True, user="ann")
    assert (started(decided), lab.why(job)) == ([], f"held by ann: clusterd release {job} lets it start")
    assert started(lab.tell(e.JobReleased(**lab.at(), job=job))) == [job]


def test_a_job_is_signalled_before_its_time_limit(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=3600.0, limit_signal="B:USR1@2m")
    lab.run(job)
    begun_s = lab.attempt(job).started_s
    (sent,) = lab.fire(Timer(TimerKind.SIGNAL, job))
    assert isinstance(sent, d.SignalRanks)
    assert (sent.number, sent.first_only, sent.hosts) == (signal.SIGUSR1, True, ("a",))
    assert lab.now_s - begun_s == pytest.approx(3480.0, abs=2.0)
    assert lab.scheduler.state.jobs[job].state is JobState.RUNNING
    lab.exit(job)
    assert not [timer for timer in lab.scheduler.state.timers if timer.about == job]


def test_an_excluded_host_is_not_used(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=1)
    job, _ = lab.submit(devices=1, exclude=("b",))
    assert lab.attempt(job).hosts == {"a": "a"} or list(lab.attempt(job).hosts) == ["a"]
    wide, _ = lab.submit("wide", devices=2, exclude=("a",))
    assert lab.why(wide) == "asks for 2 devices, its hosts (all but a) have 1 GPUs and 0 CPU devices"
