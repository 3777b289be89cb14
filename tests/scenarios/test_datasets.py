"""Jobs read data sets by name; blocks from another host come through the agents and are cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunningCluster

SCRIPT = """
import fsspec, torch
from clusterd import train

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, i):
        with fsspec.open("clusterd://numbers/part.bin") as file:
            file.seek(i * 64)
            x = torch.frombuffer(bytearray(file.read(64)), dtype=torch.float32)
        return x, x.sum().reshape(1)

train.run(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)),
    loss=torch.nn.functional.mse_loss, data=Numbers(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    global_batch=16, steps=3000,
)
"""


@pytest.mark.slow
def test_data_of_another_host_is_read_by_name_and_follows_a_move(local_cluster: RunningCluster) -> None:
    """Ranks on local0 fetch blocks from local1; ranks on local1 open the folder itself."""
    import torch

    data = local_cluster.directory / "numbers"
    data.mkdir()
    (data / "part.bin").write_bytes(torch.rand(4096 * 16, generator=torch.Generator().manual_seed(0)).numpy().tobytes())
    work = local_cluster.directory / "work"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT)
    text = f"""
kind = "elastic"
trials = false
workdir = "{work}"
command = ["python", "train.py"]
resources = {{ devices = 2, hosts = ["local0", "local1"] }}
datasets = {{ numbers = "local1:{data}" }}
"""
    job = local_cluster.submit(text, "reader")
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    cache = local_cluster.directory / "local" / "0" / "agent" / "data"
    local_cluster.run("migrate", job, "--plan", "dp=2", "--devices", "local0:cpu0,local1:cpu0", "--pin")
    before = local_cluster.job(job)["step"]
    row = local_cluster.wait_for(job, lambda row: row["step"] > before + 5)
    assert row["loss"] is not None
    blocks = [path for path in cache.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in blocks) == (data / "part.bin").stat().st_size
    assert not (local_cluster.directory / "local" / "1" / "agent" / "data").exists()
    steps = [json.loads(x) for x in local_cluster.call("steps", job=job)["data"].splitlines()]
    assert [x["step"] for x in steps] == list(range(1, len(steps) + 1))


def test_missing_data_fails_the_job_at_once(local_cluster: RunningCluster) -> None:
    """The job does not hang; the reason names data set, folder and host."""
    text = """
kind = "elastic"
command = ["python", "train.py", "--steps", "5"]
resources = { devices = 1, hosts = ["local0"] }
datasets = { corpus = "local1:/nowhere/corpus" }
"""
    job = local_cluster.submit(text, "lost")
    row = local_cluster.wait_for(job, lambda row: "corpus" in row["reason"])
    assert "/nowhere/corpus" in row["reason"]


def test_a_malformed_location_is_refused(cluster: RunningCluster, tmp_path: Path) -> None:
    """The command line refuses it without a daemon."""
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\n[datasets]\ncorpus = "gpu01/data"\n')
    message = cluster.run("submit", str(file), check=False)
    assert message.returncode == 2
    assert "corpus is 'gpu01/data'; write \"HOST:/folder\"" in message.stderr
