"""The enumeration contains all legal plans and nothing else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import gpt

from clusterd.plans.enumerate import legal_plans
from clusterd.plans.legality import check
from clusterd.plans.plan import OFFLOADS, SCHEDULES, Plan, PlanError


@settings(max_examples=25, deadline=None)
@given(devices=st.integers(1, 12), batch=st.sampled_from([4, 12, 16]), depth=st.integers(1, 4))
def test_every_legal_plan_is_listed_once_and_no_other(devices: int, batch: int, depth: int) -> None:
    shape = gpt(depth=depth, global_batch=batch)
    plans = legal_plans(shape, devices, kind="cpu")
    assert len(set(plans)) == len(plans)
    assert set(plans) == {p for p in everything(devices, batch) if not check(p, shape, kinds=["cpu"])}


def test_the_order_is_fixed_and_begins_with_plain_data_parallelism() -> None:
    plans = legal_plans(gpt(), [4, 2, 4])
    assert plans == legal_plans(gpt(), [2, 4])
    assert [str(p) for p in (plans[0], next(p for p in plans if p.ranks == 4))] == ["dp=2", "dp=4"]


def test_a_model_nobody_described_is_only_replicated() -> None:
    plans = legal_plans(None, 4, global_batch=16)
    assert plans
    assert all(p.tp == p.pp == 1 for p in plans)


def test_a_search_can_be_narrowed() -> None:
    plans = legal_plans(gpt(), 4, offloads=("none",), accumulations=(1, 4))
    assert {p.offload for p in plans} == {"none"}
    assert {p.accumulation for p in plans} == {1, 4}


def test_without_a_batch_there_is_nothing_to_cut() -> None:
    with pytest.raises(PlanError, match="global batch"):
        legal_plans(None, 2)


def everything(devices: int, batch: int) -> list[Plan]:
    """Every plan of this many ranks, without equivalent ones, by brute force."""
    numbers = range(1, devices + 1)
    degrees = [(d, t, p) for d, t, p in itertools.product(numbers, repeat=3) if d * t * p == devices and batch % d == 0]
    return [
        Plan(d, t, p, zero, offload, accumulation, checkpointing, schedule)
        for d, t, p in degrees
        for zero, offload, checkpointing in itertools.product(range(4), OFFLOADS, (False, True))
        for accumulation in range(1, batch // d + 1)
        if batch // d % accumulation == 0
        for schedule in (SCHEDULES if p > 1 else SCHEDULES[:1])
    ]
