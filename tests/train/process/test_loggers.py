"""Other tools get the numbers of a run, once for each step, across the processes that it runs in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from clusterd.train.process.context import Context
from clusterd.train.process.loggers import Loggers, run_id

SCRIPT = """
import torch
from clusterd import train

class Mine:
    def write(self, step, values):
        print("mine", step, sorted(values), flush=True)
        if step == 2:
            raise OSError("the disk is full")

data = [(torch.ones(2), torch.ones(1))] * 8
train.run(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda output, target: {"loss": (output - target).square().mean(), "error": (output - target).abs().mean()},
    data=data,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch=4,
    steps=3,
    evaluate=train.Evaluation(data=data, every=1),
    loggers=LOGGERS,
)
print("done")
"""


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "CLUSTERD_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_an_object_of_the_script_gets_steps_and_evaluations_until_it_fails(tmp_path: Path) -> None:
    done = run(SCRIPT.replace("LOGGERS", "[Mine()]"), tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "done"), done.stderr
    assert "mine 1 ['loss', 'lr', 'samples_per_s']" in lines
    assert "mine 1 ['error']" in lines
    assert any(line.startswith("mine 1 ['evaluation/") for line in lines)
    assert sum("Mine is left out from now on: OSError: the disk is full" in line for line in lines) == 1
    assert not any(line.startswith("mine 3") for line in lines)


@pytest.mark.slow
def test_missing_or_unknown_packages_are_refused_before_training(tmp_path: Path) -> None:
    for loggers, why in (
        ('["wandbx"]', "loggers names 'wandbx'; there are tensorboard, wandb"),
        ("[3]", "loggers has a int, which has no write(step, values)"),
    ):
        done = run(SCRIPT.replace("LOGGERS", loggers), tmp_path)
        assert (done.returncode, why in done.stderr) == (92, True), done.stderr
    if importlib.util.find_spec("wandb") is None:
        done = run(SCRIPT.replace("LOGGERS", '["wandb"]'), tmp_path)
        assert (done.returncode, "is not installed in this environment: pip install wandb" in done.stderr) == (92, True)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies after step 6; the next one goes on from the state of step 4."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    context = Context(job="12")
    for first, last, offset in ((1, 6, 0.0), (5, 8, 100.0)):
        loggers = Loggers(["tensorboard"], context, first)
        for step in range(first, last + 1):
            loggers.write(step, {"loss": step + offset})
        loggers.close()
    events = EventAccumulator(str(tmp_path / run_id(context)))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert (shown[4], shown[5]) == (4.0, 105.0)


def test_weights_and_biases_resumes_the_run_of_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that continues another one writes to its run."""
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finish")

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setenv("CLUSTERD_SEED_OF", "12")
    monkeypatch.setenv("CLUSTERD_JOB_NAME", "night")
    loggers = Loggers(["wandb"], Context(job="15"), 5)
    loggers.write(5, {"loss": 1.0, "metrics": {"right": 0.5}})
    loggers.close()
    assert calls == [
        {"id": "night-12", "name": "night", "resume": "allow"},
        (5, {"loss": 1.0, "metrics/right": 0.5}),
        "finish",
    ]
