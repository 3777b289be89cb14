"""Callbacks that change the training, and samplers and data that depend on what was done before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_pool import RankPool
from torch import nn

from clusterd.plans.plan import Plan
from clusterd.train.loop.callbacks import Callbacks, ModelCalls


@pytest.fixture(scope="module")
def scripts() -> Iterator[RankPool]:
    pool = RankPool(modules=["tests.foreign.hidden_state", "tests.foreign.trainers"])
    yield pool
    pool.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("script", "plan", "reason"),
    [
        (
            "curriculum_by_callback",
            "dp=2",
            "on_step has changed (data).difficulty from 0.0 to 0.1, but is called ",
        ),
        ("hardest_first", "dp=2", "replicas have other orders of the samples of epoch 1: "),
        (
            "rate_by_callback",
            "dp=2",
            "on_step has changed the learning rate of 0.weight from 0.1 to 0.05",
        ),
        ("temperature_by_callback", "dp=2,zero=3", "on_step has changed (loss).temperature from 1.2 to 1.4"),
        ("hardest_first", "dp=2,zero=3", "replicas have other orders of the samples of epoch 1: "),
    ],
)
def test_a_plan_of_several_ranks_is_refused_on_all_of_them(
    scripts: RankPool, tmp_path: Path, script: str, plan: str, reason: str
) -> None:
    for rank in scripts.run(tmp_path, plan, script=script, steps=12).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False), rank.output
        assert reason in rank.output


@pytest.mark.slow_after(1)
def test_a_callback_that_calls_a_model_in_shards_is_refused(scripts: RankPool, tmp_path: Path) -> None:
    """Its shards come from ranks that do not call it."""
    first = scripts.run(tmp_path / "shards", "dp=2,zero=3", script="sampled_by_callback", steps=6).ranks[0]
    assert (first.exit_code, "Traceback" in first.output) == (96, False), first.output
    assert (
        "on_evaluate computes with the model on rank 0 alone, and ranks of dp=2,zero=3 have shards of it"
        in first.output
    )
    whole = scripts.run(tmp_path / "whole", "dp=2", script="sampled_by_callback", steps=6).checked()
    assert "clusterd: " not in whole.ranks[0].output


def test_one_process_is_told_why_it_gets_no_further_ranks(scripts: RankPool, tmp_path: Path) -> None:
    output = scripts.run(tmp_path, "dp=1", script="temperature_by_callback", steps=6).checked().ranks[0].output
    assert output.count("on_step has changed (loss).temperature from 1.2 to 1.4") == 1
    assert output.count("clusterd: ") == 1


def test_samples_that_depend_on_how_many_were_read_are_told(scripts: RankPool, tmp_path: Path) -> None:
    output = scripts.run(tmp_path, "dp=2", script="data_that_counts", steps=3).checked().ranks[0].output
    assert "samples of the data set are others each time that they are read" in output


def test_a_callback_that_changes_nothing_is_left_alone() -> None:
    """Numbers that are not numbers equal themselves, and lists are the script's own records."""
    loss = SimpleNamespace(best=math.nan, seen=[])
    asked: list[Any] = []
    training: Any = SimpleNamespace(
        job=SimpleNamespace(on_step=lambda step, _: loss.seen.append(step), on_evaluate=None, data=[]),
        attributes=SimpleNamespace(roots={"(loss)": loss}),
        rates=dict,
        context=SimpleNamespace(plan=Plan(dp=2)),
        parallel=SimpleNamespace(module=nn.Linear(1, 1)),
    )
    control: Any = SimpleNamespace(request=lambda *given: asked.append(given))
    callbacks = Callbacks(training, control, ModelCalls(training))
    for step in range(1, 5):
        callbacks.call("on_step", step, {})
        callbacks.call("on_evaluate", step, {})
    assert (loss.seen, asked) == ([1, 2, 3, 4], [])
