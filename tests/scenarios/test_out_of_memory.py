"""Plans that run out of device memory: the job returns to another plan, and the plan is not tried again."""

from __future__ import annotations

import json

import pytest

from tests.conftest import RunningCluster

SCRIPT = """
import time
import torch
from torch.nn.functional import mse_loss
from clusterd import train

calls = 0

def loss(outputs, targets):
    # The device's allocator is what fails in earnest; its error is all that a rank sees of that.
    global calls
    calls += 1
    if torch.distributed.is_initialized() and calls > 40:  # beyond what is compared before the switch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    time.sleep(0.02)
    return mse_loss(outputs, targets)

inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
train.run(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)),
    loss=loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=16, steps=400,
)
"""


LARGE = """
import torch
from torch.nn.functional import mse_loss
from clusterd import train

def loss(outputs, targets):
    if len(outputs) > 16384:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return mse_loss(outputs, targets)

inputs = torch.randn(65536, 16, generator=torch.Generator().manual_seed(0))
train.run(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 256), *(torch.nn.Tanh() for _ in range(10)), torch.nn.Linear(256, 1)
    ),
    loss=loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=32768, steps=400,
)
"""


@pytest.mark.slow
def test_a_first_plan_without_enough_memory_is_replaced_by_a_smaller_one(local_cluster: RunningCluster) -> None:
    """The user did not request the plan, so the job does not fail."""
    job = local_cluster.submit_script(LARGE, "large")
    row = local_cluster.wait_for(job, lambda row: row["step"] >= 2)
    assert row["attempt"] == 2
    assert row["plan"] == "accumulation=2"
    message = " ".join(local_cluster.run("why", job).stdout.split())
    assert "ran out of memory under dp=1" in message and "accumulation=2 needs less" in message


@pytest.mark.slow
def test_a_plan_that_runs_out_of_memory_costs_no_step(local_cluster: RunningCluster) -> None:
    """The rank without memory still has the state of its last step; the job continues under the previous plan."""
    job = local_cluster.submit_script(SCRIPT, "large")
    local_cluster.wait_for(job, lambda row: row["step"] >= 3)
    local_cluster.run("migrate", job, "--plan", "dp=2", "--devices", "local0:cpu0,local0:cpu1", check=False)
    row = local_cluster.wait_for(job, lambda row: len(row["migrations"]) >= 2 and row["migrations"][-1]["ended_s"])
    assert [(m["to"], m["failure"]) for m in row["migrations"]] == [("dp=2", ""), ("dp=1", "")]
    assert "ran out of memory" in row["migrations"][-1]["reason"]
    step = row["step"]
    row = local_cluster.wait_for(job, lambda row: row["step"] >= step + 5)
    assert (row["state"], row["attempt"], row["plan"]) == ("running", 1, "dp=1")
    steps = [json.loads(x)["step"] for x in local_cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    table = local_cluster.directory / "measured.csv"
    local_cluster.run("measurements", "export", str(table))
    assert [line for line in table.read_text().splitlines() if "out-of-memory" in line]
    listed = local_cluster.run("plans", job, "--devices", "2").stdout
    assert "dp=2: it was tried, and ran out of memory or failed" in " ".join(listed.split())
