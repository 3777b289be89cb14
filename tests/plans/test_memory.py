"""The memory estimate follows real memory use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import gpt

from clusterd.plans.enumerate import legal_plans
from clusterd.plans.memory import (
    OVERHEAD,
    WORKSPACES_BYTES,
    MemoryEstimate,
    communicators,
    estimate,
    learn_overhead,
)
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan

SHAPE = gpt(depth=6, width=256)
PLANS = [p for n in (1, 2, 4, 8) for p in legal_plans(SHAPE, n)]


def of(plan: str, stage: int | None = None) -> MemoryEstimate:
    return estimate(Plan.parse(plan), SHAPE, stage=stage)


def test_one_process_holds_everything_once() -> None:
    alone = of("dp=1")
    weights = SHAPE.parameter_bytes
    assert (alone.parameters_bytes, alone.gradients_bytes, alone.optimizer_bytes) == (weights, weights, 2 * weights)
    assert alone.host_bytes == alone.buffers_bytes == alone.gathered_bytes == 0


def test_gradients_appear_while_activations_go() -> None:
    """On an H100 an estimate of both at once was a fifth above what a model with large activations took."""
    alone, twice = of("dp=1"), of("dp=1,accumulation=2")
    largest = max(sum(p.size_bytes for p in SHAPE.parameters if p.layer == n) for n in range(len(SHAPE.layers)))
    assert 0 < alone.later_gradients_bytes <= alone.gradients_bytes - largest
    # From pass to pass they stay, and replicas have buckets for them.
    assert twice.later_gradients_bytes == of("dp=2").later_gradients_bytes == 0
    few = replace(SHAPE, layers=tuple(replace(x, activation_bytes=0, activation_tp_bytes=0) for x in SHAPE.layers))
    assert estimate(Plan(), few).later_gradients_bytes == 0


def test_each_zero_stage_shards_one_more_kind_of_state() -> None:
    stages = [of(f"dp=4,zero={zero}") for zero in range(4)]
    weights = SHAPE.parameter_bytes
    assert [e.optimizer_bytes < weights for e in stages] == [False, True, True, True]
    assert [e.gradients_bytes < weights for e in stages] == [False, False, True, True]
    assert [e.parameters_bytes + e.gathered_bytes < weights for e in stages] == [False, False, False, True]


@pytest.mark.parametrize("better", ["zero=3", "tp=4", "pp=4,accumulation=4"])
def test_spreading_weights_frees_memory_that_replicas_do_not(better: str) -> None:
    plan = f"dp=4,{better}" if better.startswith("zero") else better
    spread, copied = of(plan), of("dp=4")
    assert spread.parameters_bytes + spread.optimizer_bytes < copied.parameters_bytes + copied.optimizer_bytes


@given(st.sampled_from(PLANS))
def test_recomputing_never_costs_memory(plan: Plan) -> None:
    kept = estimate(replace(plan, checkpointing=False), SHAPE).activations_bytes
    recomputed = estimate(replace(plan, checkpointing=True), SHAPE).activations_bytes
    # A block's activations exist while it is recomputed; with a single block in flight nothing is saved.
    block = max(layer.activation_bytes + layer.activation_tp_bytes for layer in SHAPE.layers)
    assert recomputed <= kept + 16 * block // plan.accumulation


@given(st.sampled_from(PLANS))
def test_a_larger_batch_never_needs_less(plan: Plan) -> None:
    for stage in range(plan.pp):  # the stage with the highest need may change
        small = estimate(plan, SHAPE, stage=stage)
        large = estimate(plan, SHAPE, stage=stage, global_batch=2 * SHAPE.global_batch)
        assert large.device_bytes >= small.device_bytes
        assert large.optimizer_bytes == small.optimizer_bytes


@given(st.sampled_from([p for p in PLANS if p.offload != "none"]))
def test_offloaded_state_is_counted_on_the_host(plan: Plan) -> None:
    for stage in range(plan.pp):
        offloaded = estimate(plan, SHAPE, stage=stage)
        kept = estimate(replace(plan, offload="none"), SHAPE, stage=stage)
        assert offloaded.device_bytes < kept.device_bytes
        assert offloaded.host_bytes >= kept.optimizer_bytes
        assert offloaded.optimizer_bytes == 0


def test_copies_of_weights_in_another_precision_do_not_grow_with_the_batch() -> None:
    layers = tuple(replace(layer, cast_bytes=1000 if layer.block else 0) for layer in SHAPE.layers)
    mixed = replace(SHAPE, layers=layers)
    blocks = sum(layer.block for layer in layers)

    def more(plan: str, batch: int) -> int:
        needs = [estimate(Plan.parse(plan), shape, global_batch=batch).device_bytes for shape in (mixed, SHAPE)]
        return needs[0] - needs[1]

    assert more("dp=1", 16) == more("dp=1", 32) == 1000 * blocks
    assert more("dp=1,checkpointing", 16) == 1000
    assert 1000 * blocks // 2 <= more("tp=2", 16) < 1000 * blocks
    bare = replace(SHAPE, layers=())
    assert estimate(Plan.parse("dp=1"), bare).activations_bytes == SHAPE.global_batch * SHAPE.loss_bytes


@pytest.mark.parametrize("plan", ["dp=1,accumulation=16", "dp=1,checkpointing,accumulation=16", "dp=4,zero=3"])
def test_temporaries_of_an_update_must_fit_beside_parameters_gradients_and_state(plan: str) -> None:
    """On CUDA; activations are freed by then, and with offload the update runs in host memory."""
    hungry, chosen = replace(SHAPE, optimizer_temporaries_ratio=1.0), Plan.parse(plan)
    without, need = estimate(chosen, SHAPE), estimate(chosen, hungry)
    shard = SHAPE.parameter_bytes // chosen.dp
    assert need.temporaries_bytes == shard
    assert need.device_bytes >= need.parameters_bytes + need.gradients_bytes + 3 * shard
    more = max(0, shard - without.gathered_bytes - without.activations_bytes)
    assert need.device_bytes == without.device_bytes + more
    assert estimate(chosen, hungry, kind="cpu").device_bytes == estimate(chosen, SHAPE, kind="cpu").device_bytes
    offloaded = replace(chosen, offload="optimizer", zero=0)
    assert estimate(offloaded, hungry) == estimate(offloaded, SHAPE)


def test_a_model_described_before_updates_were_counted_is_the_same_model() -> None:
    told = SHAPE.to_dict()
    del told["optimizer_temporaries_ratio"]
    assert ModelShape.from_dict(told) == SHAPE
    assert replace(SHAPE, optimizer_temporaries_ratio=1.0).signature == SHAPE.signature


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    ours, theirs = of("pp=2,accumulation=8"), of("pp=2,accumulation=8,schedule=gpipe")
    assert ours.activations_bytes < theirs.activations_bytes
    assert of("pp=4,accumulation=8", stage=0).activations_bytes > of("pp=4,accumulation=8", stage=2).activations_bytes


def test_more_micro_batches_need_less() -> None:
    sizes = [of(f"dp=1,accumulation={n}").activations_bytes for n in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16 * sizes[-1]


def test_unequal_shares_are_sized_by_the_largest() -> None:
    assert of("dp=2,shares=4:12").activations_bytes == of("dp=1,accumulation=4").activations_bytes * 3


def test_a_measured_overhead_takes_the_place_of_the_prior() -> None:
    """By number of communicators, each of which has buffers on the device."""
    assert learn_overhead({}) == OVERHEAD
    one = learn_overhead({0: 500 << 20})
    assert (one.context_bytes, one.communicator_bytes) == (500 << 20, OVERHEAD.communicator_bytes)
    plan = Plan.parse("dp=2,tp=2")
    assert communicators(plan) == 3
    learned = learn_overhead({0: 500 << 20, 1: 900 << 20, 3: 1700 << 20})
    assert estimate(plan, SHAPE, overhead=learned).overhead_bytes == pytest.approx(
        (1700 << 20) + WORKSPACES_BYTES, rel=0.02
    )
    assert estimate(plan, SHAPE, kind="cpu", overhead=learned) == estimate(plan, SHAPE, kind="cpu")


@given(st.dictionaries(st.integers(0, 4), st.integers(0, 8 << 30), max_size=5))
def test_no_measured_overhead_is_above_the_learned_one(measured: dict[int, int]) -> None:
    learned = learn_overhead(measured)
    assert learned.context_bytes >= 0
    for count, found in measured.items():
        assert learned.context_bytes + count * learned.communicator_bytes >= found
