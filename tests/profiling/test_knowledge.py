"""Knowledge of a model on a device type: shapes, plans worth a trial, and the end of trials."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from clusterd.plans.plan import Plan
from clusterd.profiling import fleet
from clusterd.profiling.fleet import DeviceType
from clusterd.profiling.knowledge import Knowledge, Ranked, rivals, workload_of
from clusterd.profiling.online import Observation, OnlineFit
from tests.plans.test_reshard import gpt

GIB = 1 << 30


def lab(*per_host: int, memory_bytes: int = 80 * GIB) -> DeviceType:
    return DeviceType("a100", "cuda", per_host, memory_bytes, cores_per_device=12)


def known(devices: DeviceType) -> Knowledge:
    model = gpt()
    return Knowledge(model, workload_of(model), devices, OnlineFit.start(fleet.prior(devices.kind)))


def test_shapes_are_those_that_the_hosts_allow() -> None:
    """Every count on the fewest hosts first, even spreads too, nothing that is not there."""
    shapes = fleet.shapes(lab(4, 4, 2))
    assert {sum(shape) for shape in shapes} == set(range(1, 11))
    assert (4, 4, 2) in shapes and (5,) not in shapes and (3, 3, 3) not in shapes
    assert shapes.index((2,)) < shapes.index((1, 1))
    for shape in shapes:
        assert list(shape) == sorted(shape, reverse=True)
        assert all(n <= here for n, here in zip(shape, (4, 4, 2), strict=False))


def test_shapes_of_a_large_cluster_are_few() -> None:
    shapes = fleet.shapes(lab(*[8] * 128))
    assert 1024 in {sum(shape) for shape in shapes}
    assert len(shapes) < 400


def test_saving_memory_that_is_there_is_needless() -> None:
    """Offload and recomputing are listed only where the plan without them does not fit."""
    roomy, tight = known(lab(4)), known(lab(4, memory_bytes=GIB))
    assert roomy.is_needless(Plan(dp=2, checkpointing=True))
    assert roomy.is_needless(Plan(dp=2, zero=3, offload="optimizer"))
    assert not roomy.is_needless(Plan(dp=2, zero=3))
    listed = [one.plan for one in roomy.ranked([(2,)], keep=50)]
    assert not any(plan.checkpointing or plan.offload != "none" for plan in listed)
    plain = tight.memory(Plan(dp=2)).device_bytes
    saving = tight.memory(Plan(dp=2, checkpointing=True)).device_bytes
    assert saving <= plain


def test_step_times_by_cores_are_told_where_cores_matter() -> None:
    """Of a plan with its optimizer on the host, not of one without; each further step of the ladder is worth it."""
    offloaded, stored = Plan(dp=2, zero=2, offload="optimizer"), Plan(dp=2)
    some = known(replace(lab(4), cores_most=48))
    some.workload = replace(some.workload, parameters=2_000_000_000)
    report = {one.plan: one for one in some.with_cores(some.ranked([(2,)], keep=0, always=[offloaded, stored]))}
    assert report[stored].core_times == ()
    cores, times = zip(*report[offloaded].core_times, strict=True)
    assert cores[0] == 1 and list(cores) == sorted(cores) and cores[-1] <= 24
    assert all(less <= 0.97 * more for more, less in pairwise(times))
    some.devices = lab(4)
    (own,) = some.with_cores(some.ranked([(2,)], keep=0, always=[offloaded]))
    assert own.core_times == (), "devices with cores of their own have no more to get"


def test_a_plan_that_ran_out_of_memory_is_not_listed_again() -> None:
    some = known(lab(4))
    some.refused.add(Plan(dp=2))
    assert Plan(dp=2) not in [one.plan for one in some.ranked([(2,)], keep=50)]


def test_the_plan_that_runs_is_listed_whatever_its_rank() -> None:
    some = known(lab(4))
    slow = some.ranked([(4,)], keep=500)[-1].plan
    assert slow in [one.plan for one in some.ranked([(4,)], keep=1, always=[slow])]


def test_trials_end_when_the_budget_is_spent_or_nothing_can_be_gained() -> None:
    """Each trial is of a plan that was not measured; bounds shrink; seven are enough, and often fewer."""
    some = known(lab(4))
    shapes = [(1,), (2,), (4,)]
    tried: set[Plan] = set()
    widths = []
    for count in range(12):
        answer = some.next_trial(shapes, count)
        if answer is None:
            break
        choice, why = answer
        assert choice.plan not in tried and why
        tried.add(choice.plan)
        widths.append(max(one.width for one in some.ranked(shapes, keep=1)))
        (truth,) = some.online.fit.predict(_rows(some, choice)).median_s
        some.online = some.online.observe(Observation(some.row(choice.plan, choice.shape), float(truth) * 1.3))
    assert 3 <= len(tried) <= 7
    assert widths[-1] < widths[0]


def _rows(some: Knowledge, choice: Ranked):  # type: ignore[no-untyped-def]
    from clusterd.profiling.model import Rows

    return Rows.of([some.row(choice.plan, choice.shape)])


def test_no_regret_where_one_plan_is_clearly_best() -> None:
    def one(plan: Plan, step_time_s: float, width: float) -> Ranked:
        low, high = step_time_s * math.exp(-width), step_time_s * math.exp(width)
        return Ranked(plan, (2,), step_time_s, low, high, width, known(lab(2)).memory(plan))

    clear = [one(Plan(dp=2), 1.0, 0.02), one(Plan(tp=2), 2.0, 0.02)]
    close = [one(Plan(dp=2), 1.0, 0.2), one(Plan(tp=2), 1.05, 0.2)]
    assert [rival.gain for rival in rivals(clear)] == pytest.approx([0.0], abs=1e-6)
    assert [rival.gain > 0.05 for rival in rivals(close)] == [True]
    assert rivals(clear[:1]) == []


def test_last_trials_are_of_plans_that_may_be_the_best() -> None:
    """Regression: the rest of a budget went to the plans that taught most, and the best plan was never run."""
    some = known(lab(4))
    shapes = [(2,), (4,)]
    for count in range(7):
        answer = some.next_trial(shapes, count)
        if answer is None:
            break
        choice, why = answer
        same = [one for one in some.ranked(shapes, keep=500) if one.shape == choice.shape]
        first = min(one.step_time_s for one in same)
        assert count < 5 or (choice.lower_s < first and "may be" in why)
        (truth,) = some.online.fit.predict(_rows(some, choice)).median_s
        some.online = some.online.observe(Observation(some.row(choice.plan, choice.shape), float(truth) * 1.3))
    assert count >= 5
