"""Metrics of a job's steps, as its owner sees them."""

from __future__ import annotations

import json

import pytest

from tests.conftest import RunningCluster

JOB = """
kind = "elastic"
trials = false
command = ["python", "train.py", "--steps", "20", "--width", "16", "--depth", "1"]
resources = { devices = 1, plan = { dp = 1 } }
"""


@pytest.mark.slow
def test_the_newest_metrics_are_shown(local_cluster: RunningCluster) -> None:
    job = local_cluster.submit(JOB, "gpt")
    local_cluster.wait_for(job, lambda row: row["state"] == "finished")
    row = json.loads(local_cluster.run("show", job, "--output", "json").stdout)
    assert row["metrics"].keys() == {"lr", "grad_norm", "samples_per_s"}
    assert row["metrics"]["lr"] == 3e-4
    shown = local_cluster.run("show", job).stdout
    assert "  metrics    lr 0.0003, grad_norm " in shown
