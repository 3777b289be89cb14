"""Losses that are not numbers: reported once, or the end of a job that asked for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import JobId, JobState, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running


def report(lab: Lab, job: JobId, step: int, loss: float | None, is_nan: bool | None = None) -> list[d.Decision]:
    attempt = lab.attempt(job)
    fields = {"job": job, "attempt": attempt.number, "step": step, "loss": loss, "step_time_s": 0.1, "is_nan": is_nan}
    return lab.tell(e.AttemptProgressed(**lab.at(), **fields))


@pytest.mark.parametrize("stops", [False, True])
def test_a_loss_that_is_not_a_number_is_reported_once_or_ends_the_job(lab: Lab, stops: bool) -> None:
    lab.host("a", gpus=1)
    job = running(lab, devices=1)
    known = lab.scheduler.state.jobs[job]
    known.spec = replace(known.spec, stops_on_nan=stops)
    report(lab, job, 10, 2.5)
    first = report(lab, job, 20, None)
    if not stops:
        (said,) = [decision for decision in first if isinstance(decision, d.HoldJob)]
        assert said.reason == "its loss is not a number by step 20"
        assert not any(isinstance(each, d.HoldJob) for each in report(lab, job, 30, None))
        report(lab, job, 40, 2.0)
        assert any(isinstance(each, d.HoldJob) for each in report(lab, job, 50, None))
        return
    lab.exit(job, end=RankEnd(reason=Reason.STOPPED, exit_code=0))
    lab.stopped(job)
    assert known.state is JobState.FAILED
    assert "its loss is not a number by step 20" in known.reason
    assert known.exit_code == 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_loss_that_is_not_a_number_from_the_start_is_one_too(lab: Lab, stops: bool) -> None:
    """Such a job trained to its last step, and finished."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(devices=1)
    lab.run(job)
    lab.scheduler.state.jobs[job].spec = replace(lab.scheduler.state.jobs[job].spec, stops_on_nan=stops)
    first = report(lab, job, 1, None, is_nan=True)
    kind = d.StopAttempt if stops else d.HoldJob
    assert any(isinstance(each, kind) for each in first)


def test_a_loss_that_no_rank_could_tell_is_no_such_loss(lab: Lab) -> None:
    """The rank of the last stage was killed before it reported it."""
    lab.host("a", gpus=1)
    job = running(lab, devices=1)
    report(lab, job, 10, 2.5, is_nan=False)
    assert not any(isinstance(each, d.HoldJob) for each in report(lab, job, 11, None, is_nan=False))


def test_a_job_that_reports_no_loss_at_all_is_left_alone(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(devices=1)
    lab.run(job)
    for step in (10, 20):
        assert not any(isinstance(each, d.HoldJob) for each in report(lab, job, step, None))


@pytest.mark.parametrize(("number", "state"), [(9, JobState.RUNNING), (11, JobState.FAILED)])
def test_an_elastic_job_whose_only_rank_is_killed_goes_on(lab: Lab, number: int, state: JobState) -> None:
    """Neither its script nor clusterd sent the signal; a crash in the script's own code fails the job."""
    lab.host("a", gpus=1)
    job = running(lab, devices=1)
    lab.exit(job, end=RankEnd(reason=Reason.SIGNAL, signal=number))
    lab.stopped(job)
    known = lab.scheduler.state.jobs[job]
    assert known.state is state or (state is JobState.RUNNING and known.state in (JobState.QUEUED, JobState.STARTING))
