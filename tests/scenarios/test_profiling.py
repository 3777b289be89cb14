"""Trials of other plans while a job trains, and the predictions based on them."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch

from tests.conftest import GPT, RunningCluster

JOB = """
kind = "elastic"
command = ["python", "train.py", "--steps", "1500"]
resources = { devices = 2 }
"""


@pytest.mark.slow
def test_a_job_is_profiled_while_it_trains(local_cluster: RunningCluster) -> None:
    """Trials are live migrations: no step is lost, and `profile`, `plans` and the store show the measurements."""
    job = local_cluster.submit(JOB, "gpt")
    row = local_cluster.wait_for(job, lambda row: len(row["migrations"]) >= 3)
    profile = local_cluster.call("profile", job=job)
    measured = [line for line in profile["lines"] if line["measured_s"]]
    assert len(measured) >= 2
    timed = [line for line in measured if line["phases"]]
    assert timed and all("backward" in line["spent"] or "pipeline" in line["spent"] for line in timed)
    assert all(line["measured_s"] > 0 and line["lower_s"] < line["upper_s"] for line in profile["lines"])
    assert any(c["learned"] != "0%" for c in profile["coefficients"])
    assert {point["devices"] for point in profile["curve"]} >= {1}

    plans = local_cluster.call("plans", job=job, devices=2)
    can = [p for p in plans["rows"] if p["fits"]]
    assert [p["step_time_s"] for p in can] == sorted(p["step_time_s"] for p in can)
    assert all(p["why"] for p in plans["rows"] if not p["fits"])
    assert any(p["measured_s"] for p in can)

    data = local_cluster.call("steps", job=job)["data"]
    steps = [line["step"] for line in map(json.loads, data.splitlines()) if "step" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert row["state"] == "running"

    file = local_cluster.directory / "measured.csv"
    local_cluster.call("cancel", job=job)
    assert "measurements written to" in local_cluster.run("measurements", "export", str(file)).stderr
    assert local_cluster.run("measurements", "import", str(file)).stderr == "0 measurements were new\n"
    with file.open(newline="") as lines:
        assert {row["environment"].partition(" ")[0] for row in csv.DictReader(lines)} == {"torch"}


@pytest.mark.slow
def test_a_model_that_begins_at_three_hosts_is_learned_there(cluster: RunningCluster) -> None:
    """All trials are on the three devices without which the job may not run; its plans are ranked by the results."""
    cluster.start(hosts=3, devices=1)
    job = cluster.submit(JOB.replace("devices = 2", "devices = 3, min_devices = 3"), "wide")
    cluster.wait_for(job, lambda row: len(row["migrations"]) >= 3)
    plans = cluster.call("plans", job=job, devices=3)
    assert len([p for p in plans["rows"] if p["measured_s"]]) >= 2
    assert {len(move["devices"]) for move in cluster.job(job)["migrations"]} == {3}


@pytest.mark.slow
def test_an_estimate_needs_no_submission(local_cluster: RunningCluster) -> None:
    """A job file gets an estimate before anything runs, with wide bounds."""
    file = local_cluster.directory / "wide.toml"
    file.write_text(f'name = "wide"\nworkdir = "{GPT}"\npython = "{sys.executable}"\n{JOB}')
    answer = json.loads(local_cluster.run("estimate", str(file), "-o", "json").stdout)
    assert answer["parameters"] > 100_000 and answer["steps"] == 1500
    best = next(row for row in answer["rows"] if row["fits"])
    assert best["lower_s"] < best["step_time_s"] < best["upper_s"]
    assert "nothing is measured" in answer["known"]
    assert local_cluster.call("jobs", all=True) == []


@pytest.mark.slow
def test_a_job_ends_at_its_target_loss(local_cluster: RunningCluster) -> None:
    """The job finishes with exit code 0 long before its last step."""
    text = JOB.replace('"1500"', '"100000", "--save", "gpt.pt"').replace(
        "resources", "trials = false\ntarget_loss = 4.5\nresources"
    )
    job = local_cluster.submit(text, "target")
    row = local_cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    assert (row["state"], row["exit_code"]) == ("finished", 0)
    assert "its loss reached 4.5" in row["reason"]
    assert row["step"] < 100000
    local_cluster.run("get", "target", "gpt.pt", "--to", str(local_cluster.directory / "back"))
    assert "head.out.weight" in torch.load(local_cluster.directory / "back/gpt.pt", weights_only=True)
