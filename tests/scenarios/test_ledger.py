"""Every sample of an epoch is trained on exactly once, also when the job migrates during the epoch."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.conftest import RunningCluster, until

SCRIPT = """
import os, sys, time
import torch
from clusterd import train

LEDGER, GATE, RANK = sys.argv[1], sys.argv[2], os.getpid()

class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, i):
        return torch.full((4,), i / 512), torch.tensor([float(i)])

def loss(output, target):
    numbers = [int(x) for x in target.flatten()]
    # A rehearsal is one sample over and over; the loss is tried without gradients, to know what it is; and children of
    # the ranks compare plans by some samples.
    if len(set(numbers)) > 1 and output.requires_grad and os.getpid() == RANK:
        with open(LEDGER, "a") as file:
            file.write(" ".join(map(str, numbers)) + "\\n")
        while not os.path.exists(GATE) and len(open(LEDGER).readlines()) > 40:
            time.sleep(0.01)  # the first half of the epoch, until the test has seen it
    return torch.nn.functional.mse_loss(output, target / 512)

train.run(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
    loss=loss, data=Numbered(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    global_batch=8, steps=64, layers=("0", "1", "2"),
)
"""


@pytest.mark.slow
def test_an_epoch_with_migrations_has_every_sample_once(local_cluster: RunningCluster) -> None:
    """dp=2, then dp=4 over both hosts: 64 steps of 8 samples are the 512 of the data set."""
    work = local_cluster.directory / "work"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT)
    ledger, gate = local_cluster.directory / "ledger", local_cluster.directory / "gate"
    text = f"""
kind = "elastic"
trials = false
snapshots = 0
workdir = "{work}"
command = ["python", "train.py", "{ledger}", "{gate}"]
resources = {{ devices = 2, plan = {{ dp = 2 }} }}
"""
    job = local_cluster.submit(text, "ledger")
    until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 40, 60.0, local_cluster.log)
    begun = local_cluster.call("migrate", job=job, plan="dp=4", devices=[])
    assert begun["plan"] == "dp=4"
    local_cluster.wait_for(job, lambda row: row["migrating"] is not None and bool(row["migrating"]["phases"]))
    gate.touch()
    row = local_cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    assert row["state"] == "finished", row["reason"]
    assert [m["to"] for m in row["migrations"] if not m["failure"]][:1] == ["dp=4"]
    seen = Counter(int(word) for line in ledger.read_text().splitlines() for word in line.split())
    assert seen == Counter(range(512))
    steps = [json.loads(x)["step"] for x in local_cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, 65))
