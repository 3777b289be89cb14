"""Estimates against measurements of one rank: memory by its four meanings, and the time of a step and of a snapshot."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_double import HostAgent, Network
from figures import Figures
from model import GPT
from torch.nn.functional import cross_entropy

from clusterd.plans.memory import estimate
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.train import rank_main
from clusterd.train.inspect.describe import describe
from clusterd.train.process import accelerator
from clusterd.train.process.job import Job
from clusterd.train.process.run_in_fork import run_in_fork

pytestmark = [pytest.mark.gpu, pytest.mark.own_process, pytest.mark.time_limit(60)]

STEPS = 21
"""Every fifth is timed by phase; those of the first half are left out of medians."""
SNAPSHOT_EVERY = 4
BATCH = 8


@dataclass
class Run:
    """One rank that trained to its end."""

    rows: list[dict[str, Any]]
    published: list[str]  # segments of state snapshots
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0  # of the device, other processes included
    kinds: set[str] = field(default_factory=set)  # of the devices of parameters

    @property
    def step_s(self) -> float:
        """Seconds of a step by the wall clock."""
        return statistics.median(row["time_s"] for row in self.rows[len(self.rows) // 2 :])

    @property
    def phases_s(self) -> float:
        """Seconds of a step by the events of its phases."""
        timed = [row["phases"] for row in self.rows if "phases" in row]
        return statistics.median(sum(phases.values()) for phases in timed[1:])


@pytest.fixture(scope="module")
def sizes(kind: str) -> dict[str, int]:
    """A hundred million parameters, or a few on a CPU."""
    if kind == "cuda":
        return {"width": 1024, "depth": 8, "heads": 16, "context": 256}
    return {"width": 64, "depth": 2, "heads": 4, "context": 16}


@pytest.fixture
def directory() -> Iterator[Path]:
    """In shared memory, as the segments of an agent."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="clusterd-test-") as made:
        yield Path(made)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def described(request: pytest.FixtureRequest, sizes: dict[str, int]) -> tuple[str, ModelShape]:
    """Precision and shape of the job's model."""
    task = job(sizes, precision=request.param)
    return request.param, run_in_fork(lambda: describe(task))


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,checkpointing", "dp=1,offload=optimizer"])
def test_memory_is_as_estimated(
    plan: str,
    described: tuple[str, ModelShape],
    sizes: dict[str, int],
    directory: Path,
    kind: str,
    before_context: Callable[[], None],
    figures: Figures,
) -> None:
    precision, shape = described
    estimated = estimate(Plan.parse(plan), shape, kind="cuda")
    before_context()
    run = train(job(sizes, precision=precision), plan, directory, kind)
    under = f"{plan} in {precision}"
    tensors_bytes = estimated.device_bytes - estimated.overhead_bytes
    figures.record(f"memory of tensors, estimated: {under}", tensors_bytes, "B")
    figures.record(f"memory of tensors, allocated: {under}", run.allocated_bytes, "B")
    figures.record(f"memory of tensors, reserved: {under}", run.reserved_bytes, "B")
    figures.record(f"memory of a rank, estimated: {under}", estimated.device_bytes, "B")
    figures.record(f"memory of a rank, by the driver: {under}", run.used_bytes, "B")
    figures.record(f"memory beside tensors: {under}", max(row.get("overhead_bytes", 0) for row in run.rows), "B")
    if kind == "cuda":
        assert run.kinds == {"cuda"}
        assert run.allocated_bytes <= 1.1 * tensors_bytes, "a plan that is taken to fit runs out of memory"
        assert run.allocated_bytes >= 0.6 * tensors_bytes, "plans that fit are excluded"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_time_against_plain_torch(
    precision: str,
    sizes: dict[str, int],
    directory: Path,
    kind: str,
    before_context: Callable[[], None],
    figures: Figures,
) -> None:
    before_context()
    run = train(job(sizes, precision=precision), "dp=1", directory, kind)
    by_clock_s, by_events_s = plain_torch(job(sizes, precision=precision), kind)
    figures.record(f"step of a rank, wall clock: {precision}", run.step_s * 1e3, "ms")
    figures.record(f"step of a rank, events: {precision}", run.phases_s * 1e3, "ms")
    figures.record(f"step of a rank over a step of plain torch: {precision}", run.step_s / by_clock_s, "times")
    figures.record(f"step of plain torch, wall clock: {precision}", by_clock_s * 1e3, "ms")
    figures.record(f"step of plain torch, events: {precision}", by_events_s * 1e3, "ms")
    if kind == "cuda":
        assert run.phases_s <= 1.5 * run.step_s, "events count more than the step takes"


def test_a_state_snapshot_costs_little_of_a_step(
    sizes: dict[str, int], directory: Path, kind: str, before_context: Callable[[], None], figures: Figures
) -> None:
    before_context()
    prepared = replace(job(sizes), on_step=await_segments)
    run = train(prepared, "dp=1", directory, kind, snapshot_every=SNAPSHOT_EVERY)
    assert run.published
    late = run.rows[len(run.rows) // 2 :]
    # The copy runs beside the step after it.
    beside = [row["time_s"] for row in late if row["step"] % SNAPSHOT_EVERY == 1]
    others = [row["time_s"] for row in late if row["step"] % SNAPSHOT_EVERY != 1]
    size_bytes = max(path.stat().st_size for path in directory.rglob("*.snap*"))
    figures.record("state snapshot, size", size_bytes, "B")
    figures.record("step beside the copy of a state snapshot", statistics.median(beside) * 1e3, "ms")
    figures.record("step without a copy beside it", statistics.median(others) * 1e3, "ms")


def await_segments(_step: int, _values: dict[str, Any]) -> None:
    """Wait for the memory of state snapshots: preparing it takes longer than all steps of a small job."""
    for thread in threading.enumerate():
        if thread.name == "clusterd-snapshots":
            thread.join()


class Tokens(torch.utils.data.Dataset[Any]):
    """Random bytes."""

    def __init__(self, context: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self._tokens = torch.randint(256, (BATCH * STEPS, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[index, :-1], self._tokens[index, 1:]


def job(sizes: dict[str, int], *, precision: str = "fp32") -> Job:
    return Job(
        model=lambda: GPT(**sizes),
        loss=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=Tokens(sizes["context"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        global_batch=BATCH,
        steps=STEPS,
        layers=GPT.LAYERS,
        tp_plan=GPT.TP_PLAN,
        precision=precision,
    )


def train(task: Job, plan: str, directory: Path, kind: str, *, snapshot_every: int = 0) -> Run:
    """Train as a rank of an agent, in this process."""
    network = Network()
    agent = HostAgent("a", directory, network)
    file = directory / "rank-0.json"
    rank_file = {
        "job": "test", "attempt": 1, "generation": 1, "rank": 0, "world_size": 1, "local_rank": 0,
        "master_addr": "127.0.0.1", "master_port": 1, "interface": "lo", "plan": Plan.parse(plan).to_dict(),
        "device": {"kind": kind, "uuid": "gpu0", "cores": [], "threads": 1},
        "steps_file": str(directory / "steps.jsonl"), "directory": str(directory),
        "control_socket": str(agent.path), "token": "secret", "snapshot_every": snapshot_every,
    }  # fmt: skip
    file.write_text(json.dumps(rank_file))
    os.environ["CLUSTERD_RANK_FILE"] = str(file)
    run = Run([], [])

    def on_end(training: rank_main.Training) -> None:
        gpu = accelerator.of(training.device)
        free, total = gpu.memory_bytes()
        run.allocated_bytes, run.reserved_bytes, run.used_bytes = gpu.peak_bytes(), gpu.reserved_bytes(), total - free
        run.kinds = {parameter.device.type for _, parameter in training.parallel.parameters}

    rank_main.run(task, on_end)
    run.rows = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    run.published = sorted(network.published)
    agent.close()
    return run


def plain_torch(task: Job, kind: str) -> tuple[float, float]:
    """Median seconds of a step in a loop without clusterd, by the wall clock and by events."""
    device = torch.device(kind)
    gpu = accelerator.of(torch.device("cuda", 0) if kind == "cuda" else device)
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = task.optimizer(list(model.parameters()))
    loader = torch.utils.data.DataLoader(task.data, BATCH)
    marks = [gpu.record_event(timed=True)]
    clocks_s = [time.perf_counter()]
    for inputs, target in loader:
        inputs, target = inputs.to(device), target.to(device)
        with torch.autocast(kind, torch.bfloat16, enabled=task.precision == "bf16"):
            loss = task.loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # a loop that reports its loss
        marks.append(gpu.record_event(timed=True))
        clocks_s.append(time.perf_counter())
    gpu.synchronize()
    events_s = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    walls_s = [b - a for a, b in itertools.pairwise(clocks_s)]
    half = len(walls_s) // 2
    return statistics.median(walls_s[half:]), statistics.median(events_s[half:])
