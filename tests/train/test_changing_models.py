"""Models that change during training keep their changes, or a one-line message names the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from scenarios import Recorded, job

from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.train.inspect.describe import describe

STEPS = 5
ALONE = "dp=1"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("model", "plan", "code", "says"),
    [
        ("thawing", ALONE, 92, "blocks.0.norm1.weight became trainable in this step (requires_grad)"),
        ("thawing", "dp=2", 92, "blocks.0.norm1.weight became trainable in this step (requires_grad)"),
        ("freezing", "dp=2", 96, "this step gave blocks.0.norm1.weight no gradient, but an earlier one did"),
        ("lazy", ALONE, 92, "head.out.weight has no shape yet"),
        ("scripted", ALONE, 92, "model() returned a TorchScript module"),
        ("derived", "dp=2,zero=2", 96, "if it computes gradients itself (torch.autograd.grad)"),
        ("compiled whole", "dp=1,checkpointing", 96, "compile each block instead"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    ranks: RankPool, tmp_path: Path, model: str, plan: str, code: int, says: str
) -> None:
    """There were tracebacks of torch, or a wrong reason; and late trainable parameters never trained."""
    for rank in ranks.run(tmp_path, plan, model=model, steps=STEPS, layers=False, tp_plan=False).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (code, False), rank.output
        assert says in rank.output


def test_stages_do_not_send_maps() -> None:
    shape = describe(job(Recorded(64), model="named"), trace=False)
    assert any("head returns something else" in why for why in check(Plan.parse("pp=2,accumulation=2"), shape))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ALONE, "dp=2"])
def test_late_frozen_parameters_stay_frozen_after_a_restart(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """The frozen parameter trained again."""
    options = {"model": "freezing", "optimizer": "momentum"}
    whole = ranks.run(tmp_path / "whole", ALONE, **options, steps=2 * STEPS).checked()
    left = {"final": str(tmp_path / "checkpoint")}
    first = [{**options, "steps": STEPS}]
    ranks.run_each(tmp_path / "first", ALONE, first, more=lambda _: left)[0].checked()
    rest = [{**options, "steps": 2 * STEPS}]
    run = ranks.run_each(tmp_path / "then", plan, rest, more=lambda _: {"restore": left["final"]})[0]
    assert run.checked().losses == pytest.approx(whole.losses[STEPS:], rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("model", "was"), [("remembering", "none"), ("growing", "of shape (1, 1, 32)")])
def test_a_buffer_that_is_made_later_is_saved_but_not_carried(
    ranks: RankPool, tmp_path: Path, model: str, was: str
) -> None:
    """A checkpoint lacked the buffer, or never completed, silently."""
    file = tmp_path / "saved.pt"
    left = {"final": str(tmp_path / "checkpoint")}
    options = {"model": model, "steps": STEPS, "save": str(file), "layers": False}
    run = ranks.run_each(tmp_path / "run", ALONE, [options], more=lambda _: left)[0]
    assert f"the buffer embed.before is of shape (16, 16, 32), but was {was} when the model was made" in (
        run.ranks[0].output
    )
    assert "Traceback" not in run.ranks[0].output
    assert torch.load(file, weights_only=True)["embed.before"].shape == (16, 16, 32)


@pytest.mark.slow
def test_counters_of_forward_passes_rule_out_accumulation(ranks: RankPool, tmp_path: Path) -> None:
    replicas = ranks.run(tmp_path / "replicas", "dp=2", model="cooling", steps=2).checked().ranks[0].output
    assert "depends on how" not in replicas
    run = ranks.run(tmp_path / "micro", "dp=1,accumulation=2", model="cooling", steps=2)
    assert (run.ranks[0].exit_code, run.losses) == (96, [])
    assert "the result depends on how the batch is cut: the loss is" in run.ranks[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "centred"}, ""),
        ({"loss": "centred module"}, "(loss).(buffers).large, which has changed and is large, is neither"),
        ({"model": "tempering", "layers": False, "tp_plan": False}, ""),
    ],
)
def test_tensors_outside_of_the_model_go_on(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    """They began anew after every move and restart, and the losses jumped; one that is too large is reported once."""
    whole = ranks.run(tmp_path / "whole", ALONE, **options, steps=2 * STEPS).checked()
    left = {"final": str(tmp_path / "checkpoint")}
    first = ranks.run_each(tmp_path / "first", ALONE, [{**options, "steps": STEPS}], more=lambda _: left)[0].checked()
    rest = [{**options, "steps": 2 * STEPS}]
    run = ranks.run_each(tmp_path / "then", ALONE, rest, more=lambda _: {"restore": left["final"]})[0].checked()
    assert first.losses + run.losses == whole.losses
    assert first.ranks[0].output.count(says or "neither migrated") == (1 if says else 0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["slow weights", "anchored"])
def test_an_optimizers_own_tensors_are_not_lost(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    """They began as zeros after every migration, and under zero=1 they belonged to other parameters."""
    left = {"final": str(tmp_path / "checkpoint")}
    options = [{"optimizer": optimizer, "steps": STEPS}]
    alone = ranks.run_each(tmp_path / "left", ALONE, options, more=lambda _: left)[0].ranks[0]
    assert "keeps tensors of its own in its attribute kept" in alone.output
    assert "Traceback" not in alone.output
    for rank in ranks.run(tmp_path / "plan", "dp=2,zero=1", **options[0]).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "keeps tensors for all of them in its attribute kept" in rank.output
