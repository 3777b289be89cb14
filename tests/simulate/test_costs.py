"""Cost of a live migration in the simulator: bytes over measured rates."""

from __future__ import annotations

import pytest

from clusterd.plans.plan import Plan
from clusterd.simulate.costs import LIVE_FIXED_S, Costs, Side
from clusterd.types import HostId

BILLION = 1_000_000_000
A, B = HostId("a"), HostId("b")


def downtime_s(old: Side, new: Side, parameters: int = BILLION) -> float:
    return Costs(move_s=None).downtime_s(parameters, old, new)


def test_a_move_within_a_host_is_copied_by_all_its_ranks_at_once() -> None:
    """16 GB: out in halves, in as quarters, at 2 GB/s each."""
    old, new = Side(Plan(tp=2), [A] * 2), Side(Plan(tp=4), [A] * 4)
    assert downtime_s(old, new) == pytest.approx(LIVE_FIXED_S + 8 / 2 + 4 / 2)
    assert downtime_s(old, new, 0) == LIVE_FIXED_S


def test_state_missing_on_a_host_crosses_the_network() -> None:
    here, there = Side(Plan(zero=3, dp=4), [A] * 4), Side(Plan(zero=3, dp=4), [B] * 4)
    both = Side(Plan(zero=3, dp=4), [A, A, B, B])
    stays, goes, half = (downtime_s(here, new) for new in (here, there, both))
    assert goes - stays == pytest.approx(16.0), "all of it, at 1 GB/s"
    assert half - stays == pytest.approx(8.0)


def test_replicas_hold_all_and_need_nothing_from_each_other() -> None:
    old = Side(Plan(dp=2), [A, B])
    assert downtime_s(old, Side(Plan(dp=1), [B])) == pytest.approx(LIVE_FIXED_S + 8 / 2 + 16 / 2)
    whole, sharded = (downtime_s(old, Side(Plan(dp=2, zero=zero), [A, B])) for zero in (0, 3))
    assert sharded < whole, "a rank copies in what it holds"


def test_a_move_at_a_price_costs_that_and_is_not_prepared() -> None:
    some = Side(Plan(), [A])
    assert (Costs(78.0).downtime_s(BILLION, some, some), Costs(78.0).prepare_s) == (78.0, 0.0)
