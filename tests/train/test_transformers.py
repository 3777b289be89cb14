"""A third-party model: a Llama of Hugging Face's transformers, with its own tp_plan and layer list."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from migration_driver import Mover
from rank_pool import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="Hugging Face transformers is not installed: pip install transformers",
    ),
]
OPTIONS = {"model": "llama", "depth": 2, "optimizer": "adamw"}


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,accumulation=2", "dp=2,zero=3", "dp=2,tp=2,checkpointing"])
def test_every_plan_trains_it_alike(plan: str, pools: tuple[RankPool, RankPool], tmp_path: Path) -> None:
    one = pools[0].run(tmp_path / "one", "dp=1", **OPTIONS, steps=10).checked()
    run = pools[0].run(tmp_path / "many", plan, **OPTIONS, steps=10).checked()
    assert run.losses == pytest.approx(one.losses, rel=1e-4)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2,accumulation=2", "dp=2,zero=3"])
def test_one_with_norms_over_each_head_and_a_tied_output_layer(
    plan: str, pools: tuple[RankPool, RankPool], tmp_path: Path
) -> None:
    weights = []
    for name, under in (("one", "dp=1"), ("many", plan)):
        file = tmp_path / f"{name}.pt"
        pools[0].run(tmp_path / name, under, model="qwen3", depth=2, optimizer="sgd", steps=5, save=str(file)).checked()
        weights.append(torch.load(file, weights_only=True))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_it_moves(moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]) -> None:
    expected = undisturbed(model="llama")
    mover = moving(model="llama")
    mover.start("tp=2")
    for plan in ("pp=2,accumulation=2", "dp=2,zero=3", "dp=2,tp=2"):
        mover.train(2)
        mover.move(plan)
    mover.train(10)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=1e-4)
