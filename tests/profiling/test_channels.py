"""Shapes that trials seldom see: cards in part use, and more hosts than were tried."""

from __future__ import annotations

import json

import numpy as np
import pytest

from clusterd.plans.plan import Plan
from clusterd.profiling.__main__ import main
from clusterd.profiling.coefficients import Prior
from clusterd.profiling.evaluate import Outcome, default_method, profile
from clusterd.profiling.model import Row, Rows
from clusterd.profiling.online import Observation, OnlineFit
from clusterd.profiling.placement import Allocation
from clusterd.profiling.table import Measured
from tests.profiling import drawn
from tests.profiling.channels import table
from tests.profiling.t4_tables import write
from tests.profiling.test_evaluation import DATA


def odd(one: Measured) -> bool:
    """True if a host uses a network card with one of its two devices."""
    return one.hosts > 1 and any(n % 2 for n in one.row.allocation.counts)


def rows_where(rows: list[Measured], outcome: Outcome, condition) -> tuple[float, float]:
    """Mean error and coverage of the rows that were no trials."""
    some = [i for i in outcome.held_out.tolist() if condition(rows[i])]
    return float(np.abs(outcome.errors[some]).mean()), float(outcome.covered[some].mean())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
def test_cards_in_part_use_are_learned_from_a_few_trials(factor):
    rows = table(seed=0, half_card=factor)
    errors, covered = rows_where(rows, profile(rows, default_method(), 7, 0), odd)
    assert errors < 0.15
    assert covered > 0.7


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_other_speeds_on_more_than_two_hosts_are_learned_from_few_trials(factor):
    found = []
    for seed in range(3):
        rows = table(seed=seed, beyond_two=factor, parameters=600_000_000)
        outcome = profile(rows, default_method(), 7, seed)
        found.append(rows_where(rows, outcome, lambda one: one.hosts > 2 and not odd(one)))
    errors, covered = np.mean(found, axis=0)
    assert errors < 0.12
    assert covered > 0.75


def test_a_card_in_part_use_is_more_uncertain_until_it_is_tried():
    rows = [one for one in table(seed=0) if one.hosts <= 2]
    known = [one for one in rows if not odd(one)]
    online = OnlineFit.start(Prior.typical(), [Observation(one.row, one.step_time_s) for one in known])

    def width_of(*counts: int) -> float:
        row = Row(rows[0].row.workload, Plan(dp=sum(counts)), Allocation.of(counts))
        return float(online.fit.predict(Rows.of([row])).width[0])

    before = width_of(3, 3)
    assert before > 1.05 * width_of(2, 2)
    tried = next(one for one in rows if one.row.allocation.counts == (1, 1) and one.row.plan == Plan(dp=2))
    online = online.observe(Observation(tried.row, tried.step_time_s))
    assert width_of(3, 3) < before


def test_one_slow_shape_tells_of_the_others():
    """A running job's fit, which starts from an optimum without the effect, finds it as well."""
    slow = table(seed=0, half_card=8.0)
    known = [one for one in slow if one.hosts <= 2 and not odd(one)]
    online = OnlineFit.start(Prior.typical(), [Observation(one.row, one.step_time_s) for one in known])
    tried, asked = (
        next(one for one in slow if one.row.allocation.counts == counts and one.row.plan == Plan(dp=sum(counts)))
        for counts in ((1, 1), (1, 3))
    )
    before = float(online.fit.predict(Rows.of([asked.row])).median_s[0])
    online = online.observe(Observation(tried.row, tried.step_time_s))
    after = float(online.fit.predict(Rows.of([asked.row])).median_s[0])
    assert before < 0.75 * asked.step_time_s
    assert after == pytest.approx(asked.step_time_s, rel=0.25)


@pytest.mark.slow
def test_drawn_clusters_are_predicted_with_honest_intervals():
    """Shared links, other algorithms on many hosts, stragglers, and network cards of one to all devices."""
    errors, covered = [], []
    for seed in range(drawn.REPORTED, drawn.REPORTED + 12):
        rows = drawn.table(seed)
        outcome = profile(rows, default_method(), 7, seed)
        errors.append(float(np.abs(outcome.errors[outcome.held_out]).mean()))
        covered.append(float(outcome.covered[outcome.held_out].mean()))
    assert np.mean(errors) < 0.12
    assert 0.85 < np.mean(covered) <= 0.97


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "pollux").exists(), reason=f"no measurements in {DATA}; set CLUSTERD_DATA")
def test_hosts_on_which_the_model_was_not_shaped(tmp_path, capsys):
    write(DATA / "pollux" / "t4", tmp_path / "t4.csv")

    def figures(*options: str) -> dict:
        assert main(["evaluate", str(tmp_path / "t4.csv"), "--seeds", "1", "--json", "--fast", *options]) == 0
        return json.loads(capsys.readouterr().out)

    near, far = figures("--most-hosts", "2"), figures()
    assert far["figures"]["mean_error"] < 0.12 < near["figures"]["mean_error"]
    assert set(near["hosts_beyond"]) == {"0", "1", "2"} and "odd" in far["counts"]
    assert far["figures"]["coverage_90"] > 0.8
