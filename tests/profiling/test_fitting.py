"""Fits recover known truths, and their uncertainty is calibrated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import INDEX, Prior
from clusterd.profiling.design import DesignOptions, next_trials
from clusterd.profiling.evaluate import Method, default_method, profile
from clusterd.profiling.fit import fit, share_hardware
from clusterd.profiling.model import Row, Rows, predict
from clusterd.profiling.online import STEPS, Observation, OnlineFit
from clusterd.profiling.placement import Allocation
from tests.profiling.worlds import CONVOLUTIONS, FAST_NETWORK, SLOW_NETWORK, TRANSFORMER, measured, truth

WORLDS = {
    "slow network": (TRANSFORMER, truth(**SLOW_NETWORK), 1, True),
    "fast network": (TRANSFORMER, truth(**FAST_NETWORK), 2, True),
    "convolutions": (CONVOLUTIONS, truth(compute_rate=0.3e12, launch_s=1.5e-4, step_s=8e-3), 4, False),
    "links between neighbours": (TRANSFORMER, truth(further_ranks=1.6, local_rate=15e9), 2, True),
    "one card a host": (TRANSFORMER, truth(card_growth=0.3, network_rate=5e9), 4, True),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", WORLDS)
def test_seven_trials_foretell_the_rest_of_a_world_unlike_the_prior(name):
    load, logs, card, parallel = WORLDS[name]
    errors, covered = [], []
    for seed in range(3):
        table = measured(logs, load, seed=seed, parallel=parallel, devices_per_card=card)
        outcome = profile(table, default_method(), budget=7, seed=seed)
        assert len(outcome.chosen) == 7
        errors.append(np.abs(outcome.errors[outcome.held_out]).mean())
        covered.append(outcome.covered[outcome.held_out].mean())
    assert np.mean(errors) < 0.12
    assert np.mean(covered) > 0.75


def test_all_of_a_table_gives_the_truth_to_the_noise():
    table = measured(truth(), TRANSFORMER, noise=0.01)
    rows = Rows.of(m.row for m in table)
    learned = fit(rows, [m.step_time_s for m in table], Prior.typical())
    real = predict(truth(), rows)
    assert np.abs(learned.predict(rows).median_s / real - 1).mean() < 0.015
    assert learned.best.structure.devices_per_card == 2
    assert math.exp(learned.best.logs[INDEX["compute_rate"]]) == pytest.approx(80e12, rel=0.2)


def test_one_measurement_leaves_other_plans_very_uncertain():
    table = measured(truth(), TRANSFORMER)
    rows = Rows.of(m.row for m in table)
    learned = fit(rows[[0]], [table[0].step_time_s], Prior.typical())
    width = learned.predict(rows).width
    far = [i for i, m in enumerate(table) if m.hosts == 4]
    assert np.min(width[far]) > max(0.15, 1.3 * width[0])


def test_nothing_measured_is_the_prior_and_says_so():
    rows = Rows.of([Row(TRANSFORMER, Plan(dp=4), Allocation.of((4,)))])
    low, high = fit(rows[[]], [], Prior.typical()).predict(rows).interval()
    assert high[0] / low[0] > 10


def test_the_order_of_measurements_does_not_matter():
    table = measured(truth(), TRANSFORMER)[:12]
    order = np.random.default_rng(3).permutation(12)
    rows, times = Rows.of(m.row for m in table), np.array([m.step_time_s for m in table])
    one = fit(rows, times, Prior.typical()).predict(rows)
    other = fit(rows[order], times[order], Prior.typical()).predict(rows)
    assert np.allclose(one.median_s, other.median_s, rtol=2e-3)


def test_one_wild_measurement_does_not_spoil_the_others():
    table = measured(truth(), TRANSFORMER, noise=0.01)
    rows, times = Rows.of(m.row for m in table), np.array([m.step_time_s for m in table])
    spoilt = times.copy()
    spoilt[10] *= 1.8
    learned = fit(rows, spoilt, Prior.typical()).predict(rows)
    others = np.delete(np.abs(learned.median_s / times - 1), 10)
    assert others.mean() < 0.03


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_step_times_are_refused(bad):
    rows = Rows.of([Row(TRANSFORMER, Plan(), Allocation.of((1,)))])
    with pytest.raises(ValueError, match="above 0 seconds"):
        fit(rows, [bad], Prior.typical())


def test_hardware_known_from_one_model_helps_the_next():
    first = measured(truth(**SLOW_NETWORK), TRANSFORMER, noise=0.01)
    known = fit(Rows.of(m.row for m in first), [m.step_time_s for m in first], Prior.typical())
    prior = share_hardware(Prior.typical(), {"first": known})
    i = INDEX["network_rate"]
    assert prior.width[i] < Prior.typical().width[i] / 2
    assert prior.width[INDEX["compute_rate"]] == Prior.typical().width[INDEX["compute_rate"]]
    other = replace(TRANSFORMER, name="second", parameters=300_000_000, layers=24, flops_per_sample=0.7e12)
    table = measured(truth(**{**SLOW_NETWORK, "compute_rate": 40e12, "overlap": 0.6}), other, seed=5)
    singles = [i for i, m in enumerate(table) if m.hosts == 1][:5]
    rows = Rows.of(m.row for m in table)
    times = np.array([m.step_time_s for m in table])
    far = [i for i, m in enumerate(table) if m.hosts > 1]

    def error(p: Prior) -> float:
        return float(np.abs(np.log(fit(rows[singles], times[singles], p).predict(rows).median_s / times))[far].mean())

    assert error(prior) < error(Prior.typical())


def test_trials_stop_at_the_budget_and_never_repeat():
    table = measured(truth(), TRANSFORMER)
    rows = Rows.of(m.row for m in table)
    hosts = np.array([m.hosts for m in table])
    start = fit(rows[[]], [], Prior.typical())
    options = DesignOptions(budget=4, batch=4)
    chosen = next_trials(start, rows, rows, hosts, np.ones(len(rows)), [0], options)
    assert len(set(chosen)) == 3 and 0 not in chosen
    assert next_trials(start, rows, rows, hosts, np.ones(len(rows)), [0, 1, 2, 3], options) == []


def test_a_free_choice_prefers_the_cheaper_of_two_equally_telling_trials():
    plan = Plan(dp=2)
    rows = Rows.of([Row(TRANSFORMER, plan, Allocation.of((2,)))] * 2)
    start = fit(rows[[]], [], Prior.typical())
    assert next_trials(start, rows, rows, np.ones(2), np.array([8.0, 1.0]), []) == [1]


def test_a_job_that_becomes_slower_is_noticed_once_and_believed():
    table = measured(truth(), TRANSFORMER, noise=0.005)
    trials = [Observation(m.row, m.step_time_s) for m in table[:12]]
    state = OnlineFit.start(Prior.typical(), trials)
    running, usual_s = trials[3].row, trials[3].step_time_s
    noise = np.random.default_rng(1)
    for _ in range(10):
        state = state.update(running, (usual_s * np.exp(0.02 * noise.standard_normal(STEPS))).tolist())
    assert state.drifts == 0
    rows = Rows.of(m.row for m in table[:12])
    before = state.fit.predict(rows).median_s
    for _ in range(4):
        state = state.update(running, (1.3 * usual_s * np.exp(0.02 * noise.standard_normal(STEPS))).tolist())
    assert state.drifts == 1
    assert "30% slower" in state.reasons[0] or "29% slower" in state.reasons[0] or "31% slower" in state.reasons[0]
    after = state.fit.predict(rows).median_s
    assert after == pytest.approx(1.3 * before, rel=0.08)


def test_steps_are_gathered_before_they_count():
    state = OnlineFit.start(Prior.typical())
    row = Row(TRANSFORMER, Plan(dp=2), Allocation.of((2,)))
    state = state.update(row, [1.0] * (STEPS - 1))
    assert state.fit.measured == 0
    state = state.update(row, [50.0])  # one slow step of twenty is no news
    assert state.observations[0].step_time_s == 1.0
    with pytest.raises(ValueError, match="above 0 seconds"):
        state.update(row, [0.0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_worlds_are_foretold(seed):
    """Truths drawn from the prior itself, any structure, more noise than believed."""
    random = np.random.default_rng(seed)
    prior = Prior.typical()
    logs = prior.mean + 0.7 * prior.width * random.standard_normal(len(prior.mean))
    table = measured(logs, TRANSFORMER, noise=0.03, seed=seed, devices_per_card=int(random.choice([1, 2, 4])))
    outcome = profile(table, Method(prior), budget=7, seed=seed)
    assert np.abs(outcome.errors[outcome.held_out]).mean() < 0.25
    assert outcome.covered[outcome.held_out].mean() > 0.5


@pytest.mark.parametrize("speed", [0.2, 1.0, 4.0])
def test_one_trial_scales_to_hosts_of_any_speed(speed):
    """The first trial tells of links too, as far as they keep pace with devices."""
    faster = truth(
        compute_rate=80e12 * speed, local_rate=90e9 * speed, network_rate=8e9 * speed, launch_s=3e-4 / speed,
        local_latency_s=3e-5 / speed, network_latency_s=2e-3 / speed, update_rate=1e10 * speed, step_s=4e-3 / speed,
    )  # fmt: skip
    table = [m for m in measured(faster, TRANSFORMER, noise=0.0) if m.row.plan.offload == "none"]
    rows, times = Rows.of(m.row for m in table), np.array([m.step_time_s for m in table])
    first = [i for i, m in enumerate(table) if m.row.allocation.counts == (4,) and m.row.plan == Plan(dp=4)]
    predicted = fit(rows[first], times[first], Prior.typical()).predict(rows).median_s
    assert np.abs(np.log(predicted / times)).mean() < 0.3


def test_what_is_known_of_a_link_outweighs_the_pace_of_the_devices():
    rows = Rows.of([Row(TRANSFORMER, Plan(dp=1), Allocation.of((1,)))])
    known = Prior.typical(known={"network_rate": 1.25e9}, known_width=0.05)
    for prior, least in ((Prior.typical(), 2.0), (known, 0.99)):
        slow, fast = (fit(rows, [seconds], prior).best.logs[INDEX["network_rate"]] for seconds in (20.0, 1.0))
        assert math.exp(fast - slow) > least
    assert math.exp(fast - slow) < 1.02


def test_a_trial_on_many_hosts_tells_of_many_hosts():
    """Slowness by the number of hosts is learned, not assumed to be as large wherever trials were."""
    table = [m for m in measured(truth(host_slowness=1.08), TRANSFORMER, noise=0.0) if m.row.plan.offload == "none"]
    rows, times = Rows.of(m.row for m in table), np.array([m.step_time_s for m in table])
    asked = [i for i, m in enumerate(table) if m.row.allocation.counts == (8,) * 4 and m.row.plan == Plan(dp=32)]
    near = [i for i, m in enumerate(table) if m.hosts <= 2]
    before = fit(rows[near], times[near], Prior.typical()).predict(rows[asked])
    tried = next(i for i, m in enumerate(table) if m.row.allocation.counts == (4,) * 4 and m.row.plan == Plan(dp=16))
    after = fit(rows[[*near, tried]], times[[*near, tried]], Prior.typical()).predict(rows[asked])
    assert after.width[0] < 0.8 * before.width[0]
    assert after.median_s[0] == pytest.approx(times[asked[0]], rel=0.06)


def test_a_trial_vouches_for_plans_like_it_more_than_for_others():
    """Rows whose coefficients are all known differ in width by their likeness to what was measured alone."""
    sure = Prior(truth(), np.full(len(truth()), 1e-4))
    plans = (Plan(dp=4), Plan(dp=4, checkpointing=True), Plan(tp=4), Plan(dp=2, pp=2, accumulation=8))
    rows = Rows.of(Row(TRANSFORMER, plan, Allocation.of((4,))) for plan in plans)
    width = fit(rows[[0]], predict(truth(), rows[[0]]), sure).predict(rows).width
    assert width[0] < 0.04 and np.all(width[1:] > 2.0 * width[0])
    both = fit(rows[[0, 1]], predict(truth(), rows[[0, 1]]), sure).predict(rows).width
    assert both[1] < 0.04 and both[2] == pytest.approx(width[2], rel=0.05)


def test_trials_look_at_plans_that_may_win():
    """Checkpointing that is certain to be slower gets no trial, however uncertain its own time is."""
    prior = Prior(truth(), np.full(len(truth()), 1e-4)).holding("recompute_ratio", 3.0, 0.3)
    plans = [Plan(dp=4), Plan(dp=2, tp=2), *(Plan(dp=4, accumulation=m, checkpointing=True) for m in (1, 2, 4))]
    rows = Rows.of(Row(TRANSFORMER, plan, Allocation.of((4,))) for plan in plans)
    start = fit(rows[[0]], predict(truth(), rows[[0]]), prior.holding("parallel_path", 1.0, 0.1))
    variance = np.diag(start.covariance(rows)[0])
    assert variance[2:].min() > 2.0 * variance[1]
    assert next_trials(start, rows, rows, np.ones(5), np.ones(5), [0]) == [1]


def test_a_measured_plan_is_predicted_by_its_measurement():
    """The model's formulas are wrong for one kind of plan; its neighbours are corrected, others are not."""
    sure = Prior(truth(), np.full(len(truth()), 1e-4))
    plans = (Plan(tp=4), Plan(dp=2, tp=2), Plan(dp=4))
    rows = Rows.of(Row(TRANSFORMER, plan, Allocation.of((4,))) for plan in plans)
    real = predict(truth(), rows)
    wrong = fit(rows[[0]], 1.15 * real[[0]], sure).predict(rows)
    ratio = wrong.median_s / real
    assert 1.05 < ratio[0] < 1.15 and 1.0 < ratio[1] < ratio[0] and ratio[2] == pytest.approx(1.0, abs=0.02)
