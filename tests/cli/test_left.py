"""Remaining time of a job, in `ls` and of the jobs that a job waits for."""

from __future__ import annotations

import re
import time
from typing import Any, Self

import pytest
from click.testing import CliRunner

from clusterd.cli import jobs
from clusterd.cli.common.output import quantiles_cell
from clusterd.projection import job_row
from clusterd.rows import plain
from tests.conftest import RunningCluster
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
    monkeypatch.setattr(Answers, "answers", {"jobs": [left, waiting], "status": {}, "hello": {"user": left["user"]}})
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


def test_a_time_limit_says_how_long_yet(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    command = ("--no-snapshot", "--", "sleep", "1000")
    job = cluster.run("run", "-d", "--name", "limited", "--time", "30m", *command).stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    heading, line = cluster.run("ls", job).stdout.splitlines()
    assert "ELAPSED" in heading and re.search(r"<(30m00s|29m\d\ds) ", line)
    shown = cluster.run("show", job).stdout
    assert "time limit 30m00s" in shown and re.search(r"elapsed +\S+, <\S+ left", shown)
    assert re.search(r"has run for \S+, ends in <\S+", cluster.run("why", job).stdout)

    cores = max(host["cpu_cores"] for host in cluster.call("hosts"))
    waits = cluster.run("run", "-d", "--name", "waits", "--cpus", str(cores), *command).stdout.strip()
    also = cluster.run("run", "-d", "--name", "also", "--cpus", str(cores), *command).stdout.strip()
    third = cluster.run("run", "-d", "--name", "third", "--cpus", str(cores), *command).stdout.strip()
    cluster.wait_for(third, lambda row: row["reason"])
    assert re.search(r"limited holds 1 CPU core, for at most \S+ more", cluster.run("why", third).stdout)
    cluster.run("cancel", waits, also, third)

    host = cluster.job(job)["hosts"][0]
    cluster.run("host", "drain", host, "--why", "a new disk")
    assert "drained (by " in (listed := cluster.run("host", "ls").stdout) and ": a new disk" in listed
    why = cluster.wait_for(job, lambda row: "drained" in row["reason"])["reason"]
    assert ": a new disk): it stays there until its end" in why
    cluster.run("host", "undrain", host)
    row = cluster.job(job)
    assert row["reason"] in [one["reason"] for one in row["decisions"] if one["kind"] == "LaunchAttempt"]


def test_a_command_without_devices_says_how_many_cores_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    lab.host("a", gpus=0, cores=4)
    ids = [lab.submit(name, devices=0, cpus=cpus)[0] for name, cpus in (("first", 2), ("wide", 4), ("last", 1))]
    state = lab.scheduler.state
    rows = [plain(job_row(state.jobs[job], state)) for job in ids]
    monkeypatch.setattr(jobs, "Client", Answers)
    monkeypatch.setattr(Answers, "answers", {"jobs": rows, "status": {}, "hello": {"user": rows[0]["user"]}})
    _, first, wide, last = CliRunner().invoke(jobs.ls, [], catch_exceptions=False).output.splitlines()
    assert "a (2 cores)" in first and "(4 cores)" in wide and "(1 core)" in last
    assert "the free CPU cores are reserved for wide, which comes first" in last


@pytest.mark.parametrize(("width", "left_out"), [(200, ()), (96, ("AGE",)), (80, ("LOSS", "AGE", "ELAPSED"))])
def test_a_narrow_terminal_leaves_out_columns(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch, width: int, left_out: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Answers, "answers", {"jobs": [trained], "status": {}, "hello": {"user": trained["user"]}})
    monkeypatch.setattr("clusterd.cli.common.output._terminal_width", lambda: width)
    heading, line = CliRunner().invoke(jobs.ls, [], catch_exceptions=False).output.splitlines()
    every = ("ID", "NAME", "STATE", "PLAN", "DEVICES", "STEP", "LEFT", "LOSS", "ELAPSED", "AGE", "REASON")
    assert heading.split() == [column for column in every if column not in left_out]
    assert len(line) <= width and trained["reason"][:10] in line


def test_jobs_of_one_name_are_told_apart(shared_cluster: RunningCluster) -> None:
    """Regression: three jobs of a name were one that held three devices, until the last of them ends."""
    limits = ("5m", "50m", "5h")
    command = ("run", "-d", "--no-snapshot", "--name", "same", "--devices", "1")
    jobs = [shared_cluster.run(*command, "--time", limit, "--", "sleep", "1000").stdout.strip() for limit in limits]
    for job in jobs:
        shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    wide = ("run", "-d", "--no-snapshot", "--name", "wide", "--nodes", "2", "--devices-per-node", "2", "--", "true")
    waiting = shared_cluster.run(*wide).stdout.strip()
    shared_cluster.wait_for(waiting, lambda row: "waits for" in row["reason"])
    told = shared_cluster.run("why", waiting).stdout
    for job, limit in zip(jobs, (r"4m\d+s|5m", r"49m\d+s|50m", r"4h\d+m|5h"), strict=True):
        assert re.search(rf"same \({job}\) holds 1 device, for at most ({limit})", told), told
    assert "when 3 jobs same end" in told


def test_what_comes_within_minutes_is_told_to_the_second() -> None:
    """Regression: `when` told start and end of a job of seconds as 20:43 (20:43-20:43)."""
    now_s = time.time()
    soon = quantiles_cell({"p5_s": now_s + 1.0, "p50_s": now_s + 2.0, "p95_s": None})
    assert re.fullmatch(r"(\d\d-\d\d )?\d\d:\d\d:\d\d \((\d\d-\d\d )?\d\d:\d\d:\d\d-\)", soon)
    later = quantiles_cell({"p5_s": now_s, "p50_s": now_s + 7200.0, "p95_s": None})
    assert re.fullmatch(r"(\d\d-\d\d )?\d\d:\d\d \((\d\d-\d\d )?\d\d:\d\d-\)", later)
