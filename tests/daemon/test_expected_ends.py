"""Expected ends of jobs, and reasons where there is none."""

from __future__ import annotations

import random

import pytest

from clusterd.daemon.profiling.profiler import POINTS_MOST, LossForecast
from clusterd.profiling.progress import Predictability


def test_a_smooth_curve_says_when_the_target_is_reached() -> None:
    """loss(k) = 1 / (0.01 k + 0.5) + 1 reaches 1.5 at step 150."""
    ending = LossForecast(Predictability(True, "by features"))
    for step in range(1, 101):
        ending.add(step, 1.0 / (0.01 * step + 0.5) + 1.0)
    found = ending.judge(1.5)
    assert found is not None and found[0] and found[1] is not None
    assert abs(found[1] - 150) <= 8
    assert ending.judge(1.5) is None  # nothing new is not told twice


def test_a_job_whose_loss_jumps_about_stops_being_predictable_and_comes_back() -> None:
    """Both ways, and only after several judgements that agree."""
    chance = random.Random(0)
    ending = LossForecast(Predictability(True, "by features"))
    answers = []
    for step in range(1, 400):
        ending.add(step, 2.0 if step % 40 < 20 else chance.uniform(0.1, 9.0))
        if step % 40 == 0:
            ending.judge(None)
            answers.append(ending.predictability.predictable)
    assert answers[0] and not answers[-1]
    fresh = LossForecast(ending.predictability)
    for step in range(1, 400):
        fresh.add(step, 1.0 / (0.02 * step + 0.4) + 0.5)
        if step % 40 == 0:
            fresh.judge(None)
    assert fresh.predictability.predictable


def test_a_long_run_is_thinned_and_what_is_no_loss_is_left_out() -> None:
    ending = LossForecast(Predictability(True, "by features"))
    for step in range(1, 5 * POINTS_MOST):
        ending.add(step, float("nan") if step % 7 == 0 else 1.0 / step)
    ending.add(3, 1.0)  # a step that is done again
    assert len(ending.points) <= POINTS_MOST
    assert [step for step, _ in ending.points] == sorted({step for step, _ in ending.points})


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_curve_that_has_become_flat_says_never_and_not_after_the_end_of_time(seed: int) -> None:
    """The number goes into the journal, which has 64 bits for it."""
    chance = random.Random(seed)
    level = chance.choice([0.5, 0.69, 2.3, 10.8])
    ending = LossForecast(Predictability(True, "by features"))
    for point in range(1, 20):
        ending.add(50 * point, level * (1 + 0.01 * chance.gauss(0, 1)))
        if ending.is_due and (found := ending.judge(0.95 * level)) is not None:
            assert found[1] is None or found[1] < 1e12
