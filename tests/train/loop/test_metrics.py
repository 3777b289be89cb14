"""Metrics of steps: weighted losses, the script's own values, and what callbacks see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool, Run

OPTIONS = {"depth": 2, "steps": 4, "global_batch": 8, "clip_norm": 1.0}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ranks.run(tmp_path_factory.mktemp("alone"), "dp=1", **OPTIONS, loss="dict").checked()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=3,shares=4:2:2",
        "tp=2,pp=2,accumulation=2",
        "dp=2,zero=3,accumulation=2",
        slow("dp=2,accumulation=2"),
        slow("dp=2,zero=1"),
        slow("dp=2,zero=2"),
        slow("dp=2,tp=2"),
        slow("dp=2,pp=2,accumulation=2"),
    ],
)
def test_a_weighted_loss_and_metrics_are_those_of_one_process(
    plan: str, alone: Run, ranks: RankPool, tmp_path: Path
) -> None:
    """Words that count are spread unevenly over samples, replicas and micro-batches."""
    run = ranks.run(tmp_path, plan, **OPTIONS, loss="dict").checked()
    assert "the loss of a batch is not the mean" not in run.ranks[0].output
    for step, expected in zip(run.steps, alone.steps, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert step["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert step["lr"] == expected["lr"] == 3e-3
        assert step["samples_per_s"] > 0
    assert set(run.steps[0]["metrics"]) == {"right", "mean"}


def test_a_weighted_loss_is_the_mean_over_counted_elements(alone: Run, ranks: RankPool, tmp_path: Path) -> None:
    mean = ranks.run(tmp_path / "mean", "dp=1", **OPTIONS, loss="some words").checked()
    pair = ranks.run(tmp_path / "pair", "dp=1", **OPTIONS, loss="pair").checked()
    assert pair.losses == pytest.approx(mean.losses, rel=1e-5)
    assert alone.losses == pair.losses


@pytest.mark.slow
def test_callbacks_are_called_on_rank_0_alone(ranks: RankPool, tmp_path: Path) -> None:
    options = {**OPTIONS, "evaluate": {"every": 2}}
    run = ranks.run(tmp_path, "dp=2", **options).checked()
    called = run.ranks[0].result["called"]
    steps = [(number, entry["loss"]) for name, number, *more in called if name == "on_step" for entry in more]
    assert steps == [(step["step"], step["loss"]) for step in run.steps]
    evaluated = {number: metrics for name, number, *more in called if name == "on_evaluate" for metrics in more}
    assert evaluated == {step: line["metrics"] for step, line in run.evaluations.items()}
    assert run.ranks[1].result["called"] == []


@pytest.mark.slow
def test_a_checkpoint_calls_back_when_it_is_complete(moving: Callable[..., Mover], tmp_path: Path) -> None:
    mover = moving()
    mover.start("dp=2")
    mover.train(2)
    written = mover.checkpoint(tmp_path / "saved")
    mover.train(3)
    mover.stop()
    called: list[Any] = mover.now.run.result()[0].ranks[0].result["called"]
    assert ["on_checkpoint", written["step"], str(tmp_path / "saved")] in called


def test_a_dict_without_a_loss_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", **OPTIONS, loss="without")
    assert run.ranks[0].exit_code == 92
    assert "it needs an entry 'loss'" in run.ranks[0].output
