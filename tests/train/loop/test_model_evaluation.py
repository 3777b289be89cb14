"""Evaluation beside training: the numbers of one process under every plan, and nothing lost in the middle of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool, Run

OPTIONS = {"depth": 2, "steps": 6, "global_batch": 8}
EVALUATE = {"samples": 37, "every": 3, "metric": "right"}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    known: dict[str, Run] = {}

    def run(**options: Any) -> Run:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = ranks.run(tmp_path_factory.mktemp("alone"), "dp=1", **options).checked()
        return known[key]

    return run


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2",
        "dp=3,shares=4:2:2",
        "dp=2,zero=3",
        "tp=2,pp=2,accumulation=2",
        "dp=2,pp=2,zero=2,accumulation=2",
        slow("dp=2,pp=2,zero=3,accumulation=2"),
        slow("dp=2,zero=1"),
        slow("dp=2,zero=2,accumulation=2"),
        slow("tp=2"),
        slow("dp=2,pp=2,accumulation=2"),
        slow("dp=2,tp=2,checkpointing"),
    ],
)
def test_every_plan_evaluates_to_the_numbers_of_one_process(
    plan: str, ranks: RankPool, alone: Callable[..., Run], tmp_path: Path
) -> None:
    """37 samples, which no plan divides evenly; a metric that counts some bytes only."""
    expected = alone(**OPTIONS, evaluate=EVALUATE).evaluations
    run = ranks.run(tmp_path, plan, **OPTIONS, evaluate=EVALUATE).checked()
    assert list(run.evaluations) == list(expected) == [3, 6]
    for step, line in run.evaluations.items():
        assert line["metrics"] == pytest.approx(expected[step]["metrics"], rel=1e-5)
    assert run.losses == pytest.approx(alone(**OPTIONS).losses, rel=1e-4)
    assert run.ranks[0].result["asked"]  # training data are read as without evaluations


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("plan", ["dp=2", "pp=2,accumulation=2", "dp=3,shares=4:2:2"])
def test_a_metric_that_is_no_mean_does_not_depend_on_the_plan(
    plan: str, whole: bool, ranks: RankPool, alone: Callable[..., Run], tmp_path: Path
) -> None:
    """F1 was .239, .225 or .173 from the same weights, and the best model was another one."""
    evaluate = {"samples": 37, "every": 3, "metric": "root", "batch": 4, "whole": whole}
    one = alone(**OPTIONS, evaluate=evaluate)
    run = ranks.run(tmp_path, plan, **OPTIONS, evaluate=evaluate).checked()
    for step, line in run.evaluations.items():
        assert line["metrics"] == pytest.approx(one.evaluations[step]["metrics"], rel=1e-5)
    told = sum(rank.output.count("it is no mean over samples") for rank in run.ranks)
    assert told == (0 if whole else 1)
    of_batches = alone(**OPTIONS, evaluate={**evaluate, "whole": False}).evaluations[3]["metrics"]["root"]
    assert whole == (abs(one.evaluations[3]["metrics"]["root"] - of_batches) > 1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_a_metric_that_counts_in_itself_is_called_once_for_each_batch(
    plan: str, ranks: RankPool, tmp_path: Path
) -> None:
    """The first batch counted twice, and of several replicas each counted its part without a word."""
    evaluate = {"samples": 37, "every": 3, "metric": "seen", "batch": 4}
    run = ranks.run(tmp_path, plan, **OPTIONS, evaluate=evaluate).checked()
    if plan == "dp=1":
        sizes = [4] * 9 + [1]
        of_batches = sum(size * sum(sizes[: number + 1]) for number, size in enumerate(sizes)) / 37
        assert run.evaluations[3]["metrics"] == {"metric": pytest.approx(of_batches)}
    told = f"metric keeps (metric).samples of its calls, but under {plan} a rank makes some of them"
    assert (told in run.ranks[0].output) == (plan == "dp=2")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "samples"), [("dp=2,zero=3", 1), ("dp=2,pp=2,accumulation=2", 1)])
def test_replicas_without_any_sample_take_part(
    plan: str, samples: int, ranks: RankPool, alone: Callable[..., Run], tmp_path: Path
) -> None:
    evaluate = {"samples": samples, "every": 3}
    run = ranks.run(tmp_path, plan, **OPTIONS, evaluate=evaluate).checked()
    for step, line in alone(**OPTIONS, evaluate=evaluate).evaluations.items():
        assert run.evaluations[step]["metrics"] == pytest.approx(line["metrics"], rel=1e-5)


@pytest.mark.slow
def test_evaluation_changes_nothing_of_training(alone: Callable[..., Run]) -> None:
    """Dropout, running statistics and counters, and the loss's own counters."""
    for changes in ({"loss": "counted"}, {"model": "tables"}):
        plain = alone(**OPTIONS, **changes)
        evaluated = alone(**OPTIONS, **changes, evaluate={"every": 2})
        assert evaluated.losses == plain.losses
        assert evaluated.ranks[0].result["buffers"] == plain.ranks[0].result["buffers"]


def test_evaluation_time_is_not_in_step_times(alone: Callable[..., Run]) -> None:
    run = alone(**OPTIONS, evaluate={"every": 2, "pace_s": 0.5, "samples": 16})
    assert all(line["time_s"] > 1.0 for line in run.evaluations.values())
    assert all(step["time_s"] < 0.5 for step in run.steps)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=3"])
def test_training_ends_when_the_metric_does_not_improve_and_the_best_model_is_saved(
    plan: str, ranks: RankPool, tmp_path: Path
) -> None:
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    evaluate = {"metric": "worse", "every": 2, "patience": 2, "save_best": str(best)}
    run = ranks.run(tmp_path, plan, depth=2, steps=50, evaluate=evaluate, save=str(last)).checked()
    assert list(run.evaluations) == [2, 4, 6]
    assert run.steps[-1]["step"] == 6
    assert "no better evaluation since step 2" in run.ranks[0].output
    saved = [torch.load(file) for file in (best, last)]
    assert saved[0].keys() == saved[1].keys()
    assert not torch.equal(saved[0]["head.out.weight"], saved[1]["head.out.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("plans", [("dp=1", "dp=2,zero=3", "dp=2"), slow(("dp=2", "tp=2", "pp=2,accumulation=2"))])
def test_moves_in_the_middle_of_evaluations_lose_none(
    plans: tuple[str, ...], moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    """An evaluation takes most of the time, so that each move meets one; the next ranks repeat it."""
    mover = moving(evaluate={"every": 2, "pace_s": 0.1, "samples": 200, "batch": 8})
    mover.start(plans[0])
    mover.train(2)
    for plan in plans[1:]:
        mover.move(plan)
        mover.train(2)
    last = mover.last_step
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(undisturbed()[: len(steps)], rel=1e-4)
    seen = [s["evaluated"] for s in mover.evaluations()]
    assert seen == sorted(set(seen))
    assert set(range(2, last, 2)) <= set(seen)


@pytest.mark.slow
def test_a_stop_in_the_middle_of_an_evaluation_is_obeyed_before_its_end(moving: Callable[..., Mover]) -> None:
    mover = moving(evaluate={"every": 2, "pace_s": 0.2, "samples": 10_000, "batch": 1})  # half an hour
    mover.start("dp=2")
    mover.wait(lambda: mover.last_step == 2)
    mover.stop()
    assert mover.evaluations() == []


@pytest.mark.slow
def test_a_second_stop_in_the_same_evaluation_saves_what_the_first_one_did(
    moving: Callable[..., Mover], tmp_path: Path
) -> None:
    """Before any batch is read."""
    evaluate = {"every": 2, "pace_s": 0.2, "samples": 10_000, "batch": 1}
    first = moving(evaluate=evaluate)
    first.start("dp=1")
    first.wait(lambda: first.last_step == 2)
    assert first.cancel(tmp_path / "first") == 2
    (tmp_path / "again").mkdir()
    second = Mover(first.pools, tmp_path / "again", first.options, rank_file={"restore": str(tmp_path / "first")})
    try:
        second.start("dp=1")
        second.cancel(tmp_path / "second")
    finally:
        second.close()
    left = [json.loads((tmp_path / name / "next_step.json").read_text()) for name in ("first", "second")]
    assert left[0] == left[1]
    assert left[0]["step"] == 3
