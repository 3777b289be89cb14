"""CUDA errors of unknown cause: the driver is asked before the script, the plan or the environment is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state
from tests.conftest import RunningCluster

pytestmark = [needs_gcc, pytest.mark.slow]

SCRIPT = """
import os, sys, time
import torch
from clusterd.train.parallel import mesh
from clusterd.train import rank_main
from clusterd import train

def take_device(context):
    while not os.path.exists(GO):
        time.sleep(0.01)
    raise RuntimeError('CUDA error: unspecified launch failure\\nCUDA kernel errors might ...')

rank_main.device_of = take_device
train.run(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda output, target: torch.nn.functional.mse_loss(output, target, reduction="mean"),
    data=[(torch.ones(2), torch.ones(1))] * 64,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch=2,
    steps=1000,
)
"""


def test_a_gpu_with_ecc_errors_is_blamed_for_a_launch_failure_and_not_the_script(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """The job, which has no retries, goes on on the host's other GPU."""
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=0)
    set_state(tmp_path, used0=0)
    cluster.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    cluster.start(1)
    go = tmp_path / "go"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT.replace("GO", repr(str(go))))
    kind = f'kind = "elastic"\ntrials = false\nworkdir = "{tmp_path}/work"\ncommand = ["python", "train.py"]\n'
    job = cluster.submit(kind + "resources = { gpus = 1 }\n")
    cluster.wait_for(job, lambda row: row["devices"] == ["local0:gpu0"])
    set_state(tmp_path, used0=0, ecc0=1)
    go.touch()
    cluster.wait_for(job, lambda row: row["state"] == "failed" or row["devices"] == ["local0:gpu1"])
    history = cluster.run("history", "--job", job).stdout
    assert "the GPU failed (1 uncorrectable ECC error), rank 0 of 1 (dp=1): CUDA error: unspecified launch" in history
    ended = cluster.wait_for(job, lambda row: row["state"] == "failed")  # that one is well: the script is at fault now
    assert "RuntimeError: CUDA error: unspecified launch failure" in ended["reason"]
