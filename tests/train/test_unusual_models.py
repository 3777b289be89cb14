"""Unusual models, optimizers and schedulers that train correctly under every allowed plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool
from torch import nn

from clusterd.plans.plan import Plan
from clusterd.train.loop.step import clip_gradients

STEPS = 5
ALONE = "dp=1"


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp=2,accumulation=1,schedule=gpipe", "dp=1,checkpointing"])
def test_running_statistics_see_every_sample_once(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Without the shape-inference pass of a pipeline and without recomputations."""
    seen = []
    for name, under in (("alone", ALONE), ("plan", plan)):
        run = ranks.run(tmp_path / name, under, model="normed", steps=STEPS, depth=4).checked()
        seen.append({key: value for rank in run.ranks for key, value in rank.result["buffers"].items()})
    assert seen[1] == {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in seen[0].items()}
    assert seen[1]["blocks.3.seen.num_batches_tracked"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,tp=2", "dp=2,pp=2,accumulation=2", "dp=2,accumulation=2"])
def test_replicas_may_use_different_experts(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    options = {"model": "routed", "steps": STEPS, "optimizer": "sgd", "find_unused_parameters": True}
    alone = ranks.run(tmp_path / "alone", ALONE, **options).checked()
    assert ranks.run(tmp_path / "plan", plan, **options).checked().losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("head normed", "tp=2"),
        slow("head normed", "dp=2,tp=2,accumulation=2"),
        slow("head normed", "dp=2,tp=2,zero=3"),
        slow("head normed", "tp=2,pp=2,accumulation=2"),
        slow("tied", "dp=2,tp=2"),
        ("tied", "tp=2,checkpointing"),
    ],
)
def test_replicated_parameters_of_tensor_parallel_shards_learn_from_all(
    ranks: RankPool, tmp_path: Path, model: str, plan: str
) -> None:
    """A norm that all heads share has partial gradients on each shard.

    An embedding that is also the output layer would be cut for one of the two.
    """
    weights = []
    for name, under in (("alone", ALONE), ("plan", plan)):
        file = tmp_path / f"{name}.pt"
        ranks.run(tmp_path / name, under, model=model, steps=STEPS, optimizer="sgd", save=str(file)).checked()
        weights.append(torch.load(file, weights_only=True))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_where_that_cannot_be_carried_it_is_said(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "sided", "steps": STEPS}
    for sees_batch in ("global", "replica"):
        options["sees_batch"] = sees_batch
        refused = ranks.run(tmp_path / sees_batch, "dp=2,zero=2", **options).ranks[0]
        assert (refused.exit_code, "computes something else than one process" in refused.output) == (96, True)
    told = ranks.run(tmp_path / "told", "dp=2,zero=2", **options, find_unused_parameters=True)
    assert [rank.exit_code for rank in told.ranks] == [96, 96]
    assert "replicas may use different parameters (find_unused_parameters)" in told.ranks[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"schedule": "onecycle", "optimizer": "momentum"}, {"schedule": "warmup", "optimizer": "rows and others"}],
    ids=str,
)
def test_a_schedule_reaches_all_of_a_sharded_optimizer(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Momentum, and the learning rates of inner optimizers."""
    options["steps"] = 8
    alone = ranks.run(tmp_path / "alone", ALONE, **options).checked()
    run = ranks.run(tmp_path / "plan", "dp=2,zero=1", **options).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"script": "optimizer_in_a_wrapper"},
            "which is no torch.optim.Optimizer, or has not called its __init__: no move and no checkpoint would have",
        ),
        ({"stream": "without"}, "data is a stream (WithoutPosition) without a position"),
        (
            {"optimizer": "with the loss"},
            "the optimizer has parameters that its factory was not given",
        ),
        ({"optimizer": "lbfgs"}, "LBFGS computes the loss several times per step (its step() needs a closure)"),
        ({"schedule": "plateau"}, "ReduceLROnPlateau needs a metric: pass evaluate=train.Evaluation("),
        ({"loss": "of each sample"}, "; it must return the mean over the samples it is given, a scalar"),
        ({"model": "still"}, "the model has no trainable parameter"),
    ],
)
@pytest.mark.parametrize("plan", [ALONE, "dp=2,zero=1"])
def test_a_model_that_no_plan_can_train_is_refused_in_one_line(
    ranks: RankPool, tmp_path: Path, plan: str, options: dict[str, str], says: str
) -> None:
    for rank in ranks.run(tmp_path, plan, steps=STEPS, **options).ranks:
        assert rank.exit_code == 92
        assert says in rank.output
        assert "Traceback" not in rank.output


@pytest.mark.slow
def test_a_model_may_leave_something_out_later(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(tmp_path / "alone", ALONE, model="fading", steps=STEPS).checked()
    silent = ranks.run(tmp_path / "silent", "dp=2", model="fading", steps=STEPS)
    assert "this step gave embed.start.weight no gradient, but an earlier one did" in silent.ranks[0].output
    told = ranks.run(tmp_path / "told", "dp=2", model="fading", steps=STEPS, find_unused_parameters=True)
    assert told.checked().losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "cosine"},
        {"optimizer": "counting"},
        {"model": "masked"},
        {"model": "counting"},
        {"loss": "counted"},
        {"schedule": "onecycle", "optimizer": "sgd"},
    ],
    ids=str,
)
def test_it_goes_on_from_its_checkpoint(ranks: RankPool, tmp_path: Path, options: dict[str, str]) -> None:
    """State of every kind is restored.

    NumPy scalars in the schedule, state of no parameter, a shared table, counters of the model or the loss, and
    scheduled momentum.
    """
    whole = ranks.run(tmp_path / "whole", ALONE, steps=2 * STEPS, **options).checked()
    left = {"final": str(tmp_path / "checkpoint")}
    ranks.run_each(tmp_path / "first", ALONE, [{"steps": STEPS, **options}], more=lambda _: left)[0].checked()
    goes_on = {"restore": left["final"]}
    run = ranks.run_each(tmp_path / "then", "dp=2", [{"steps": 2 * STEPS, **options}], more=lambda _: goes_on)[0]
    assert run.checked().losses == pytest.approx(whole.losses[STEPS:], rel=1e-5)


def losses_through(mover: Mover, *plans: str) -> list[float]:
    """Losses of a job that begins under the first plan and migrates to the others."""
    mover.start(plans[0])
    for plan in plans[1:]:
        mover.train(2)
        mover.move(plan)
    mover.train(3)
    return [step["loss"] for step in mover.stop()]


@pytest.mark.parametrize(
    "options", [slow({"model": "counting"}), slow({"model": "cooling"}), slow({"optimizer": "own count"})], ids=str
)
def test_counters_of_modules_and_optimizers_continue(
    moving: Callable[..., Mover],
    undisturbed: Callable[..., list[float]],
    ranks: RankPool,
    tmp_path: Path,
    options: dict[str, str],
) -> None:
    """Counters restarted at every migration and checkpoint; a length without its table is skipped."""
    expected = undisturbed(**options)
    losses = losses_through(moving(**options), ALONE, "dp=2,zero=1", "dp=2,zero=3", ALONE)
    assert losses == pytest.approx(expected[: len(losses)], rel=1e-4)
    whole = ranks.run(tmp_path / "whole", ALONE, **options, steps=2 * STEPS).checked()
    left = {"final": str(tmp_path / "checkpoint")}
    first = [{**options, "steps": STEPS}]
    ranks.run_each(tmp_path / "first", ALONE, first, more=lambda _: left)[0].checked()
    rest = [{**options, "steps": 2 * STEPS}]
    run = ranks.run_each(tmp_path / "then", "dp=2", rest, more=lambda _: {"restore": left["final"]})[0]
    assert run.checked().losses == pytest.approx(whole.losses[STEPS:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "plateau", "evaluate": {"every": 2}},
        {"schedule": "plateau", "evaluate": {"every": 1}},
        {"schedule": "by epochs", "samples": 64},
        {"schedule": "by number"},
    ],
    ids=str,
)
def test_schedulers_that_need_a_metric_or_an_epoch_are_given_it(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    alone = ranks.run(tmp_path / "one", ALONE, depth=2, steps=60, **options).checked()
    rates = [step["lr"] for step in alone.steps]
    assert len(set(rates)) > 2, "the test is of no use if the rate does not change"
    mover = moving(**options)
    mover.start(ALONE)
    for plan in ("dp=2", "pp=2,accumulation=2"):
        mover.train(5)
        mover.move(plan)
    mover.train(5)
    steps = mover.stop()[:60]
    assert [step["lr"] for step in steps] == rates[: len(steps)]
    assert [step["loss"] for step in steps] == pytest.approx(alone.losses[: len(steps)], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cached", slow("held")])
def test_tensors_that_a_model_keeps_are_real(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]], model: str
) -> None:
    """A cached table was created without values while the model was described, and all losses were 0."""
    losses = losses_through(moving(model=model), ALONE, "dp=2", ALONE)
    assert losses[0] > 1.0
    assert losses == pytest.approx(undisturbed(model=model)[: len(losses)], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        slow({"model": "marked", "optimizer": "by marks"}),
        slow({"optimizer": "by names"}),
        slow({"model": "hooked"}),
    ],
    ids=str,
)
def test_attributes_of_parameters_move_with_them(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]], options: dict[str, Any]
) -> None:
    """Attributes and names by which an optimizer forms groups, and gradient hooks."""
    plans = ["dp=2", "dp=2,zero=1", "dp=2,offload=optimizer"]
    plans += ["dp=2,zero=2", "tp=2"] if options.get("model") != "hooked" else []
    losses = losses_through(moving(**options), ALONE, *plans)
    assert losses == pytest.approx(undisturbed(**options)[: len(losses)], rel=1e-4)


@pytest.mark.slow
def test_a_batch_is_cut_between_its_samples_or_not_at_all(ranks: RankPool, tmp_path: Path) -> None:
    """Of transposed texts, each rank read as many tokens as it had samples."""
    options = {"model": "turned", "steps": STEPS, "global_batch": 12}
    alone = ranks.run(tmp_path / "alone", ALONE, **options).checked()
    run = ranks.run(tmp_path / "plan", "dp=2", **options).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    refused = ranks.run(tmp_path / "refused", "dp=1,accumulation=2", **options).ranks[0]
    assert (refused.exit_code, "Traceback" in refused.output) == (96, False)
    assert "which cannot be cut into micro-batches: the first dimension of each tensor" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=2", "tp=2"])
def test_a_hook_is_given_no_part_of_a_gradient(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    run = ranks.run(tmp_path, plan, model="hooked", steps=STEPS)
    assert {rank.exit_code for rank in run.ranks} == {96}
    assert "the hook on embed.token.weight needs it whole" in run.ranks[0].output


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", ["fainting", "settling", "drawing"])
def test_recomputed_activations_equal_the_first_ones(ranks: RankPool, tmp_path: Path, model: str) -> None:
    """A recomputation sees buffers, counters and the random numbers of Python and NumPy as the first pass did."""
    alone = ranks.run(tmp_path / "alone", ALONE, model=model, steps=STEPS).checked()
    again = ranks.run(tmp_path / "again", "dp=1,checkpointing", model=model, steps=STEPS).checked()
    assert again.losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,accumulation=2", "dp=2,zero=1"])
def test_a_model_may_compute_parts_again_by_itself(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Replicas failed at their first step, which searched for unused parameters."""
    alone = ranks.run(tmp_path / "alone", ALONE, model="reentrant", steps=STEPS).checked()
    run = ranks.run(tmp_path / "plan", plan, model="reentrant", steps=STEPS).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


def test_one_that_does_so_is_no_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    """Regression: the first backward pass raised an exception."""
    for rank in ranks.run(tmp_path, "pp=2,accumulation=2", model="reentrant", steps=STEPS).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "the model uses reentrant checkpoints" in rank.output


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=3,checkpointing", slow("dp=2,pp=2,zero=2,accumulation=2")])
def test_compiled_blocks_are_sharded_from_outside(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Inside, the compiler met the shards."""
    alone = ranks.run(tmp_path / "alone", ALONE, model="compiled", steps=STEPS, depth=2).checked()
    run = ranks.run(tmp_path / "plan", plan, model="compiled", steps=STEPS, depth=2).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("plan", ["pp=2,accumulation=1,schedule=gpipe", slow("dp=2,pp=2,zero=3,accumulation=2")])
def test_stages_send_non_contiguous_tensors(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """A transposed activation, and its gradient: process groups send neither."""
    alone = ranks.run(tmp_path / "alone", ALONE, model="transposed", steps=STEPS).checked()
    run = ranks.run(tmp_path / "plan", plan, model="transposed", steps=STEPS).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [slow(None), 0.1])
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,offload=optimizer", slow("tp=2"), slow("pp=2,accumulation=2")])
def test_a_sparse_gradient_is_clipped_and_offloaded(
    ranks: RankPool, tmp_path: Path, plan: str, clip_norm: float | None
) -> None:
    options = {"model": "sparse", "optimizer": "adagrad", "steps": STEPS, "clip_norm": clip_norm}
    alone = ranks.run(tmp_path / "alone", ALONE, **options).checked()
    assert ranks.run(tmp_path / "plan", plan, **options).checked().losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "dp=2,zero=3", "zero=3,offload=parameters", "dp=2,tp=2"])
def test_a_sparse_gradient_is_not_cut_and_not_in_a_bucket(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    for rank in ranks.run(tmp_path, plan, model="sparse", optimizer="sgd", steps=STEPS).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "embed.token.weight is" in rank.output


def test_a_sparse_gradient_is_scaled_once_for_each_row() -> None:
    """A row that was looked up twice has two parts, whose norms are not that of their sum."""
    rows = torch.tensor([0, 2, 2])
    norms, clipped = [], []
    for sparse in (False, True):
        table = nn.Embedding.from_pretrained(torch.ones(4, 3), freeze=False, sparse=sparse)
        (table(rows) * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
        norms.append(clip_gradients([table.weight], Plan(), torch.device("cpu"), 1.0))
        assert table.weight.grad is not None
        clipped.append(table.weight.grad.to_dense() if sparse else table.weight.grad)
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(clipped[1], clipped[0])


@pytest.mark.slow
def test_a_parameter_that_is_wanted_whole_where_it_is_in_parts_is_told_of(ranks: RankPool, tmp_path: Path) -> None:
    """Regression: the script ended with a traceback of torch."""
    for rank in ranks.run(tmp_path, "dp=2,zero=3", model="borrowing", steps=STEPS).ranks:
        assert (rank.exit_code, "Traceback" in rank.output) == (96, False)
        assert "the script computes with one outside the forward pass of its module" in rank.output


def test_a_model_that_comes_for_evaluation_is_trained(ranks: RankPool, tmp_path: Path) -> None:
    """Regression: the model was trained without dropout, and nothing said so."""
    losses = [
        ranks.run(tmp_path / model, ALONE, model=model, steps=STEPS).checked().losses for model in ("gpt", "evaluated")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=2,accumulation=2"])
def test_a_parameter_without_dimensions_is_trained_whole(plan: str, ranks: RankPool, tmp_path: Path) -> None:
    """FSDP2 cuts along dimensions; a learned scale has none, and counts once in the gradients' norm."""
    options = {"model": "stray", "steps": STEPS, "layers": False, "clip_norm": 0.5, "optimizer": "momentum"}
    alone = ranks.run(tmp_path / "alone", ALONE, **options).checked()
    run = ranks.run(tmp_path / "plan", plan, **options).checked()
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    (scale,) = {rank.result["sums"]["scale"] for rank in run.ranks}
    assert scale == pytest.approx(alone.ranks[0].result["sums"]["scale"], rel=1e-5)


@pytest.mark.slow
def test_a_parameter_without_dimensions_goes_on_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    options = {"model": "stray", "layers": False, "optimizer": "momentum"}
    alone = ranks.run(tmp_path / "alone", ALONE, **options, steps=2 * STEPS).checked()
    left = {"final": str(tmp_path / "checkpoint")}
    ranks.run_each(tmp_path / "first", "dp=2,zero=3", [{**options, "steps": STEPS}], more=lambda _: left)[0].checked()
    for plan in ("dp=3,zero=3,shares=4:4:8", "dp=2,zero=3,offload=parameters", ALONE):
        rest = [{**options, "steps": 2 * STEPS}]
        run = ranks.run_each(tmp_path / plan, plan, rest, more=lambda _: {"restore": left["final"]})[0].checked()
        assert run.losses == pytest.approx(alone.losses[STEPS:], rel=1e-5)
