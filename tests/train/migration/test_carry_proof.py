"""Carry proof: a move whose target ranks do not go on as the source ranks do is refused while these train."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.train.state.next_steps import NextSteps, difference
from tests.foreign import registry
from tests.foreign.runs import REFUSED, RIGHT, Runner

GROUPS = "hidden_state", "own_loops", "settings"

numbers = st.floats(1e-3, 1e3)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    registry.load()
    made = Runner(tmp_path_factory.mktemp("moves"), [f"tests.foreign.{group}" for group in GROUPS])
    yield made
    made.close()


@pytest.mark.slow_after(1)
def test_state_that_is_not_carried_keeps_the_job_where_it_is(runner: Runner) -> None:
    verdict = runner.verdicts(registry.SCRIPTS["average_by_a_hook"], ["move"])["move"]
    assert verdict.verdict == REFUSED, verdict
    assert "does not go on under dp=2,zero=3 as under dp=1: the " in verdict.reason
    variable = r"tests\.foreign\.hidden_state\.average \(6 tensors of norm "
    assert re.search(rf"Variables of the script that differ: .*{variable}", verdict.reason)


def test_a_mask_that_the_loop_adds_is_named_where_a_move_lacks_it(runner: Runner) -> None:
    """The reason was that the plan "assigns it to other ranks", of which there are none."""
    verdict = runner.verdicts(registry.SCRIPTS["pruned_by_loop"], ["move"])["move"]
    assert verdict.verdict == REFUSED, verdict
    assert "the buffer 2.weight_mask is of shape (16, 16), but was none when the model was made" in verdict.reason


@pytest.mark.slow
def test_a_schedule_and_clipping_are_carried(runner: Runner) -> None:
    assert runner.verdicts(registry.SCRIPTS["clipped_one_cycle"], ["move"])["move"].verdict == RIGHT


def steps(*losses: float, norms: dict[str, float] | None = None, rates: dict[str, float] | None = None) -> NextSteps:
    return NextSteps(list(losses), norms or {}, rates or {})


@given(numbers, numbers, st.floats(-1e-5, 1e-5))
def test_rounding_is_no_difference(loss: float, norm: float, off: float) -> None:
    one = steps(loss, loss, norms={"w": norm, "b": norm / 1e6}, rates={"w": loss})
    other = steps(loss * (1 + off), loss, norms={"w": norm * (1 + off), "b": norm / 2e6}, rates={"w": loss})
    assert difference(one, other, "fp32").excess <= 1


@given(numbers, st.floats(1.01, 100))
def test_the_largest_difference_is_named(value: float, times: float) -> None:
    same = steps(value, value, norms={"w": value}, rates={"w": value})
    assert "2 steps later" in str(difference(same, steps(value, value * times), "fp32"))
    assert "gradient of w" in str(difference(same, steps(value, norms={"w": value * times}), "fp32"))
    rates = difference(same, steps(value * times, rates={"w": value * times}), "fp32")
    assert ("learning rate of w" in str(rates), rates.random) == (True, False)


@pytest.mark.slow
def test_what_is_not_finite_differs_from_what_is() -> None:
    assert difference(steps(math.nan), steps(1.0), "fp32").excess > 1
    assert difference(steps(math.nan), steps(math.inf), "fp32").excess <= 1
