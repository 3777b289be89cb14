"""A job that uses more than half of its devices' memory migrates through host memory without losing a step."""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import RunningCluster

DEVICE_BYTES = 600 << 20
SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from clusterd import train

inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
train.run(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(64, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 4000), torch.nn.Tanh(),
        torch.nn.Linear(4000, 1),
    ),
    loss=mse_loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    optimizer=lambda p: torch.optim.Adam(p, lr=1e-4), global_batch=4, steps=STEPS,
)
"""


def losses(cluster: RunningCluster, job: str, attempts: int) -> dict[int, float]:
    """Losses by step over all attempts; a repeated step fails."""
    found: dict[int, float] = {}
    for attempt in range(1, attempts + 1):
        for line in cluster.call("steps", job=job, attempt=attempt)["data"].splitlines():
            row = json.loads(line)
            assert row["step"] not in found, f"step {row['step']} was done twice"
            found[row["step"]] = row["loss"]
    return found


@pytest.mark.slow
def test_a_job_that_fills_its_devices_goes_through_host_memory(cluster: RunningCluster) -> None:
    """With one host the state of the last step in its memory is the only copy."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cluster.start(hosts=1, devices=max(total // DEVICE_BYTES, 4))
    script = SCRIPT.replace("STEPS", "60")
    undisturbed = cluster.submit_script(script, "undisturbed")
    cluster.wait_for(undisturbed, lambda row: row["state"] == "finished")
    job = cluster.submit_script(script, "full")
    cluster.wait_for(job, lambda row: row["step"] >= 3)
    message = cluster.run("migrate", job, "--plan", "dp=2", "--devices", "local0:cpu0,local0:cpu1", "--dry-run").stdout
    assert (
        "through host memory" in message
        and "it stops and restarts: a rank of dp=2" in message
        and "trains on the same device" in message
    )
    message = cluster.run("migrate", job, "--plan", "dp=2", "--devices", "local0:cpu0,local0:cpu1").stdout
    assert "dp=1 -> dp=2" in message
    row = cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert row["attempt"] == 2
    (move,) = row["migrations"]
    assert move["restarts"] and not move["failure"] and move["step"] >= 3
    mine, theirs = losses(cluster, job, 2), losses(cluster, undisturbed, 1)
    assert sorted(mine) == list(range(1, 61))
    assert all(abs(mine[step] - theirs[step]) < 1e-4 * max(abs(theirs[step]), 1.0) for step in theirs)


@pytest.mark.slow
def test_a_job_that_fills_its_devices_is_profiled_through_host_memory(cluster: RunningCluster) -> None:
    """Each trial is a restart, which pays because hours remain. No step is lost or repeated."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cluster.start(hosts=1, devices=max(total // DEVICE_BYTES, 4))
    job = cluster.submit_script(SCRIPT.replace("STEPS", "100000"), "full", devices=2, trials=True)
    row = cluster.wait_for(job, lambda row: len(row["migrations"]) >= 3 and row["state"] == "running")
    assert all(move["restarts"] and not move["failure"] for move in row["migrations"])
    assert all(move["reason"].startswith("trial of") for move in row["migrations"][:3])
    losses(cluster, job, row["attempt"])
    answer = cluster.run("profile", job).stdout
    assert all(move["to"] in answer for move in row["migrations"][:2])
