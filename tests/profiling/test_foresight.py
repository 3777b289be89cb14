"""Forecast of a job's remaining training, and cases without one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.profiling.progress import (
    IN_A_ROW,
    LossCurve,
    Predictability,
    Submission,
    fit_loss,
    held_out_error,
    probability_predictable,
)


def losses(b0: float, b1: float, b2: float, count: int, noise: float = 0.01) -> tuple[list[int], list[float]]:
    random = np.random.default_rng(0)
    steps = list(range(1, count + 1))
    return steps, [(1 / (b0 * k + b1) + b2) * (1 + noise * random.standard_normal()) for k in steps]


@pytest.mark.parametrize(("b0", "b1", "b2"), [(0.01, 0.4, 1.2), (1e-4, 0.2, 0.1), (0.1, 0.1, 3.0)])
def test_a_loss_curve_is_found_again(b0, b1, b2):
    curve = fit_loss(*losses(b0, b1, b2, 2000))
    assert curve is not None
    assert curve.loss(3000) == pytest.approx(1 / (b0 * 3000 + b1) + b2, rel=0.05)


@given(st.floats(1e-5, 1), st.floats(0.01, 10), st.floats(0, 10), st.floats(0, 1e6))
def test_the_inverse_undoes_the_curve(b0, b1, b2, step):
    curve = LossCurve(b0, b1, b2, 0.0)
    reached = curve.step_of(curve.loss(step))
    if reached is not None:  # None: the loss equals its limit to the last digit
        assert curve.loss(reached) == pytest.approx(curve.loss(step), rel=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=0, max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_losses_break_the_fit(values):
    curve = fit_loss(list(range(len(values))), values)
    assert curve is None or math.isfinite(curve.loss(100.0))


def test_broken_losses_are_passed_over():
    steps, values = losses(0.01, 0.4, 1.2, 500)
    values[50], values[51] = float("nan"), float("inf")
    values[200] = 80.0
    curve = fit_loss(steps, values)
    assert curve is not None and curve.loss(500) == pytest.approx(1 / 5.4 + 1.2, rel=0.05)
    assert fit_loss([1, 2, 3], [3.0, 2.0, 1.0]) is None


def test_a_first_try_is_judged_otherwise_than_a_repeated_long_job():
    first = Submission(steps=100, learning_rate=0.5)
    again = Submission(submitted_before=True, steps=50_000, known_model=True, devices=4)
    assert probability_predictable(first) < 0.4 < 0.95 < probability_predictable(again)


def test_a_job_becomes_predictable_and_ceases_to_be_with_hysteresis():
    state = Predictability.at_submission(0.3, "prior weights")
    assert "30%" in state.reason and Predictability.at_submission(0.6, "").predictable
    for _ in range(IN_A_ROW - 1):
        state = state.observe(0.05)
    assert not state.predictable
    state = state.observe(0.15).observe(0.05).observe(0.05)
    assert not state.predictable  # the run was broken
    state = state.observe(0.05)
    assert state.predictable and "3 times running" in state.reason
    for _ in range(10):
        state = state.observe(0.15)  # worse than needed to become so, not bad enough to cease
    assert state.predictable
    state = state.observe(0.5).observe(None).observe(0.5).observe(0.5)
    assert not state.predictable


def test_a_smooth_loss_can_be_foretold_and_a_diverging_one_cannot():
    steps, values = losses(0.01, 0.4, 1.2, 400)
    assert held_out_error(steps, values) < 0.1
    values[300:] = [v * (1 + 0.03 * i) for i, v in enumerate(values[300:])]
    assert held_out_error(steps, values) > 0.2
    assert held_out_error(steps[:8], values[:8]) is None
