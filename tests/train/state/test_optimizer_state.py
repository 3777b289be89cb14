"""Optimizer state is found by global name under every plan."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,accumulation=2", "dp=2,zero=3,offload=parameters"]
)
def test_state_lies_beside_the_parameters_it_belongs_to(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, plan, steps=2).checked()
    held: dict[str, int] = {}
    for rank in run.ranks:
        for name, slots in rank.result["optimizer"].items():
            assert set(slots) == {"step", "exp_avg", "exp_avg_sq"}
            assert slots["exp_avg"] == slots["exp_avg_sq"]
            held[name] = held.get(name, 0) + math.prod(slots["exp_avg"])
    names = {name for rank in run.ranks for name in rank.result["parameters"]}
    assert set(held) == names
    if plan != "tp=2":  # tp=2 keeps replicated state twice
        assert sum(held.values()) == parameters_of_the_model()


def parameters_of_the_model() -> int:
    from scenarios import GPT, MODELS

    model: GPT = MODELS["gpt"](width=32, depth=4, heads=4, context=16, vocabulary=64)
    return sum(p.numel() for p in model.parameters())
