"""A plan survives a round trip through each of its text and wire forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.plans.plan import OFFLOADS, SCHEDULES, Plan, PlanError


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    dp = draw(st.integers(1, 6))
    pp = draw(st.integers(1, 6))
    return Plan(
        dp=dp,
        tp=draw(st.integers(1, 6)),
        pp=pp,
        zero=draw(st.integers(0, 3)),
        offload=draw(st.sampled_from(OFFLOADS)),
        accumulation=draw(st.integers(1, 64)),
        checkpointing=draw(st.booleans()),
        schedule=draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b",
        shares=draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 99)] * dp))),
    )


@given(any_plan())
def test_a_plan_survives_being_written_and_read(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@given(any_plan())
def test_every_rank_has_its_own_place(plan: Plan) -> None:
    places = [plan.coordinates(rank) for rank in range(plan.ranks)]
    assert [plan.rank_of(*place) for place in places] == list(range(plan.ranks))
    assert len(set(places)) == plan.ranks


def test_tensor_shards_are_neighbours() -> None:
    """They communicate most, so placement puts neighbouring ranks on one host."""
    plan = Plan(dp=2, tp=2, pp=2)
    assert [plan.coordinates(rank).shard for rank in range(4)] == [0, 1, 0, 1]
    assert [plan.coordinates(rank).stage for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=0", "at least 1"),
        ("dp=two", "whole number"),
        ("zero=4", "ZeRO stages are 0, 1, 2 and 3"),
        ("gpus=4", "no field 'gpus'"),
        ("offload=disk", "one of none, optimizer, parameters"),
        ("dp=2,shares=3", "one of at least 1 per replica"),
        ("fast", "write it as in"),
        ("checkpointing=maybe", "must be true or false"),
    ],
)
def test_an_invalid_plan_is_refused_with_a_valid_one(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("plan", "batch", "shares"),
    [(Plan(dp=4), 16, (4, 4, 4, 4)), (Plan(dp=2, shares=(5, 11)), 16, (5, 11)), (Plan(tp=8), 3, (3,))],
)
def test_the_global_batch_is_cut_among_replicas(plan: Plan, batch: int, shares: tuple[int, ...]) -> None:
    assert plan.batch_shares(batch) == shares


@pytest.mark.parametrize(("plan", "batch"), [(Plan(dp=3), 16), (Plan(dp=4), 2), (Plan(dp=2, shares=(5, 12)), 16)])
def test_a_batch_that_cannot_be_cut_is_refused(plan: Plan, batch: int) -> None:
    with pytest.raises(PlanError, match=str(batch)):
        plan.batch_shares(batch)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dp": True}, "dp is True"),
        ({"zero": 1.0}, "zero is 1.0"),
        ({"checkpointing": "no"}, "checkpointing is 'no'"),
        ({"shares": 5}, "shares is 5"),
        ({"dp": 2, "shares": [1.5, 2.5]}, "must be a list of whole numbers"),
        ({"dp": 2, "shares": ["3", "13"]}, "must be a list of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.from_dict(values)
