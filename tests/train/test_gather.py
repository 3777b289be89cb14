"""Losses and models that compare the samples of a whole batch, by `clusterd.train.gather`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool

from clusterd.exit_reasons import EXIT_CODE_OF, Reason

CONTRASTIVE = {"depth": 2, "steps": 4, "global_batch": 8, "loss": "contrastive"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "plan, batch",
    [("dp=2", 8), slow("dp=4", 8), ("dp=2,zero=3", 8), slow("dp=2,tp=2", 8), slow("dp=2,zero=2", 6)],
)
def test_a_contrastive_loss_does_not_depend_on_the_replicas(
    plan: str, batch: int, ranks: RankPool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**CONTRASTIVE, "global_batch": batch, "clip_norm": 1.0}
    one = ranks.run(tmp_path / "one", "dp=1", **options).checked()
    several = ranks.run(tmp_path / "several", plan, **options).checked()
    assert several.losses == pytest.approx(one.losses, rel=1e-4)
    assert [step["grad_norm"] for step in several.steps] == pytest.approx(
        [step["grad_norm"] for step in one.steps], rel=1e-3
    )
    assert "differ from" not in several.ranks[0].output


@pytest.mark.parametrize("plan", ["accumulation=2", slow("pp=2,accumulation=2")])
def test_plans_that_cut_its_samples_are_refused(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, plan, **CONTRASTIVE)
    assert run.ranks[0].exit_code == EXIT_CODE_OF[Reason.PLAN]
    assert "of which train.gather needs all samples at once" in run.ranks[0].output
    assert run.steps == []


def test_rows_that_are_not_of_samples_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=2", **{**CONTRASTIVE, "loss": "of a number"})
    assert run.ranks[0].exit_code == EXIT_CODE_OF[Reason.SCRIPT]
    assert "train.gather was given a tensor of () for 4 samples" in run.ranks[0].output


@pytest.mark.slow
def test_a_queue_of_gathered_features_moves_with_its_job(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    options = {"model": "queueing", "loss": "contrastive", "global_batch": 8}
    expected = undisturbed(**options)
    mover = moving(**options)
    mover.start("dp=1")
    mover.train(2)
    assert mover.move("dp=2") is not None
    mover.train(2)
    assert mover.move("dp=1") is not None
    mover.train(2)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=1e-4)
