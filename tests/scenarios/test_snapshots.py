"""A host dies: the job continues from replicas, else from the state snapshot in a second host's memory."""

from __future__ import annotations

import json
import os
import re
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
def test_a_lost_host_without_replicas_is_restored_from_the_state_snapshot(local_cluster: RunningCluster) -> None:
    """Each host has the only copy of its shard: some steps are repeated, which is reported."""
    job = local_cluster.submit(JOB.format(plan="{ dp = 4, zero = 3 }", more=""), "sharded")
    local_cluster.wait_for(job, lambda row: row["step"] >= 25)
    crash_host(local_cluster.directory, 1)
    row = local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    until(lambda: len(lines(local_cluster, job, 2)) > 3, 60.0, local_cluster.log)
    last = max(line["step"] for line in lines(local_cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(local_cluster, job, 2) if "step" in line)
    assert (first - 1) % 5 == 0 and 0 < first - 1 <= last
    assert last - first < 50
    message = local_cluster.run("why", "sharded").stdout
    assert f"goes on from the snapshot of step {first - 1} in memory" in message
    # The loss of the step in which the host died was not reduced.
    before = {line["step"]: line["loss"] for line in lines(local_cluster, job, 1) if line.get("loss") is not None}
    again = [line for line in lines(local_cluster, job, 2) if line.get("step") in before]
    assert all(line["loss"] == pytest.approx(before[line["step"]], rel=1e-4) for line in again)
    assert row["checkpoint"] is None


@pytest.mark.slow
def test_a_rank_on_the_only_host_is_restored_from_the_state_snapshot(cluster: RunningCluster) -> None:
    """Regression: without a second host for the replica, the job started over."""
    cluster.start(hosts=1, devices=2)
    text = JOB.format(plan="{ dp = 2, zero = 3 }", more="").replace("snapshots = 5\n", "")
    job = cluster.submit(text.replace("devices = 4", "devices = 2"), "sharded")
    cluster.wait_for(job, lambda row: row["step"] >= 150)
    os.kill(ranks(cluster, job, 1)[-1], signal.SIGKILL)
    cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    until(lambda: len(lines(cluster, job, 2)) > 3, 60.0, cluster.log)
    last = max(line["step"] for line in lines(cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(cluster, job, 2) if "step" in line)
    assert 0 < first - 1 <= last
    assert f"goes on from the snapshot of step {first - 1} in memory" in cluster.run("why", "sharded").stdout


@pytest.mark.slow
def test_a_lost_host_is_recovered_from_replicas(local_cluster: RunningCluster) -> None:
    """Each host has a complete copy: no step is repeated, and the attempt continues."""
    job = local_cluster.submit(JOB.format(plan="{ dp = 2, tp = 2 }", more=""), "replicated")
    local_cluster.wait_for(job, lambda row: row["step"] >= 15)
    crash_host(local_cluster.directory, 1)
    row = local_cluster.wait_for(job, lambda row: any(not m["failure"] for m in row["migrations"]))
    step = row["step"]
    row = local_cluster.wait_for(job, lambda row: row["step"] > step + 5 and row["state"] == "running")
    assert row["attempt"] == 1
    steps = [line["step"] for line in lines(local_cluster, job, 1) if "step" in line]
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_a_host_without_power_is_recovered_from_replicas(cluster: RunningCluster) -> None:
    """No connection is closed, so ranks on the other host wait until they are informed; no step is lost."""
    settings = cluster.directory / "clusterd.toml"
    settings.write_text('[daemon]\nhost_lost_after = "3s"\n')
    cluster.run("start", "--local", "2", "--devices", "2", "--config", str(settings))
    cluster.wait_until_up(2)
    job = cluster.submit(JOB.format(plan="{ dp = 2, tp = 2 }", more=""), "replicated")
    cluster.wait_for(job, lambda row: row["step"] >= 15)
    cut_power(cluster.directory, 1)
    row = cluster.wait_for(job, lambda row: any(not m["failure"] for m in row["migrations"]))
    assert {device.split(":")[0] for device in row["migrations"][-1]["devices"]} == {"local0"}
    step = row["step"]
    row = cluster.wait_for(job, lambda row: row["step"] > step + 5 and row["state"] == "running")
    assert row["attempt"] == 1
    steps = [line["step"] for line in lines(cluster, job, 1) if "step" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert "lost" in next(line for line in cluster.run("host", "ls").stdout.splitlines() if "local1" in line)


@pytest.mark.slow
def test_periodic_checkpoints_alternate_between_directories(local_cluster: RunningCluster) -> None:
    """With two directories one checkpoint is complete at any time."""
    directory = local_cluster.directory / "saved"
    more = f'checkpoints = {{ directory = "{directory}", every = "2s" }}'
    job = local_cluster.submit(JOB.format(plan="{ dp = 4 }", more=more), "saved")
    first = local_cluster.wait_for(job, lambda row: row["checkpoint"] is not None)
    second = local_cluster.wait_for(job, lambda row: row["checkpoint"] != first["checkpoint"])
    assert second["checkpoint_step"] > first["checkpoint_step"]
    assert {first["checkpoint"][-2:], second["checkpoint"][-2:]} == {"/0", "/1"}
    for turn in "01":
        assert (directory / f"saved-{job}" / turn / ".metadata").exists()
    asked = directory / f"saved-{job}" / "asked"
    assert f"is in {asked} (" in local_cluster.run("checkpoint", job).stderr
    assert (asked / ".metadata").exists()


@pytest.mark.slow
def test_a_hanging_rank_is_replaced_from_the_state_snapshot(local_cluster: RunningCluster) -> None:
    """The rank and its agent live, but it makes no step: its peers would wait half an hour."""
    limits = '[limits]\nstall = "5s"\ngrace = "2s"'
    job = local_cluster.submit(JOB.format(plan="{ dp = 4, zero = 3 }", more=limits), "hangs")
    local_cluster.wait_for(job, lambda row: row["step"] >= 15)
    os.kill(ranks(local_cluster, job, 1)[-1], signal.SIGSTOP)
    local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    until(lambda: len(lines(local_cluster, job, 2)) > 3, 60.0, local_cluster.log)
    last = max(line["step"] for line in lines(local_cluster, job, 1) if "step" in line)
    first = next(line["step"] for line in lines(local_cluster, job, 2) if "step" in line)
    assert 0 < first - 1 <= last + 1, "a step is logged with the next one"
    assert "no step for" in local_cluster.run("why", "hangs").stdout
    log = local_cluster.run("logs", "hangs", "--attempt", "1").stdout
    assert "its threads now" in log or "stopped after step" in log, "the stop continues a rank, which may end its step"


@pytest.mark.slow
def test_a_checkpoint_that_fails_is_told_everywhere(local_cluster: RunningCluster) -> None:
    """A file takes the place of the directory, which stops any account; then somebody removes the file."""
    saved, aside = local_cluster.directory / "saved", local_cluster.directory / "aside"
    more = f'checkpoints = {{ directory = "{saved}", every = "1s" }}'
    text = JOB.format(plan="{ dp = 1 }", more=more).replace("devices = 4", "devices = 1").replace("4000", "100000")
    job = local_cluster.submit(text, "saved")
    local_cluster.wait_for(job, lambda row: row["checkpoint"] is not None)
    saved.rename(aside)
    saved.touch()
    row = local_cluster.wait_for(job, lambda row: row["checkpoint_failure"])
    step = row["checkpoint_step"]
    assert row["reason"].startswith("not saved: ") and f"(the newest checkpoint: of step {step:,})" in row["reason"]
    for face in (["why", job], ["ls"], ["history", "--job", job], ["logs", job]):
        assert re.search(r"not saved.*directory", local_cluster.run(*face).stdout), face
    saved.unlink()
    row = local_cluster.wait_for(job, lambda row: row["checkpoint_step"] > step)
    assert not row["checkpoint_failure"] and "not saved" not in row["reason"]

    saved.rename(local_cluster.directory / "aside-too")
    saved.touch()
    local_cluster.run("cancel", job)
    row = local_cluster.wait_for(job, lambda row: row["ended_s"])
    assert "not saved, " in row["reason"] and "in time" not in row["reason"]
    assert row["reason"].endswith(f"; the newest checkpoint is of step {row['checkpoint_step']:,}")
