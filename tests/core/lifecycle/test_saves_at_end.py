"""Jobs that end before their last step save first, within a bounded time, and another goes on from there."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.queueing.admission import find_checkpoint
from clusterd.errors import ClusterError, UsageError
from clusterd.types import AttemptReport, HostId, JobId, JobKind, JobSpec, RankEnd, RankReport, Reason
from tests.core.conftest import Lab

SHAPE: dict[str, Any] = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 1000}
STOPPED = RankReport(rank=0, end=RankEnd(reason=Reason.STOPPED, exit_code=0))


def training(**what: Any) -> tuple[Lab, JobId]:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(kind=JobKind.ELASTIC, **what)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE))
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=7, loss=None, step_time_s=1.0))
    return lab, job


def cancel(lab: Lab, job: JobId, now: bool = False) -> d.StopAttempt | None:
    return d.StopAttempt.match(lab.tell(e.JobCancelled(**lab.at(), job=job, by="ana", now=now)), job=job)


def resumed(lab: Lab, job: JobId, **what: Any) -> JobSpec:
    spec = JobSpec(name="more", kind=JobKind.ELASTIC, command=("train",), restore=job, **what)
    return find_checkpoint(lab.scheduler.state, spec, "ana", True)


def test_a_cancelled_job_saves_and_is_continued() -> None:
    lab, job = training()
    stop = cancel(lab, job)
    assert stop is not None and stop.save == "" and 60 < stop.grace_s < 120
    with pytest.raises(ClusterError, match="is stopping"):
        resumed(lab, job)
    lab.tell(e.CheckpointTaken(**lab.at(), job=job, attempt=1, step=1234, path="a:/attempts/checkpoint"))
    lab.stopped(job, STOPPED)
    assert lab.why(job) == "cancelled by ana: saved step 1,234"
    spec = resumed(lab, job, steps=2000)
    assert (spec.restore, spec.restore_step, spec.continues) == ("a:/attempts/checkpoint", 1234, job)
    lab.jobs += 1
    second = JobId(str(lab.jobs))
    lab.tell(e.JobSubmitted(**lab.at(), job=second, spec=spec))
    lab.tell(
        e.ModelDescribed(
            **lab.at(), job=second, shape={**lab.scheduler.state.jobs[job].inspection.shape, "steps": 2000}
        )
    )
    launch = d.LaunchAttempt.match(lab.decisions, job=second)
    assert launch is not None and launch.restore == "a:/attempts/checkpoint"
    with pytest.raises(UsageError, match="is a command: it saves nothing"):
        find_checkpoint(lab.scheduler.state, JobSpec(name="x", command=("x",), restore=job), "ana", True)


def test_a_time_limit_saves_to_the_shared_directory() -> None:
    lab, job = training(time_limit_s=7200.0, checkpoint_directory="/shared")
    stop = d.StopAttempt.match(lab.fire(Timer(TimerKind.LIMIT, job)), job=job)
    assert stop is not None and stop.save == f"/shared/job-{job}/stopped"
    failed = RankEnd(reason=Reason.EXIT, exit_code=1, message="the disk is full")
    lab.stopped(job, RankReport(rank=0, end=failed))
    assert lab.why(job) == "its time limit of 2h00m is over: not saved, exit code 1: the disk is full"
    with pytest.raises(ClusterError, match="has left no checkpoint: its time limit of 2h00m is over"):
        resumed(lab, job)


def test_a_job_on_two_hosts_saves_too_without_a_shared_directory() -> None:
    lab = Lab()
    for name in "ab":
        lab.host(name, gpus=1)
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=2)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE))
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=7, loss=None, step_time_s=1.0))
    stops = [x for x in lab.tell(e.JobCancelled(**lab.at(), job=job, by="ana")) if isinstance(x, d.StopAttempt)]
    assert {(stop.host, stop.save) for stop in stops} == {("a", ""), ("b", "")}


def test_a_job_that_goes_on_from_memory_saves_before_its_first_report() -> None:
    """Regression: a cancel some moments after a restart saved nothing, and the copies in memory went with the job."""
    lab, job = training()
    lab.exit(job, end=RankEnd(reason=Reason.SIGNAL, signal=9))
    lab.stopped(job)
    if (retry := Timer(TimerKind.RETRY, job)) in lab.scheduler.state.timers:
        lab.fire(retry)
    lab.run(job)
    assert (lab.attempt(job).number, lab.attempt(job).step) == (2, 0)
    stop = cancel(lab, job)
    assert stop is not None and stop.save == ""


@pytest.mark.parametrize("pauses", [False, True])
def test_a_host_that_missed_the_stop_hears_the_same_again(pauses: bool) -> None:
    """Regression: a cancel just after a restart of the daemon, before its hosts were back, had ranks end at once."""
    lab, job = training()
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="the daemon stopped"))
    asked = e.JobRequeued(**lab.at(), job=job, by="ana", hold=True) if pauses else None
    first = d.StopAttempt.match(lab.tell(asked), job=job) if asked is not None else cancel(lab, job)
    assert first is not None and first.save == "" and first.keep == pauses
    there = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=None),))
    again = d.StopAttempt.match(lab.connect("a", there), job=job)
    assert again is not None
    assert (again.save, again.keep, again.grace_s) == (first.save, first.keep, first.grace_s)
    cancel(lab, job, now=True)
    again = d.StopAttempt.match(lab.connect("a", there), job=job)
    assert again is not None and (again.save, again.keep, again.grace_s) == (None, False, 0.0)


def test_a_paused_job_is_saved_too() -> None:
    """Regression: its state was in host memory alone, and went with the host, or with a cancel."""
    lab, job = training()
    stop = d.StopAttempt.match(lab.tell(e.JobRequeued(**lab.at(), job=job, by="ana", hold=True)), job=job)
    assert stop is not None and stop.keep and stop.save == "" and stop.grace_s > 60
    lab.tell(e.CheckpointTaken(**lab.at(), job=job, attempt=1, step=8, path="a:/attempts/checkpoint"))
    lab.stopped(job, STOPPED)
    requeued = d.RequeueJob.match(lab.decisions, job=job)
    assert requeued is not None and requeued.reason.startswith("queued again by ana: saved step 8; ")
    cancel(lab, job)
    assert lab.why(job) == "cancelled by ana: saved step 8"
    assert resumed(lab, job, steps=2000).restore_step == 8


@pytest.mark.parametrize("state", ["queued", "starting"])
def test_what_is_lost_with_a_job_that_does_not_train_is_told(state: str) -> None:
    """Regression: a job that waited, or started again, was "cancelled", and its steps went in silence."""
    lab, job = training()
    lab.exit(job, end=RankEnd(reason=Reason.SIGNAL, signal=9))
    if state == "queued":
        lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), why="a fan"))
    lab.stopped(job)
    assert lab.state(job) == state
    cancel(lab, job)
    if state == "starting":
        lab.stopped(job, STOPPED)
    assert lab.why(job) == "cancelled by ana: not saved"


def test_a_job_that_has_made_no_step_saves_nothing() -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(kind=JobKind.ELASTIC)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE))
    lab.run(job)
    stop = cancel(lab, job)
    assert stop is not None and stop.save is None
    lab.stopped(job, STOPPED)
    assert lab.why(job) == "cancelled by ana"


def test_a_second_cancel_or_now_does_not_wait() -> None:
    lab, job = training()
    assert (first := cancel(lab, job)) is not None and first.grace_s > 60
    assert (second := cancel(lab, job)) is not None and second.grace_s == 0
    lab.stopped(job, STOPPED)
    assert lab.why(job).endswith(": not saved")
    lab, job = training()
    assert (stop := cancel(lab, job, now=True)) is not None and (stop.grace_s, stop.save) == (0, None)


def test_a_shell_that_ended_is_finished_and_gives_what_is_left_of_it_the_usual_time() -> None:
    """A result is not waited for."""
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(grace_s=30.0)
    lab.run(job)
    over = e.JobCancelled(**lab.at(), job=job, by="ana", why="its shell ended", is_over=True)
    stop = d.StopAttempt.match(lab.tell(over), job=job)
    assert stop is not None and (stop.grace_s, stop.done) == (30.0, False)
    lab.stopped(job, STOPPED)
    assert (lab.state(job), lab.why(job)) == ("finished", "its shell ended")
