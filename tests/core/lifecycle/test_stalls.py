"""Jobs that make no progress although all their ranks run."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import HostId, JobId, JobKind, JobState
from tests.core.conftest import Lab


def training(stall_s: float | None = 600.0) -> tuple[Lab, JobId]:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(kind=JobKind.ELASTIC, stall_s=stall_s)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 1000}
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=shape))
    lab.run(job)
    step(lab, job, 1)
    return lab, job


def step(lab: Lab, job: JobId, number: int, step_time_s: float = 1.0) -> None:
    attempt = lab.attempt(job).number
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=attempt, step=number, loss=None, step_time_s=step_time_s))


def fire(lab: Lab, job: JobId, kind: str = "stall") -> list[d.Decision]:
    """The clock goes on to the job's timer."""
    timer = Timer(TimerKind(kind), job)
    lab.now_s = lab.scheduler.state.timers[timer]
    return lab.tell(e.TimerFired(**lab.at(), timer=timer))


def test_a_job_without_a_step_for_too_long_starts_again() -> None:
    lab, job = training()
    stop = d.StopAttempt.match(fire(lab, job), job=job)
    assert stop is not None and "no step for 10m" in stop.reason and "after step 1" in stop.reason
    decided = lab.stopped(job)
    again = d.LaunchAttempt.match(lab.decisions, job=job, attempt=2)
    assert again is not None, decided
    lab.run(job)
    step(lab, job, 2)
    assert Timer(TimerKind.STALL, job) in lab.scheduler.state.timers, "it is watched again"


def test_steps_are_what_counts() -> None:
    """One timer for many steps; slow ones may take their time."""
    lab, job = training()
    lab.now_s += 500
    step(lab, job, 2)
    assert d.StopAttempt.match(fire(lab, job)) is None
    step(lab, job, 3, step_time_s=100.0)
    last_s = lab.now_s
    while d.StopAttempt.match(fire(lab, job)) is None:
        assert lab.now_s < last_s + 3000
    assert lab.now_s - last_s >= 2000


def test_the_first_step_of_an_attempt_is_waited_for_as_long() -> None:
    """Covers hangs while reading data or at the rendezvous; a job that never makes a step fails with the reason."""
    lab, job = training()
    fire(lab, job)
    lab.stopped(job)
    for _ in range(20):
        if lab.scheduler.state.jobs[job].state is JobState.FAILED:
            break
        lab.run(job)
        stop = d.StopAttempt.match(fire(lab, job), job=job)
        assert stop is not None and "since it was launched" in stop.reason
        lab.stopped(job)
        if Timer(TimerKind.RETRY, job) in lab.scheduler.state.timers:
            fire(lab, job, "retry")
    assert "without a step" in lab.scheduler.state.jobs[job].reason


def test_a_start_may_take_minutes_whatever_the_limit() -> None:
    """Regression: imports and comparisons of plans took longer than a short limit, and the job failed as lost."""
    lab, job = training(stall_s=5.0)
    launched_s = lab.now_s
    assert d.StopAttempt.match(fire(lab, job), job=job) is not None and lab.now_s < launched_s + 30.0
    lab.stopped(job)
    lab.run(job)
    launched_s = lab.now_s
    while d.StopAttempt.match(fire(lab, job), job=job) is None:
        assert lab.now_s < launched_s + 400.0
    assert lab.now_s >= launched_s + 290.0


def test_a_host_that_cannot_be_heard_is_no_proof() -> None:
    lab, job = training()
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="timeout"))
    assert d.StopAttempt.match(fire(lab, job)) is None
    assert Timer(TimerKind.STALL, job) in lab.scheduler.state.timers


def test_nobody_is_watched_who_did_not_ask() -> None:
    lab, job = training(stall_s=None)
    assert Timer(TimerKind.STALL, job) not in lab.scheduler.state.timers


def test_a_job_that_is_over_is_not_watched() -> None:
    lab, job = training()
    lab.finish(job)
    assert lab.scheduler.state.jobs[job].state is JobState.FINISHED
    assert Timer(TimerKind.STALL, job) not in lab.scheduler.state.timers
