"""Before a job trains under a new plan, target ranks repeat its first steps, and refuse a plan that changes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cases import slow
from migration_driver import Mover

from clusterd.train.process.exits import PlanRefused
from clusterd.train.state.first_steps import FirstSteps, check_same
from plans.plan import Plan

ONE, TWO = Plan(), Plan.parse("dp=2")


@pytest.mark.parametrize(
    "model, plan, difference",
    [
        ("centring", "dp=2", "the loss of step 1 is"),
        ("echoing", "dp=2", "the loss of step 2 is"),
        slow("stretching", "dp=2", "in step 1, the gradient of"),
        slow("centring", "accumulation=2", "the loss of step 1 is"),
        slow("echoing", "dp=2,zero=3", "the loss of step 2 is"),
    ],
)
def test_a_plan_that_changes_losses_is_refused_and_the_job_goes_on(
    model: str, plan: str, difference: str, moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    expected = undisturbed(model=model)
    mover = moving(model=model)
    mover.start("dp=1")
    mover.train(2)
    reason = mover.refused_move(plan)
    assert difference in reason
    assert f"under {Plan.parse(plan)}" in reason
    mover.train(3)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=1e-6)


@pytest.mark.parametrize("model", ["dropping", slow("normalising")])
def test_a_model_whose_losses_depend_on_the_plan_by_nature_is_not_refused(
    model: str, moving: Callable[..., Mover]
) -> None:
    mover = moving(model=model)
    mover.start("dp=1")
    mover.train(2)
    assert mover.move("dp=2") is not None
    mover.train(3)
    mover.stop()


@pytest.mark.slow
def test_the_first_steps_follow_a_job_from_move_to_move(moving: Callable[..., Mover]) -> None:
    """Also from ranks that have not made them themselves."""
    mover = moving(model="centring")
    mover.start("dp=1")
    mover.train(1)
    mover.move("dp=1,checkpointing")
    mover.train(2)
    assert "under dp=1 from the same weights" in mover.refused_move("dp=2")
    mover.train(1)
    mover.stop()


@pytest.mark.slow
def test_weights_of_a_file_are_where_the_first_steps_begin(
    moving: Callable[..., Mover], pools: tuple[object, object], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    pools[0].run(tmp_path / "before", "dp=1", depth=2, steps=3, save=str(weights)).checked()  # type: ignore[attr-defined]
    mover = moving(init_from=str(weights))
    mover.start("dp=1")
    mover.train(2)
    assert mover.move("dp=2,zero=3") is not None
    mover.train(2)
    mover.stop()


def steps(plan: Plan, loss: float, *norms: float, weights: int = 1) -> FirstSteps:
    """First steps as they arrive in a message."""
    return FirstSteps.from_dict(FirstSteps(plan, weights).with_step(loss, norms).to_dict())


NAMES = ("wide", "narrow")


@pytest.mark.parametrize(
    "found, reason",
    [
        ((2.0001, 1.0005, 1e-2), ""),
        ((2.01, 1.0, 1e-2), "the loss of step 1 is 2.01 under dp=2, but 2 under dp=1"),
        ((2.0, 2.0, 1e-2), "the gradient of wide"),
        ((2.0, 1.0, 2e-2), "the gradient of narrow"),
        ((2.0, 1.0, 1.00001e-2), ""),
        ((2.0,), ""),
        ((float("nan"), 1.0, 1e-2), "the loss of step 1 is nan"),
        ((2.0, float("nan"), 1e-2), "the gradient of wide"),
    ],
)
def test_only_rounding_may_tell_two_plans_apart(found: tuple[float, ...], reason: str) -> None:
    recorded, repeated = steps(ONE, 2.0, 1.0, 1e-2), steps(TWO, *found)
    with pytest.raises(PlanRefused, match=reason) if reason else nullcontext():
        check_same(recorded, repeated, "fp32", NAMES)


def test_gradients_that_are_rounding_errors_are_not_compared() -> None:
    """Of a key's bias, for example, on which attention does not depend."""
    check_same(steps(ONE, 2.0, 1.0, 1e-8), steps(TWO, 2.0, 1.0, 5e-8), "fp32", NAMES)


def test_a_job_that_diverges_in_its_first_step_is_not_refused_for_that() -> None:
    lost = float("nan")
    check_same(steps(ONE, lost, lost, lost), steps(TWO, lost, lost, lost), "fp32", NAMES)


def test_models_with_other_initial_weights_are_not_compared() -> None:
    check_same(steps(ONE, 2.0), steps(TWO, 3.0, weights=2), "fp32", NAMES)
