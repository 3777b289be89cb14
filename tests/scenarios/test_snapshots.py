"""A whole host dies: the job goes on from replicas, else from the snapshot that a second host keeps in memory."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.conftest import RunningCluster, crash_host, cut_power, until
from tests.scenarios.test_migration import ranks

JOB = """
kind = "elastic"
trials = false
snapshots = 5
command = ["python", "train.py", "--steps", "4000"]
resources = {{ devices = 4, plan = {plan} }}
{more}
"""


def lines(cluster: RunningCluster, job: str, attempt: int) -> list[dict[str, Any]]:
    data = cluster.call("steps", job=job, attempt=attempt)["data"]
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_dies_without_replicas_and_the_snapshot_in_memory_goes_on(local_cluster: RunningCluster) -> None:
    """Sharded over both hosts, each holds the only copy of its part: some steps are done again, and it is said."""
    job = local_cluster.submit(JOB.format(plan="{ dp = 4, zero = 3 }", more=""), "sharded")
    local_cluster.wait_for(job, lambda row: row["step"] >= 25)
    crash_host(local_cluster.directory, 1)
    row = local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running", timeout_s=120.0)
    until(lambda: len(lines(local_cluster, job, 2)) > 3, 60.0, local_cluster.log)
    last = max(line["step"] for line in lines(local_cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(local_cluster, job, 2) if "step" in line)
    assert (first - 1) % 5 == 0 and 0 < first - 1 <= last
    assert last - first < 50
    message = local_cluster.run("why", "sharded").stdout
    assert f"goes on from the snapshot of step {first - 1} in memory" in message
    # The loss of the step in which the host died was never summed up.
    before = {line["step"]: line["loss"] for line in lines(local_cluster, job, 1) if line.get("loss") is not None}
    again = [line for line in lines(local_cluster, job, 2) if line.get("step") in before]
    assert all(line["loss"] == pytest.approx(before[line["step"]], rel=1e-4) for line in again)
    assert row["checkpoint"] is None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_dies_on_the_only_host_and_its_snapshot_goes_on(cluster: RunningCluster) -> None:
    """Without being asked: the job started over, for there was no second host to have a copy."""
    cluster.start(hosts=1, devices=2)
    text = JOB.format(plan="{ dp = 2, zero = 3 }", more="").replace("snapshots = 5\n", "")
    job = cluster.submit(text.replace("devices = 4", "devices = 2"), "sharded")
    cluster.wait_for(job, lambda row: row["step"] >= 150, timeout_s=120.0)
    os.kill(ranks(cluster, job, 1)[-1], signal.SIGKILL)
    cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running", timeout_s=120.0)
    until(lambda: len(lines(cluster, job, 2)) > 3, 60.0, cluster.log)
    last = max(line["step"] for line in lines(cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(cluster, job, 2) if "step" in line)
    assert 0 < first - 1 <= last
    assert f"goes on from the snapshot of step {first - 1} in memory" in cluster.run("why", "sharded").stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_dies_and_replicas_on_the_other_go_on(local_cluster: RunningCluster) -> None:
    """Each host has a whole copy: nothing is trained twice, and the attempt is the same."""
    job = local_cluster.submit(JOB.format(plan="{ dp = 2, tp = 2 }", more=""), "replicated")
    local_cluster.wait_for(job, lambda row: row["step"] >= 15)
    crash_host(local_cluster.directory, 1)
    row = local_cluster.wait_for(job, lambda row: any(not m["failure"] for m in row["migrations"]), timeout_s=120.0)
    step = row["step"]
    row = local_cluster.wait_for(job, lambda row: row["step"] > step + 5 and row["state"] == "running")
    assert row["attempt"] == 1
    steps = [line["step"] for line in lines(local_cluster, job, 1) if "step" in line]
    assert len(steps) == len(set(steps))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_loses_its_power_and_replicas_on_the_other_go_on(cluster: RunningCluster) -> None:
    """No connection is closed, so ranks on the other host wait until they are told; no step is lost."""
    settings = cluster.directory / "clusterd.toml"
    settings.write_text('[daemon]\nhost_lost_after = "3s"\n')
    cluster.run("start", "--local", "2", "--devices", "2", "--config", str(settings))
    cluster.wait_until_up(2)
    job = cluster.submit(JOB.format(plan="{ dp = 2, tp = 2 }", more=""), "replicated")
    cluster.wait_for(job, lambda row: row["step"] >= 15)
    cut_power(cluster.directory, 1)
    row = cluster.wait_for(job, lambda row: any(not m["failure"] for m in row["migrations"]), timeout_s=120.0)
    assert {device.split(":")[0] for device in row["migrations"][-1]["devices"]} == {"local0"}
    step = row["step"]
    row = cluster.wait_for(job, lambda row: row["step"] > step + 5 and row["state"] == "running")
    assert row["attempt"] == 1
    steps = [line["step"] for line in lines(cluster, job, 1) if "step" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert "lost" in next(line for line in cluster.run("host", "ls").stdout.splitlines() if "local1" in line)


@pytest.mark.slow
def test_checkpoints_by_the_clock_take_turns(local_cluster: RunningCluster) -> None:
    """Two directories, so that one is whole at any moment."""
    directory = local_cluster.directory / "saved"
    more = f'checkpoints = {{ directory = "{directory}", every = "2s" }}'
    job = local_cluster.submit(JOB.format(plan="{ dp = 4 }", more=more), "saved")
    first = local_cluster.wait_for(job, lambda row: row["checkpoint"] is not None)
    second = local_cluster.wait_for(job, lambda row: row["checkpoint"] != first["checkpoint"])
    assert second["checkpoint_step"] > first["checkpoint_step"]
    assert {first["checkpoint"][-2:], second["checkpoint"][-2:]} == {"/0", "/1"}
    for turn in "01":
        assert (directory / f"saved-{job}" / turn / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_that_hangs_is_replaced_and_the_snapshot_goes_on(local_cluster: RunningCluster) -> None:
    """It lives, and its agent too, but it makes no step: the others would wait half an hour for it."""
    limits = '[limits]\nstall = "5s"\ngrace = "2s"'
    job = local_cluster.submit(JOB.format(plan="{ dp = 4, zero = 3 }", more=limits), "hangs")
    local_cluster.wait_for(job, lambda row: row["step"] >= 15)
    os.kill(ranks(local_cluster, job, 1)[-1], signal.SIGSTOP)
    local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running", timeout_s=120.0)
    until(lambda: len(lines(local_cluster, job, 2)) > 3, 60.0, local_cluster.log)
    last = max(line["step"] for line in lines(local_cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(local_cluster, job, 2) if "step" in line)
    assert 0 < first - 1 <= last + 1, "a step is logged with the next one"
    assert "no step for" in local_cluster.run("why", "hangs").stdout
    assert "its threads now" in local_cluster.run("logs", "hangs", "--attempt", "1").stdout
