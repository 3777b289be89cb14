"""Rows and curves of a model's speed agree with each other."""

from __future__ import annotations

from dataclasses import replace

from clusterd.plans.plan import Plan
from clusterd.profiling.report import device_curve, on_types, plan_rows
from tests.profiling.test_knowledge import known, lab


def test_types_of_devices_are_compared_on_as_many_of_each() -> None:
    """The faster one first; one of which there are too few is left out."""
    fast, few = known(lab(4)), known(replace(lab(1), name="h100"))
    slow = known(replace(lab(4), name="a800"))
    slow.workload = replace(slow.workload, parameters=2_000_000_000)
    points = on_types([slow, few, fast], 2)
    assert [p.allocation.hosts[0].device_type for p in points] == ["a100", "a800"]
    assert {p.amount for p in points} == {2.0}
    assert points[0].throughput > points[1].throughput


def test_the_curve_says_on_which_hosts_and_agrees_with_the_rows_of_these() -> None:
    some = known(lab(2, 2))
    for point in device_curve(some).points:
        shape = tuple(map(int, point.allocation.spread.split("+")))
        rows = plan_rows(some, int(point.amount), shape, None)
        assert sum(shape) == point.amount
        assert (rows[0]["plan"], rows[0]["step_time_s"]) == (str(point.plan), point.step_time_s)


def test_plans_that_cannot_run_come_last_with_the_reason() -> None:
    rows = plan_rows(known(lab(4)), 2, None, Plan(tp=2))
    can = [row for row in rows if row["fits"]]
    assert rows[: len(can)] == can
    assert all(row["why"] for row in rows[len(can) :])
    too_many = plan_rows(known(lab(4)), 8, None, None)
    assert not any(row["fits"] for row in too_many) and "the cluster has 4" in too_many[0]["why"]
