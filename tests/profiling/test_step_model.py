"""Properties of a step time under any coefficients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.plans.enumerate import legal_plans
from clusterd.plans.model_shape import LayerShape, ParameterShape
from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import ALL, INDEX, Prior
from clusterd.profiling.model import Row, Rows, phases, predict
from clusterd.profiling.placement import Allocation, HostShare, traffic
from clusterd.profiling.workload import Workload
from tests.plans.shapes import gpt
from tests.profiling.worlds import PLACES, TRANSFORMER, plans_on, truth

ROWS = [Row(TRANSFORMER, plan, Allocation.of(counts)) for counts in PLACES for plan in plans_on(counts, TRANSFORMER)]
FEATURES = Rows.of(ROWS)

any_world = st.lists(st.floats(-3, 3), min_size=len(ALL), max_size=len(ALL)).map(
    lambda z: Prior.typical().mean + np.array(z) * Prior.typical().width
)


@given(any_world)
@settings(max_examples=60, deadline=None)
def test_every_step_takes_time_and_its_phases_add_up(logs):
    answer = phases(logs, FEATURES)
    assert np.all(np.isfinite(answer.step_s)) and np.all(answer.step_s > 0)
    for part in (answer.forward_s, answer.backward_s, answer.pipe_s, answer.gather_s, answer.update_s):
        assert np.all(part >= 0)


@given(any_world, st.sampled_from(["network_rate", "local_rate", "compute_rate", "copy_rate", "update_rate"]))
@settings(max_examples=60, deadline=None)
def test_faster_hardware_is_never_slower(logs, name):
    better = logs.copy()
    better[INDEX[name]] += math.log(2)
    assert np.all(predict(better, FEATURES) <= predict(logs, FEATURES) * (1 + 1e-9))


@given(any_world, st.permutations(range(len(ROWS))))
@settings(max_examples=20, deadline=None)
def test_a_prediction_does_not_depend_on_what_else_is_predicted(logs, order):
    shuffled = predict(logs, Rows.of(ROWS[i] for i in order))
    assert np.allclose(shuffled, predict(logs, FEATURES)[list(order)], rtol=1e-12)


@given(st.permutations([1, 2, 4, 1]))
def test_the_order_of_hosts_does_not_matter_to_data_parallelism(counts):
    row = Row(TRANSFORMER, Plan(dp=8), Allocation.of(counts))
    usual = Row(TRANSFORMER, Plan(dp=8), Allocation.of((1, 1, 2, 4)))
    assert predict(truth(), Rows.of([row])) == pytest.approx(predict(truth(), Rows.of([usual])))


def test_cutting_tensors_across_hosts_is_slower_than_inside_one():
    inside = Row(TRANSFORMER, Plan(dp=2, tp=4), Allocation.of((4, 4)))
    across = Row(TRANSFORMER, Plan(dp=2, tp=4), Allocation.of((2, 2, 2, 2)))
    near_s, far_s = predict(truth(), Rows.of([inside, across]))
    assert far_s > near_s


def test_more_micro_batches_shrink_the_pipeline_bubble():
    few, many = (
        Row(TRANSFORMER, Plan(pp=4, accumulation=m), Allocation.of((4,))) for m in (4, 16)
    )  # fmt: skip
    few_s, many_s = predict(truth(launch_s=1e-9), Rows.of([few, many]))
    bubble = (4 + 3) / 4 / ((16 + 3) / 16)
    assert few_s / many_s == pytest.approx(bubble, rel=0.05)


def test_the_stage_with_most_operations_sets_the_pace_of_a_pipeline():
    block, head = LayerShape("block", flops=100, block=True), LayerShape("head", flops=800)
    shape = replace(
        gpt(),
        layers=(*[block] * 8, head),
        parameters=tuple(ParameterShape(f"{n}", (10,), 4, layer=n) for n in range(9)),
    )
    uneven = Workload.from_shape(shape)
    # Stages are cut by the bytes of their parameters: the last of three layers that weigh the same has the head.
    assert [uneven.stage_share(pp) for pp in (1, 2, 3)] == pytest.approx([1.0, 1200 / 1600, 1000 / 1600])
    even = replace(uneven, layer_flops=())
    rows = [Row(load, Plan(pp=2, accumulation=8), Allocation.of((2,))) for load in (even, uneven)]
    even_s, uneven_s = phases(truth(launch_s=1e-9), Rows.of(rows)).forward_s
    assert uneven_s / even_s == pytest.approx((7 * 0.75 + 1) / (7 * 0.5 + 1), rel=0.01)


def test_a_head_as_large_as_its_blocks_is_on_the_last_stage():
    sizes = {"layers": 12, "hidden": 1000, "seq_len": 1, "global_batch": 8}
    small = Workload.from_sizes("small", parameters=2 * 12 * 12_000_000, **sizes)
    assert small.stage_share(4) == pytest.approx(1 / 8 + 1 / 2, rel=0.01)
    large = Workload.from_sizes("large", parameters=12 * 12_000_000, **sizes)
    assert large.stage_share(4) == pytest.approx(1 / 4)
    assert large.stage_share(24) == pytest.approx(1 / 24), "more stages than layers: nothing is known of the cut"


def test_pipelining_one_micro_batch_divides_no_compute():
    alone, staged = (
        Row(TRANSFORMER, plan, Allocation.of((plan.ranks,))) for plan in (Plan(), Plan(pp=4, schedule="gpipe"))
    )
    slow = truth(compute_rate=1e12, parallel_path=1.0, unsharded_share=1e-9)
    alone_s, staged_s = predict(slow, Rows.of([alone, staged]))
    assert staged_s == pytest.approx(alone_s, rel=0.02)


def test_the_slowest_device_sets_the_pace_unless_the_batch_is_cut_to_fit():
    mixed = Allocation((HostShare(1, speed=1.0), HostShare(1, speed=0.5)))
    even = Row(TRANSFORMER, Plan(dp=2), mixed)
    fitted = Row(TRANSFORMER, Plan(dp=2, shares=(21, 11)), mixed)
    fast = Row(TRANSFORMER, Plan(dp=2), Allocation.of((1, 1)))
    even_s, fitted_s, fast_s = predict(truth(), Rows.of([even, fitted, fast]))
    assert fast_s < fitted_s < even_s


def test_too_few_cores_starve_the_devices():
    row = [Row(TRANSFORMER, Plan(dp=4), Allocation.of((4,), cores_per_device=n)) for n in (1, 4, 16)]
    one_s, four_s, sixteen_s = predict(truth(sample_core_s=0.5), Rows.of(row))
    assert one_s > 3 * four_s > 0 and four_s >= sixteen_s
    assert one_s == pytest.approx(32 * 0.5 / 4, rel=0.1)


def test_an_optimizer_on_the_host_takes_its_threads_and_no_more_than_the_host_gives():
    offloaded, stored = Plan(dp=4, zero=2, offload="optimizer"), Plan(dp=4, zero=2)
    world = truth(sample_core_s=1e-9, thread_update_rate=1e8, host_update_rate=8e8, host_sharing=1e-9)

    def step_s(plan, cores):
        return predict(world, Rows.of([Row(TRANSFORMER, plan, Allocation.of((4,), cores_per_device=cores))]))[0]

    one, two, eight, sixteen = (step_s(offloaded, n) for n in (1, 2, 8, 16))
    assert one - two == pytest.approx(TRANSFORMER.parameters / 4 / 1e8 / 2, rel=0.01)
    assert two > eight == pytest.approx(sixteen)
    assert step_s(stored, 1) == pytest.approx(step_s(stored, 16)), "what stays on the device needs no more cores"


def test_a_described_model_is_predicted_under_every_legal_plan():
    shape = gpt()
    load = Workload.from_shape(shape, "gpt")
    rows = [Row(load, plan, Allocation.of((2, 2))) for plan in legal_plans(shape, 4)]
    assert len(rows) > 20
    assert load.parameters == sum(math.prod(p.shape) for p in shape.parameters)
    assert np.all(predict(truth(), Rows.of(rows)) > 0)


def test_a_plan_on_the_wrong_number_of_devices_is_refused():
    with pytest.raises(ValueError, match="4 ranks does not fit an allocation of 3"):
        Rows.of([Row(TRANSFORMER, Plan(dp=4), Allocation.of((3,)))])


def test_bytes_that_cross_the_network():
    inside = traffic(4, 2, 2, (8, 8))  # a stage on each host
    assert inside.dp_flows == 0 and inside.pp_far_hops == 1 and not inside.tp_crosses
    across = traffic(4, 4, 1, (8, 8))  # each host has two replicas of four shards
    assert across.dp_flows == 4 and across.dp_hosts == 2
    assert traffic(2, 4, 1, (2, 6)).tp_crosses
    assert traffic(8, 1, 1, (1, 3, 4)).dp_devices == 1


def test_known_figures_of_the_hardware_narrow_the_prior():
    prior = Prior.typical(known={"network_rate": 1.2e9})
    assert math.exp(prior.mean[INDEX["network_rate"]]) == pytest.approx(1.2e9)
    assert prior.width[INDEX["network_rate"]] < Prior.typical().width[INDEX["network_rate"]]
    with pytest.raises(ValueError, match="there is no coefficient 'netwrk'"):
        Prior.typical(known={"netwrk": 1.0})
    with pytest.raises(ValueError, match="must be above 0"):
        Prior.typical(known={"network_rate": 0.0})


def test_each_doubling_of_hosts_adds_the_same_latency():
    """A collective's tree grows by a level; a latency per host would make 64 hosts useless."""
    logs = truth(network_latency_s=0.05, overlap=1e-6, local_latency_s=1e-12, network_rate=1e15, local_rate=1e15)
    load = replace(TRANSFORMER, global_batch=64)
    rows = Rows.of(Row(load, Plan(dp=n), Allocation.of((1,) * n)) for n in (2, 4, 8, 16, 32, 64))
    added = np.diff(phases(logs, rows).sync_s)
    assert added == pytest.approx(np.full(5, 0.1), rel=0.02)


@given(st.floats(0.01, 100.0))
@settings(max_examples=30, deadline=None)
def test_launches_hide_behind_large_kernels_and_small_kernels_behind_launches(ratio):
    rows = Rows.of([Row(TRANSFORMER, Plan(), Allocation.of((1,)))])
    compute_s = TRANSFORMER.global_batch * TRANSFORMER.flops_per_sample / 80e12
    launch_s = ratio * compute_s
    (forward_s,) = phases(truth(launch_s=launch_s / TRANSFORMER.layers, crowding=1e-9), rows).forward_s
    longer_s = max(compute_s, launch_s)
    assert longer_s <= forward_s <= 1.42 * longer_s
    if not 0.25 < ratio < 4.0:
        assert forward_s < 1.05 * longer_s
