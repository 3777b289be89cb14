"""Speed on hosts of different types: batch shares follow speed, and the step time with them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.core.estimates.heterogeneous_speed import pace, predict_heterogeneous, proportional
from clusterd.core.performance_table import Estimate, PerformanceTable, Shape
from clusterd.plans.plan import Plan

BATCH = 24


def belief(name: str, step_time_s: float, plan: Plan, shape: Shape, device_bytes: int = 0) -> Estimate:
    return Estimate(
        plan=plan,
        device_type=name,
        shape=shape,
        step_time_s=step_time_s,
        lower_s=0.9 * step_time_s,
        upper_s=1.2 * step_time_s,
        device_bytes=device_bytes,
    )


def two_types(plan: Plan, shape: Shape, fast_s: float = 1.0, slow_s: float = 3.0, **what: int) -> dict[str, Estimate]:
    return {"fast": belief("fast", fast_s, plan, shape, **what), "slow": belief("slow", slow_s, plan, shape, **what)}


def test_a_type_three_times_as_fast_takes_three_times_the_share() -> None:
    """Two replicas of each: 9 and 3 of 24 samples, and a step of half as long again as on the fast type alone."""
    mixed = predict_heterogeneous(two_types(Plan(dp=4), (2, 2)), ("fast", "slow"), BATCH)
    assert mixed is not None
    assert mixed.plan == Plan(dp=4, shares=(9, 9, 3, 3))
    assert (mixed.step_time_s, mixed.lower_s, mixed.upper_s) == pytest.approx((1.5, 1.35, 1.8))
    assert (mixed.device_types, mixed.by_type, mixed.devices) == (("fast", "slow"), {"fast": 2, "slow": 2}, 4)


def test_replicas_cut_in_shards_lie_on_one_host_and_type() -> None:
    """tp=2: a host of three devices would hold one replica and a half."""
    assert predict_heterogeneous(two_types(Plan(dp=3, tp=2), (3, 3)), ("fast", "slow"), BATCH) is None
    mixed = predict_heterogeneous(two_types(Plan(dp=3, tp=2), (4, 2)), ("fast", "slow"), BATCH)
    assert mixed is not None and len(mixed.plan.shares) == 3


def test_types_of_one_speed_need_no_shares() -> None:
    """An equal split is the plan as it always was."""
    mixed = predict_heterogeneous(two_types(Plan(dp=4), (2, 2), slow_s=1.0), ("slow", "fast"), BATCH)
    assert mixed is not None and mixed.plan == Plan(dp=4) and mixed.step_time_s == pytest.approx(1.0)


def test_every_micro_batch_has_a_sample() -> None:
    """The slow replica's share is one sample by its speed, and accumulation=3 needs three."""
    mixed = predict_heterogeneous(two_types(Plan(dp=2, accumulation=3), (1, 1), slow_s=30.0), ("fast", "slow"), BATCH)
    assert mixed is not None and mixed.plan.shares == (21, 3)
    assert predict_heterogeneous(two_types(Plan(dp=2, accumulation=13), (1, 1)), ("fast", "slow"), BATCH) is None


def test_a_larger_share_needs_more_memory_and_stays_within_what_there_is() -> None:
    """Bytes by the largest micro-batch at most; a limit on the fast type moves samples to the slow one."""
    alone = two_types(Plan(dp=2), (1, 1), device_bytes=1000)
    mixed = predict_heterogeneous(alone, ("fast", "slow"), BATCH)
    assert mixed is not None and mixed.plan.shares == (18, 6) and mixed.device_bytes == 1500
    limited = predict_heterogeneous(alone, ("fast", "slow"), BATCH, {"fast": 15})
    assert limited is not None and limited.plan.shares == (15, 9) and limited.step_time_s == pytest.approx(3.0 * 9 / 12)
    assert predict_heterogeneous(alone, ("fast", "slow"), BATCH, {"fast": 15, "slow": 8}) is None


def test_what_runs_is_judged_with_the_shares_that_it_has() -> None:
    """Ranks in whatever order; equal shares on unequal devices go at the pace of the slow ones."""
    table = PerformanceTable(tuple(two_types(Plan(dp=4), (2, 2)).values()), BATCH)
    places = [("a", "fast"), ("b", "slow"), ("a", "fast"), ("b", "slow")]
    even = pace(table, Plan(dp=4), places)
    assert even is not None and even.step_time_s == pytest.approx(3.0)
    shared = pace(table, Plan(dp=4, shares=(9, 3, 9, 3)), places)
    assert shared is not None and shared.step_time_s == pytest.approx(1.5)
    assert pace(table, Plan(dp=2, tp=2), places) is None, "a replica on two types"
    assert pace(table, Plan(dp=4), [("a", "fast"), *places[1:3], ("c", "slow")]) is None, "no such shape is known"


def test_a_plan_whose_batch_is_not_cut_evenly_is_judged_by_its_largest_share() -> None:
    """25 samples over two replicas are 13 and 12 on each type alone."""
    alone = two_types(Plan(dp=2, shares=(13, 12)), (1, 1), fast_s=1.3, slow_s=2.6)
    mixed = predict_heterogeneous(alone, ("fast", "slow"), 25)
    assert mixed is not None and mixed.plan == Plan(dp=2, shares=(17, 8))
    assert mixed.step_time_s == pytest.approx(1.7)


@given(
    slowness=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    batch=st.integers(1, 14),
    least=st.integers(1, 3),
    most=st.lists(st.integers(1, 14), min_size=4, max_size=4),
)
def test_no_other_whole_shares_make_the_slowest_replica_faster(
    slowness: list[float], batch: int, least: int, most: list[int]
) -> None:
    """Against all ways to share the batch."""
    limits = most[: len(slowness)]
    shares = proportional(slowness, batch, least, limits)
    ways = [w for w in product(*(range(least, limit + 1) for limit in limits)) if sum(w) == batch]
    assert (shares is None) == (not ways)
    if shares is not None:
        assert shares in ways
        best = min(max(n * s for n, s in zip(w, slowness, strict=True)) for w in ways)
        assert max(n * s for n, s in zip(shares, slowness, strict=True)) == pytest.approx(best)
