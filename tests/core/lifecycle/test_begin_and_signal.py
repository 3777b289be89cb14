"""Requests of a job at its submission: when it may begin, where not, a signal before its limit, to be held."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.requested_migration import requested
from clusterd.core.events import Timer, TimerKind
from clusterd.core.view import Refusal, View
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobState
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


def test_a_signal_that_is_edited_counts_while_the_job_runs(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=3600.0)
    lab.run(job)
    known = lab.scheduler.state.jobs[job]
    lab.tell(e.JobEdited(**lab.at(), job=job, what="", spec=replace(known.spec, limit_signal="TERM@10m")))
    assert lab.scheduler.state.timers[Timer(TimerKind.SIGNAL, job)] == lab.attempt(job).started_s + 3000.0


def test_a_signal_that_was_sent_is_not_sent_again_before_the_same_end(lab: Lab) -> None:
    """Regression: an edit after it sent it once more, at once."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=3600.0, limit_signal="USR1@10m")
    lab.run(job)
    timer = Timer(TimerKind.SIGNAL, job)
    lab.fire(timer)
    for limit_s, again in ((3500.0, False), (9000.0, True)):
        known = lab.scheduler.state.jobs[job]
        lab.tell(e.JobEdited(**lab.at(), job=job, what="", spec=replace(known.spec, time_limit_s=limit_s)))
        assert (timer in lab.scheduler.state.timers) == again
    assert lab.scheduler.state.timers[timer] == lab.attempt(job).started_s + 8400.0


@pytest.mark.parametrize(
    ("asked", "cores"), [({"tasks": 8}, 8), ({"tasks": 8, "cpus": 2}, 2), ({"tasks": 4, "nodes": 2}, 2)]
)
def test_each_task_has_a_core_unless_the_job_says_how_many(lab: Lab, asked: dict[str, int], cores: int) -> None:
    """Regression: eight processes of a command had one core, and eight of a batch script had eight."""
    for host in ("a", "b"):
        lab.host(host, gpus=1, cores=16)
    job, _ = lab.submit(devices=0, **asked)
    assert lab.attempt(job).booked.cores == dict.fromkeys(lab.attempt(job).hosts, cores)


def test_the_reason_follows_the_state_of_a_host_without_facts(lab: Lab) -> None:
    """Regression: answers about hosts are kept from pass to pass, and this one is about more than their facts."""
    lab.tell(e.HostAdded(**lab.at(), host=HostId("a")))
    job, _ = lab.submit(waits_for_hosts=True)
    assert lab.why(job) == "waits for a host: a is connecting"
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    assert lab.why(job) == "waits for a host: a is lost"


def test_a_command_is_not_moved_and_the_reason_is_that(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit("tool")
    lab.run(job)
    known = lab.scheduler.state.jobs[job]
    answer = requested(known, View(lab.scheduler.state, lab.now_s), Plan(dp=1), (), "ann")
    assert isinstance(answer, Refusal)
    assert answer.reason == "tool is a command: only elastic and checkpointable jobs are moved"
