"""Jobs save at their end, whatever ends them, and others go on from there at exactly the next step."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.conftest import RunningCluster, until

SCRIPT = """
import os, time
import torch
from clusterd import train

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = [(x, x.sum().reshape(1)) for x in inputs]
go = os.environ.get("GO")


def wait(step, entry):
    while go and step >= 6 and not os.path.exists(go):
        time.sleep(0.02)


train.run(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)),
    loss=lambda output, target: (output - target).square().mean(),
    data=data,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    global_batch=8,
    steps=int(os.environ.get("STEPS", "100000")),
    on_step=wait,
)
"""


def losses(cluster: RunningCluster, job: str) -> dict[int, float]:
    """Loss by step of all attempts; a step that was done twice is an error."""
    found: dict[int, float] = {}
    for attempt in range(1, cluster.job(job)["attempt"] + 1):
        for line in cluster.call("steps", job=job, attempt=attempt)["data"].splitlines():
            row: dict[str, Any] = json.loads(line)
            if "step" in row:
                assert row["step"] not in found
                found[row["step"]] = row["loss"]
    return found


def submitted(cluster: RunningCluster, name: str, *, steps: int, more: str = "", devices: int = 1) -> str:
    work = cluster.directory / "work"
    work.mkdir(exist_ok=True)
    (work / "train.py").write_text(SCRIPT)
    text = (
        f'kind = "elastic"\ntrials = false\nworkdir = "{work}"\ncommand = ["python", "train.py"]\n'
        f"resources = {{ devices = {devices}, max_devices = {devices} }}\n"
    )
    return cluster.submit(f'{text}env = {{ STEPS = "{steps}", GO = "{cluster.directory}/go" }}\n{more}', name)


@pytest.mark.slow
def test_a_cancelled_job_is_resumed_at_the_next_step_on_any_host(local_cluster: RunningCluster) -> None:
    """Without a shared directory: the other host reads the checkpoint from the one that has it."""
    (local_cluster.directory / "go").touch()
    whole = submitted(local_cluster, "whole", steps=40)
    local_cluster.wait_for(whole, lambda row: row["ended_s"])
    (local_cluster.directory / "go").unlink()

    first = submitted(local_cluster, "first", steps=40)
    row = local_cluster.wait_for(first, lambda row: row["step"] >= 3)
    (host,) = row["hosts"]
    refused = local_cluster.run("resume", first, check=False)
    assert "is running: clusterd cancel" in refused.stderr
    local_cluster.run("cancel", first)
    (local_cluster.directory / "go").touch()
    row = local_cluster.wait_for(first, lambda row: row["ended_s"])
    step = row["checkpoint_step"]
    assert (row["state"], row["reason"].partition(": ")[2]) == ("cancelled", f"saved step {step}")
    assert max(losses(local_cluster, first)) == step
    assert row["checkpoint"].startswith(f"{host}:/")

    other = next(other["name"] for other in local_cluster.call("hosts") if other["name"] != host)
    second = local_cluster.run("resume", first, f"hosts={other}", "name=second").stdout.strip()
    row = local_cluster.wait_for(second, lambda row: row["ended_s"])
    assert (row["state"], row["hosts"], row["step"]) == ("finished", [other], 40), local_cluster.story(second)
    together = losses(local_cluster, first) | losses(local_cluster, second)
    assert min(losses(local_cluster, second)) == step + 1
    assert together == losses(local_cluster, whole)
    assert f"goes on after step {step} of the checkpoint in " in local_cluster.run("logs", second).stdout
    missing = local_cluster.run("get", second, "best.pt", check=False).stderr
    assert f"clusterd get {first} best.pt looks in job {first}" in missing

    done = local_cluster.run("resume", second, check=False)
    assert f"has done all of its 40 steps: clusterd resume {second} --steps 80" in done.stderr
    done = local_cluster.run("resume", second, "--steps", "80", check=False)
    assert "has left no checkpoint: finished. A job saves" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_a_job_on_two_hosts_saves_on_one_of_them(local_cluster: RunningCluster, plan: str) -> None:
    """Regression: without a shared directory it saved nothing, and clusterd itself spreads jobs over hosts."""
    (local_cluster.directory / "go").touch()
    job = submitted(local_cluster, "wide", steps=100000, devices=2)
    local_cluster.wait_for(job, lambda row: row["step"] >= 3)
    local_cluster.run("migrate", job, "--plan", plan, "--devices", "local0:cpu0,local1:cpu0", "--pin")
    row = local_cluster.wait_for(job, lambda row: row["plan"] == plan)
    assert sorted(row["hosts"]) == ["local0", "local1"]
    local_cluster.run("cancel", job)
    row = local_cluster.wait_for(job, lambda row: row["ended_s"])
    step = row["checkpoint_step"]
    assert row["reason"] == f"cancelled by {row['user']}: saved step {step}", local_cluster.story(job)
    parts = local_cluster.directory.glob(f"local/*/agent/attempts/{job}.*/checkpoint*")
    assert [str(part) for part in parts] == [row["checkpoint"].partition(":")[2]], "nothing is left on the other host"

    more = local_cluster.run("resume", job, "--steps", str(step + 5), "devices=1").stdout.strip()
    row = local_cluster.wait_for(more, lambda row: row["ended_s"])
    assert (row["state"], row["step"]) == ("finished", step + 5), local_cluster.story(more)
    assert sorted(losses(local_cluster, more)) == list(range(step + 1, step + 6))


@pytest.mark.slow
def test_a_time_limit_saves_and_more_steps_follow_a_finished_job(local_cluster: RunningCluster) -> None:
    (local_cluster.directory / "go").touch()
    shared = local_cluster.directory / "shared"
    text = f'checkpoints = {{ directory = "{shared}" }}\n'
    job = submitted(local_cluster, "limited", steps=100000, more=f'{text}limits = {{ time = "4s" }}\n', devices=2)
    row = local_cluster.wait_for(job, lambda row: row["ended_s"], timeout_s=90)
    step = row["checkpoint_step"]
    assert row["reason"] == f"its time limit of 4.0s is over: saved step {step:,}", local_cluster.story(job)
    assert (row["state"], row["exit_code"], row["checkpoint"]) == ("failed", 124, f"{shared}/limited-{job}/stopped")

    steps = step + 10
    more = local_cluster.run("resume", job, "--time", "10m", "--steps", str(steps), "name=more").stdout.strip()
    row = local_cluster.wait_for(more, lambda row: row["ended_s"])
    assert (row["state"], row["step"], row["steps"]) == ("finished", steps, steps), local_cluster.story(more)
    assert sorted(losses(local_cluster, more)) == list(range(step + 1, steps + 1))

    again = local_cluster.run("resume", more, check=False)
    assert f"has done all of its {steps} steps: clusterd resume {more} --steps" in again.stderr
    third = local_cluster.run("resume", more, "--steps", str(steps + 5)).stdout.strip()
    row = local_cluster.wait_for(third, lambda row: row["ended_s"])
    assert (row["state"], row["step"]) == ("finished", steps + 5), local_cluster.story(third)

    # The folder of a job has several checkpoints; a step selects one, and another script may start from it.
    file = local_cluster.directory / "more.toml"
    folder = f"{shared}/more-{more}"
    for place, outcome in ((f"{folder}@{steps}", "finished"), (f"{folder}@7", "failed"), (folder, "finished")):
        text = file.read_text() if file.exists() else (local_cluster.directory / "limited.toml").read_text()
        file.write_text(text.replace("100000", str(steps + 2)).replace('"4s"', '"10m"'))
        fourth = local_cluster.run("submit", "--from", place, str(file)).stdout.strip()
        row = local_cluster.wait_for(fourth, lambda row: row["ended_s"])
        assert row["state"] == outcome, local_cluster.story(fourth)
        if outcome == "finished":
            assert min(losses(local_cluster, fourth)) == steps + 1
        else:
            assert f"no checkpoint of step 7 in {folder}" in row["reason"]
    shutil.rmtree(shared)


@pytest.mark.slow
def test_a_second_cancel_does_not_wait(local_cluster: RunningCluster) -> None:
    """The ranks hang in a callback: nothing can be saved, and the first cancel would wait for a minute."""
    job = submitted(local_cluster, "hangs", steps=100)
    local_cluster.wait_for(job, lambda row: row["step"] >= 3)
    local_cluster.run("cancel", job)
    assert local_cluster.job(job)["state"] == "stopping"
    local_cluster.run("cancel", "--wait", job, timeout=30)
    row = local_cluster.job(job)
    assert (row["state"], row["checkpoint"]) == ("cancelled", None)
    assert row["reason"].endswith("not saved")
    refused = local_cluster.run("resume", job, check=False)
    assert "has left no checkpoint: cancelled by" in refused.stderr
    until(lambda: not local_cluster.call("status")["leased"])
