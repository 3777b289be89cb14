"""Batches of other kinds than a pair of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import slow
from rank_pool import RankPool

OPTIONS = {"depth": 2, "steps": 4, "global_batch": 8, "evaluate": {"every": 2}}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=2,accumulation=2", "dp=2,zero=3", slow("tp=2"), slow("dp=2,checkpointing")]
)
def test_a_mapping_is_the_arguments_of_the_model(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """``model(**batch)`` and ``loss(output, batch)``, with an entry that is itself a mapping."""
    pair = ranks.run(tmp_path / "pair", plan, **OPTIONS).checked()
    mapping = ranks.run(tmp_path / "mapping", plan, **OPTIONS, model="mapping", loss="mapping").checked()
    assert mapping.losses == pair.losses
    for step, line in pair.evaluations.items():
        assert mapping.evaluations[step]["metrics"] == line["metrics"]


@pytest.mark.slow
def test_a_loop_of_the_scripts_own_gets_the_mapping(ranks: RankPool, tmp_path: Path) -> None:
    options = {"depth": 2, "steps": 4, "global_batch": 8}
    pair = ranks.run(tmp_path / "pair", "dp=2", **options).checked()
    run = ranks.run(tmp_path / "own", "dp=2", **options, model="mapping", loss="mapping", own_loop={}).checked()
    assert run.losses == pair.losses


@pytest.mark.slow
def test_batches_that_cannot_be_cut_train_under_replicas(ranks: RankPool, tmp_path: Path) -> None:
    """A replica's batch is what collate_fn made of its samples; nothing is cut."""
    pair = ranks.run(tmp_path / "pair", "dp=2", **OPTIONS).checked()
    graphs = ranks.run(tmp_path / "graphs", "dp=2", **OPTIONS, model="graphs").checked()
    assert graphs.losses == pair.losses


def test_plans_that_cut_them_are_refused_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "accumulation=2", **OPTIONS, model="graphs")
    assert run.ranks[0].exit_code == 96
    assert "a batch of 8 samples has a Graphs, which cannot be cut into micro-batches" in run.ranks[0].output
    assert run.steps == []


def test_an_impossible_batch_is_refused_with_the_possible_ones(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", **OPTIONS, model="triple")
    assert run.ranks[0].exit_code == 92
    assert "a batch must be (input, target), either of them nested, or a mapping" in run.ranks[0].output
    assert "it is a tuple of 3" in run.ranks[0].output


def test_a_batch_object_with_its_labels_trains_under_replicas(ranks: RankPool, tmp_path: Path) -> None:
    """``model(batch)`` and ``loss(output, batch)``, also in a loop of the script's own."""
    options = {"depth": 2, "steps": 4, "global_batch": 8}
    pair = ranks.run(tmp_path / "pair", "dp=2", **options).checked()
    graphs = {"model": "labelled graphs", "loss": "labelled"}
    assert ranks.run(tmp_path / "graphs", "dp=2", **options, **graphs, own_loop={}).checked().losses == pair.losses
    assert ranks.run(tmp_path / "cut", "accumulation=2", **options, **graphs).ranks[0].exit_code == 96
