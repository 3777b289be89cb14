"""Illegal plans are refused before anything starts, each with a one-sentence reason."""

from __future__ import annotations

import json

import pytest
from shapes import gpt

from clusterd.plans.legality import check
from clusterd.plans.model_shape import ModelShape, ParameterShape
from clusterd.plans.plan import Plan


def with_parameter(shape: tuple[int, ...], dtype_bytes: int) -> ModelShape:
    return gpt(parameters=(*gpt().parameters, ParameterShape("extra", shape, dtype_bytes, 0)))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("dp=3", "16 cannot be cut into 3 equal shares"),
        ("dp=2,shares=5:12", "shares sum to 17"),
        ("dp=4,accumulation=5", "a share of 4 samples cannot be cut into accumulation=5"),
        ("dp=2,pp=2,accumulation=3", "cannot be cut into 3 equal ones"),
        ("pp=4,accumulation=2", "needs at least 4 micro-batches"),
        ("pp=7,accumulation=8,schedule=gpipe", "needs 7 layers with parameters; the model has 6"),
        ("tp=3", "blocks.0.attn.proj.weight has 64"),
        ("tp=8", "not tried with this number of shards .valid: 2, 4."),
        ("zero=2", "needs dp of at least 2"),
        ("dp=2,zero=2,offload=parameters", "it needs zero=3"),
        ("dp=2,zero=1,offload=optimizer", "zero=2 keeps the same share"),
    ],
)
def test_refusals_say_why(plan: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_legal(Plan.parse(plan))


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=16",
        "dp=2,shares=3:13,accumulation=3",
        "zero=3,offload=parameters",
        "dp=2,tp=4,pp=2,zero=3,accumulation=4,checkpointing,offload=optimizer",
        "pp=6,accumulation=8",
    ],
)
def test_a_request_that_can_be_met_is_not_refused(plan: str) -> None:
    assert_legal(Plan.parse(plan))


@pytest.mark.parametrize(
    ("plan", "shape", "says"),
    [
        ("pp=2,accumulation=2", gpt(pipeline=False), "pass `layers` to clusterd.train.run"),
        ("tp=2", gpt(tp_plan=False, tp_degrees=()), "pass `tp_plan` to clusterd.train.run"),
        ("pp=2,accumulation=2", gpt(tied=(("embed.token.weight", "head.out.weight"),)), "are one parameter"),
        ("tp=2", gpt(optimizer="Muon", optimizer_elementwise=False), "Muon does not treat every element alike"),
        ("dp=2,zero=3", gpt(optimizer="Muon", optimizer_elementwise=False), "zero=1 and pp leave tensors whole"),
        ("dp=2,zero=1", with_parameter((3,), 2), "needs parameters of one dtype.*extra 2"),
        ("dp=1", gpt(samples=10), "has 10 samples, fewer than the global batch of 16"),
    ],
)
def test_a_plan_that_the_model_does_not_allow_is_refused(plan: str, shape: ModelShape, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_legal(Plan.parse(plan), shape)


def test_a_cautious_optimizer_still_gets_replicas_and_stages() -> None:
    assert_legal(Plan.parse("dp=2,zero=1,pp=2,accumulation=2"), gpt(optimizer="Muon", optimizer_elementwise=False))


def test_all_reasons_come_at_once() -> None:
    assert len(check(Plan.parse("dp=3,tp=3,zero=2,offload=parameters"), gpt())) == 3


def test_devices_of_two_kinds_do_not_share_a_job() -> None:
    assert "not cpu and cuda" in check(Plan(dp=2), global_batch=16, kinds=["cuda", "cpu"])[0]


def test_without_a_description_only_what_depends_on_the_plan_is_checked() -> None:
    """A job that never ran: its ranks check the rest, and refuse with exit code 96."""
    assert check(Plan(tp=8, pp=3, accumulation=3)) == []
    assert check(Plan(pp=3)) != []


def test_a_description_survives_the_wire() -> None:
    shape = gpt(tied=(("a", "b"),))
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    with pytest.raises(ValueError, match="not a description of a model"):
        ModelShape.from_dict({"layers": []})


def assert_legal(plan: Plan, shape: ModelShape | None = None) -> None:
    reasons = check(plan, shape or gpt(), kinds=["cpu"])
    assert not reasons, "; ".join(reasons)
