"""Remaining time of a job, in `ls` and of the jobs that a job waits for."""

from __future__ import annotations

from typing import Any, Self

import pytest
from click.testing import CliRunner

from clusterd.cli import jobs
from clusterd.projection import job_row
from clusterd.rows import plain
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import progress, running


class Answers:
    """A daemon with these words for each verb."""

    answers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def call(self, verb: str, **_arguments: Any) -> Any:
        return self.answers[verb]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The row of a job that has made 40 of its steps."""
    lab = Lab()
    lab.host("a", gpus=4)
    job = running(lab, devices=4)
    progress(lab, job, 40)
    known = lab.scheduler.state.jobs[job]
    row: dict[str, Any] = plain(job_row(known, lab.scheduler.state))
    assert row["left_s"] == pytest.approx((row["steps"] - 40) * known.progress.step_time_s)
    monkeypatch.setattr(jobs, "Client", Answers)
    return row


def test_a_running_job_says_how_long_it_will_take(trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    left = {**trained, "left_s": 754.0}
    waiting = {**trained, "id": "2", "name": "next", "state": "queued", "left_s": 3600.0}
    monkeypatch.setattr(Answers, "answers", {"jobs": [left, waiting]})
    heading, first, second = CliRunner().invoke(jobs.ls, [], catch_exceptions=False).output.splitlines()
    assert "LEFT" in heading and "12m34s" in first
    assert "1h00m" not in second, "nobody knows when it starts"


def test_who_waits_is_told_when_devices_come_free(trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"holders": {"big": 4, "black-box": 1}, "holders_left_s": {"big": 120.0}}
    answer = {**trained, "state": "queued", "ahead": [], "unusable": [], "decisions": [], **held}
    monkeypatch.setattr(Answers, "answers", {"why": answer})
    output = CliRunner().invoke(jobs.why, ["1"], catch_exceptions=False).output
    assert "big holds 4 devices, for about 2m00s more" in output
    assert "black-box holds 1 device\n" in output
