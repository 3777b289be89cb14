"""Sensitivity curves: the gain from more of each resource."""

from __future__ import annotations

import pytest

from clusterd.plans.enumerate import legal_plans
from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import Prior
from clusterd.profiling.curves import (
    over_bandwidth,
    over_cores,
    over_host_memory,
    packed,
)
from clusterd.profiling.fit import Fit, fit
from clusterd.profiling.model import Rows
from clusterd.profiling.placement import Allocation
from clusterd.profiling.workload import Workload
from tests.plans.shapes import gpt
from tests.profiling.worlds import TRANSFORMER, measured, over_devices, plans_on, truth


@pytest.fixture(scope="module")
def learned() -> Fit:
    table = measured(truth(sample_core_s=0.02), TRANSFORMER, noise=0.01)
    return fit(Rows.of(m.row for m in table), [m.step_time_s for m in table], Prior.typical())


def transformer_plans(n: int) -> list[Plan]:
    return plans_on(packed(n, 8).counts, TRANSFORMER)


def test_more_devices_never_make_a_job_slower(learned):
    curve = over_devices(learned, TRANSFORMER, transformer_plans, range(1, 33), 8)
    rising = [p.throughput for p in curve.points]
    assert rising == sorted(rising) and len(rising) > 3
    assert curve.at(7).amount <= 7  # seven devices: no plan divides the batch so, the best with fewer stands
    assert curve.at(0) is None
    assert curve.gain(1) > 0 and curve.gain(10_000) == 0
    point = curve.points[1]
    assert point.lower_s < point.step_time_s < point.upper_s


def test_plans_that_do_not_fit_are_not_offered(learned):
    everything = over_devices(learned, TRANSFORMER, transformer_plans, [8], 8)
    without = over_devices(
        learned, TRANSFORMER, transformer_plans, [8], 8, fits=lambda plan, _: plan != everything.points[0].plan
    )
    assert without.points[0].plan != everything.points[0].plan
    assert without.points[0].throughput < everything.points[0].throughput
    nothing = over_devices(learned, TRANSFORMER, transformer_plans, [8], 8, fits=lambda *_: False)
    assert nothing.points == () and nothing.gain(1) == 0


def test_offload_waits_for_host_memory(learned):
    plans = [Plan(dp=4, zero=2, offload="optimizer"), Plan(dp=4)]
    needs = {plans[0]: 10 << 30, plans[1]: 0}
    here = Allocation.of((4,))
    curve = over_host_memory(learned, TRANSFORMER, plans[:1], here, [1 << 30, 20 << 30], needs.__getitem__)
    assert [p.amount for p in curve.points] == [20 << 30]
    assert over_host_memory(learned, TRANSFORMER, plans, here, [1 << 30], needs.__getitem__).points[0].plan == plans[1]


def test_cores_help_until_the_devices_are_busy(learned):
    starved = fit(Rows.of([]), [], Prior.typical(known={"sample_core_s": 0.3}, known_width=0.01))
    curve = over_cores(starved, TRANSFORMER, [Plan(dp=4)], Allocation.of((4,)), [1, 2, 4, 64, 128])
    assert curve.points[0].amount == 1
    assert curve.gain(1) > 20 * curve.gain(64)


def test_a_faster_network_helps_a_job_over_hosts_and_no_other(learned):
    spread = over_bandwidth(learned, TRANSFORMER, [Plan(dp=4)], Allocation.of((1, 1, 1, 1)), [0.5, 1.0, 2.0])
    assert len(spread.points) == 3
    single = over_bandwidth(learned, TRANSFORMER, [Plan(dp=4)], Allocation.of((4,)), [0.5, 1.0, 2.0])
    assert len(single.points) == 1
    with pytest.raises(ValueError, match="above 0"):
        over_bandwidth(learned, TRANSFORMER, [Plan(dp=4)], Allocation.of((4,)), [0.0])


def test_a_described_model_with_all_its_legal_plans(learned):
    shape = gpt()
    load = Workload.from_shape(shape, "gpt")
    curve = over_devices(learned, load, lambda n: legal_plans(shape, n), [1, 2, 4, 8], 4)
    assert curve.points and curve.points[0].amount == 1
