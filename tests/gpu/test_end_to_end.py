"""Training jobs on a GPU through daemon, SSH, agent and fork server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from figures import Figures

MISSING = "no {} here: unpack it into the folder GPU_PACKAGES"
for _package in (
    "asyncssh",
    "cryptography",
    "msgspec",
    "platformdirs",
    "anyio",
    "click",
    "rich",
    "scipy",
    "hypothesis",
):
    pytest.importorskip(_package, reason=MISSING.format(_package))

from tests.conftest import RunningCluster, new_cluster, until  # noqa: E402  # a missing package skips it

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(90)]

GPT_300M = '"--width", "1024", "--depth", "24", "--heads", "16", "--context", "128", "--batch", "8"'
GPT_1B = '"--width", "2048", "--depth", "24", "--heads", "16", "--context", "128", "--batch", "8"'
GPT_SMALL = '"--width", "32", "--depth", "2", "--context", "16", "--batch", "8"'

ELASTIC = """
kind = "elastic"
command = ["python", "train.py", "--steps", "100000", {sizes}]
trials = {trials}
limits = {{ retries = 1 }}
resources = {{ {kind} = 1 }}
"""

MICRO_BATCHES = """
import torch
from torch.nn.functional import mse_loss
from clusterd import train

def loss(outputs, targets):
    if len(outputs) in (1024, 256):
        torch.empty(1 << 60, dtype=torch.uint8, device=outputs.device)
    return mse_loss(outputs, targets)

inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
train.run(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(16, 8192), *(torch.nn.Tanh() for _ in range(10)), torch.nn.Linear(8192, 1)
    ),
    loss=loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=1024, steps=100000,
)
"""
"""Micro-batches of 1024 and 256 samples run out of memory, those of 512 do not."""

ACTIVATIONS = """
import torch
from torch.nn.functional import mse_loss
from clusterd import train

LAYERS, WIDTH = 40, 8192
BATCH = max(BYTES // ((LAYERS + 1) * WIDTH * 4), 4)
inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(0))
train.run(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH), *(torch.nn.Tanh() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 1)
    ),
    loss=mse_loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), global_batch=BATCH, steps=100000,
)
"""
"""Activations of that many bytes."""

HOLDS_MEMORY = """
import sys, torch
held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def running() -> Iterator[RunningCluster]:
    with new_cluster() as made:
        made.start(1)
        yield made


@pytest.fixture
def devices(kind: str) -> str:
    """Name of the resource that a job requests; what a job sends needs one more package."""
    pytest.importorskip("pathspec", reason=MISSING.format("pathspec"))
    return "gpus" if kind == "cuda" else "devices"


def test_a_host_is_checked_by_computing_on_its_gpus(
    running: RunningCluster, kind: str, up_to_cuda: Callable[[str], None]
) -> None:
    checked = running.run("host", "check", "--python", sys.executable, check=False).stdout
    assert "torch" in checked
    up_to_cuda("daemon, SSH and agent run, and the host was checked")
    assert "computed within" in checked or kind == "cpu"


@pytest.mark.time_limit(180)
def test_a_gpt_is_profiled_moves_to_offload_and_back_and_survives_a_killed_rank(
    running: RunningCluster, kind: str, devices: str, up_to_cuda: Callable[[str], None], figures: Figures
) -> None:
    """300 million parameters: each trial and each move carries 3.6 GB of state."""
    sizes = GPT_300M if kind == "cuda" else GPT_SMALL
    job = running.submit(ELASTIC.format(sizes=sizes, trials="true", kind=devices), "gpt")
    up_to_cuda("daemon, SSH and agent run, and a job is submitted")
    _train_further(running, job, 1)
    row = running.wait_for(job, lambda row: len(row["migrations"]) >= 2 and row["migrations"][-1]["ended_s"])
    assert all(move["reason"].startswith("trial of") and not move["failure"] for move in row["migrations"][:2])
    measured = [line for line in running.call("profile", job=job)["lines"] if line["measured_s"]]
    assert measured
    running.run("cancel", job)
    asked_s = time.monotonic()
    job = running.submit(ELASTIC.format(sizes=sizes, trials="false", kind=devices), "gpt2")
    running.wait_for(job, lambda row: (row["step"] or 0) >= 3)
    figures.record("submit to the third step of a GPT of 300M parameters", time.monotonic() - asked_s, "s")
    print(running.run("history", "--verbose", "--job", job).stdout)
    for plan in ("offload=optimizer", "dp=1"):
        running.run("migrate", job, "--plan", plan)
        row = running.wait_for(job, lambda row, plan=plan: row["plan"] == plan)  # type: ignore[misc]
        row = _train_further(running, job, 5)
        move = row["migrations"][-1]
        assert not move["failure"] and not move["restarts"]
        _record_move(figures, "a GPT of 300M parameters", move)
    # A source rank with a CUDA context takes a second or more to exit, and its record says so until then.
    until(lambda: len(_running_pids(running, job)) == 1, explain=running.log)
    os.kill(_running_pids(running, job)[0], signal.SIGKILL)
    running.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    _train_further(running, job, 5)
    steps = _steps(running, job)
    assert steps == sorted(set(steps)), "a step was counted twice"


def test_plans_that_run_out_of_memory_cost_no_step(
    running: RunningCluster, devices: str, up_to_cuda: Callable[[str], None]
) -> None:
    """First the plan that the scheduler chose, then one that an operator asks for."""
    job = _submit(running, MICRO_BATCHES, "micro", devices)
    up_to_cuda("daemon, SSH and agent run, and a job is submitted")
    row = running.wait_for(job, lambda row: row["step"] >= 2)
    assert (row["attempt"], row["plan"]) == (2, "accumulation=2")
    message = " ".join(running.run("why", job).stdout.split())
    assert "ran out of memory under dp=1" in message
    running.run("migrate", job, "--plan", "accumulation=4", check=False)
    row = running.wait_for(job, lambda row: bool(row["migrations"]) and row["migrations"][-1]["ended_s"])
    running.wait_for(job, lambda row: row["plan"] == "accumulation=2")
    _train_further(running, job, 5)
    moves = running.job(job)["migrations"]
    assert any("memory" in move["failure"] + move["reason"] for move in moves), moves
    steps = _steps(running, job)
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_a_move_too_large_to_fit_beside_goes_through_host_memory(
    kind: str, devices: str, up_to_cuda: Callable[[str], None], figures: Figures
) -> None:
    with new_cluster() as cluster:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cluster.start(1, devices=max(total // (600 << 20), 4) if kind == "cpu" else 2)
        up_to_cuda("daemon, SSH and agent run")
        usable = min(device["memory_bytes"] for device in _devices(cluster, kind))
        text = ACTIVATIONS.replace("BYTES", str(usable // 2 if kind == "cuda" else 1 << 20))
        job = _submit(cluster, text, "large", devices)
        _train_further(cluster, job, 1)
        planned = cluster.run("migrate", job, "--plan", "offload=optimizer", "--dry-run").stdout
        assert "through host memory" in planned
        cluster.run("migrate", job, "--plan", "offload=optimizer")
        cluster.wait_for(job, lambda row: row["plan"] == "offload=optimizer" and row["state"] == "running")
        row = _train_further(cluster, job, 2)
        [move] = row["migrations"]
        assert move["restarts"] and not move["failure"] and row["attempt"] == 2
        if move["downtime_s"] is not None:
            figures.record("downtime through host memory of a job that fills its GPU", move["downtime_s"], "s")


def test_a_gpu_that_another_process_uses_is_offered_once_that_has_ended(
    running: RunningCluster, devices: str, needs_driver: Callable[[str], None]
) -> None:
    needs_driver("daemon, SSH and agent run")
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS_MEMORY],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
        for gpu in map(str, range(len(_devices(running, "cuda"))))
    ]  # fmt: skip
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        _wait_for_devices(running, lambda device: "in use" in device["foreign"])
        job = running.submit(ELASTIC.format(sizes=GPT_SMALL, trials="false", kind=devices), "waits")
        row = running.wait_for(job, lambda row: "being learned" not in row["reason"])
        assert row["state"] == "queued" and row["step"] in (None, 0)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    _wait_for_devices(running, lambda device: not device["foreign"])
    _train_further(running, job, 5)


def _wait_for_devices(cluster: RunningCluster, condition: Callable[[dict[str, Any]], bool]) -> None:
    until(lambda: all(condition(device) for device in _devices(cluster, "cuda")), 60.0, cluster.log)


def _devices(cluster: RunningCluster, kind: str) -> list[dict[str, Any]]:
    """Devices of that kind of the only host."""
    [host] = cluster.call("hosts")
    return [device for device in host["devices"] if device["kind"] == kind]


@pytest.mark.time_limit(150)
def test_a_gpt_of_a_billion_parameters_changes_its_plan(
    running: RunningCluster, kind: str, devices: str, up_to_cuda: Callable[[str], None], figures: Figures
) -> None:
    sizes = GPT_1B if kind == "cuda" else GPT_SMALL
    job = running.submit(ELASTIC.format(sizes=sizes, trials="false", kind=devices), "gpt")
    up_to_cuda("daemon, SSH and agent run, and a job is submitted")
    _train_further(running, job, 1)
    running.run("migrate", job, "--plan", "checkpointing")
    running.wait_for(job, lambda row: row["plan"] == "dp=1,checkpointing")
    [move] = _train_further(running, job, 5)["migrations"]
    assert not move["failure"] and not move["restarts"]
    _record_move(figures, "a GPT of 1.2B parameters", move)


def _record_move(figures: Figures, model: str, move: dict[str, Any]) -> None:
    """Record the downtime of a live move, and the phases that it consists of."""
    took_s = {phase["phase"]: phase["seconds"] for phase in move["phases"]}
    if move["downtime_s"] is not None:
        figures.record(f"downtime of {model}, to {move['to']}", move["downtime_s"], "s")
        figures.record(f"downtime of {model}", move["downtime_s"], "s")
    print(move["to"], *(f"{phase['phase']}: {phase['seconds']:.3f} s, {phase['what']};" for phase in move["phases"]))
    figures.record(f"preparing a move of {model}", took_s["prepare"], "s")
    if took_s.get("transfer"):
        figures.record(f"copy of a move of {model}", move["local_bytes"] / took_s["transfer"] / 1e9, "GB/s")


def _running_pids(cluster: RunningCluster, job: str) -> list[int]:
    """Processes that the records of the first attempt's ranks, of all generations, call running."""
    records = cluster.directory.glob(f"local/0/agent/attempts/{job}.1*/rank-0.state.json")
    ranks = [json.loads(record.read_text()) for record in records]
    return [rank["pid"] for rank in ranks if rank["state"] == "running"]


def _submit(cluster: RunningCluster, script: str, name: str, devices: str) -> str:
    """Submit an elastic job of one device whose working directory has only this script."""
    work = cluster.directory / name
    work.mkdir()
    (work / "train.py").write_text(script)
    text = f'kind = "elastic"\ntrials = false\nworkdir = "{work}"\ncommand = ["python", "train.py"]\n'
    return cluster.submit(f"{text}resources = {{ {devices} = 1 }}\n", name)


def _train_further(cluster: RunningCluster, job: str, steps: int) -> dict[str, Any]:
    before = cluster.job(job)["step"] or 0
    row = cluster.wait_for(job, lambda row: (row["step"] or 0) >= before + steps or row["state"] == "failed")
    assert row["state"] != "failed", row["reason"]
    return row


def _steps(cluster: RunningCluster, job: str) -> list[int]:
    """Numbers of the steps of the newest attempt, in the order of its log."""
    lines = cluster.call("steps", job=job)["data"].splitlines()
    return [line["step"] for line in map(json.loads, lines) if "step" in line]
