"""Losses that are not numbers: reported once, or the end of a job that asked for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import JobId, JobState, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running


def report(lab: Lab, job: JobId, step: int, loss: float | None) -> list[d.Decision]:
    attempt = lab.attempt(job)
    fields = {"job": job, "attempt": attempt.number, "step": step, "loss": loss, "step_time_s": 0.1}
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


def test_a_job_that_reports_no_loss_at_all_is_left_alone(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(devices=1)
    lab.run(job)
    for step in (10, 20):
        assert not any(isinstance(each, d.HoldJob) for each in report(lab, job, step, None))
