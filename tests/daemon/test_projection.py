"""Rows of a job's hosts and devices for display."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from clusterd import protocol
from clusterd.cli.jobs import why
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.projection import job_row
from clusterd.rows import pack, plain
from clusterd.tui.model import columns, rows
from clusterd.types import HostId
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def lab_with_a_job_that_runs() -> tuple[Lab, str]:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    return lab, job


def lose(lab: Lab, host: str) -> float:
    """The cable is pulled; when that was."""
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId(host), why="the cable"))
    return lab.now_s


def test_a_job_on_an_unreachable_host_says_since_when_and_until_when() -> None:
    """Regression: the job was shown as running, with a step that did not advance and no time limit."""
    lab, job = lab_with_a_job_that_runs()
    since_s = lose(lab, "a")
    row = job_row(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert row.reason == (
        f"a is unreachable since {clock(since_s)} (the cable): its ranks there are presumed to go on; "
        f"if that lasts until {clock(since_s + 120)}, the job goes on without them"
    )
    assert row.away == ("a",)
    lab.connect("a")
    assert job_row(lab.scheduler.state.jobs[job], lab.scheduler.state).away == ()


def test_a_stop_that_waits_for_an_unreachable_host_says_until_when() -> None:
    lab, job = lab_with_a_job_that_runs()
    since_s = lose(lab, "a")
    lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    row = job_row(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert row.reason == (
        f"a is unreachable since {clock(since_s)} (the cable): whether its ranks there have ended is not known; "
        f"if that lasts until {clock(since_s + 120)}, it is over without an answer; cancelled by ann"
    )


def test_the_queue_shows_a_job_on_an_unreachable_host_as_silent() -> None:
    lab, job = lab_with_a_job_that_runs()
    state = lab.scheduler.state
    assert rows.read(rows.Job, plain(job_row(state.jobs[job], state))).shown_state == "running"
    lose(lab, "a")
    silent = rows.read(rows.Job, plain(job_row(state.jobs[job], state)))
    assert columns.job_fields(silent)["state"] == "silent"


def test_a_job_that_outlives_a_lost_host_says_that_it_goes_on() -> None:
    """Regression: the ranks on the lost host were shown as presumed running, while the job went on without them."""
    lab = Lab()
    for host in "abc":
        lab.host(host, gpus=2)
    job = running(lab, devices=4)
    lab.attempt(job).plan = Plan(dp=4)
    lose(lab, "b")
    lab.fire(Timer(TimerKind.HOST_LOST, "b"))
    row = job_row(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert row.state == "running"
    assert row.reason == (
        f"b is lost since {clock(lab.now_s)} (the cable): the job goes on without it; "
        "b is lost (the cable); ranks on a are asked for their state"
    )


def test_plans_under_which_a_job_cannot_train_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler left them out, and nobody could see why."""
    lab, job = lab_with_a_job_that_runs()
    known = lab.scheduler.state.jobs[job]
    known.failures.reject_plan(Plan(tp=2), "exit code 96: the forward pass writes into blocks.0.weight")
    row = job_row(known, lab.scheduler.state)
    assert row.refused == {"tp=2": "exit code 96: the forward pass writes into blocks.0.weight"}
    answer = plain(row) | {"ahead": [], "holders": {}, "unusable": [], "decisions": []}
    monkeypatch.setattr("clusterd.cli.jobs.Client", lambda: contextlib.nullcontext(Mock(call=lambda *_, **__: answer)))
    message = CliRunner().invoke(why, [job]).output.splitlines()
    assert message[1] == "  it cannot train under tp=2: exit code 96: the forward pass writes into blocks.0.weight"


@pytest.mark.parametrize("comment", ["", "of the thesis", "a path \udcff"])
def test_rows_are_sent_as_their_maps_would_be(comment: str) -> None:
    """The quick way and the one for text that is no UTF-8 send the same."""
    lab, job = lab_with_a_job_that_runs()
    row = replace(job_row(lab.scheduler.state.jobs[job], lab.scheduler.state), comment=comment)
    assert protocol.decode(pack(row)) == protocol.decode(protocol.pack(plain(row)))
    assert "place" not in plain(row), "null would say that it has none"
