"""Forecasts and what came of them: intervals hold what they say, and past errors change the next ones."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.daemon.forecasts.outcomes import Outcome, OutcomeStore, Widening, is_within, learned, scores
from clusterd.rows import Forecast, Quantiles
from clusterd.types import JobId

NOW_S = 1000.0
FACTORS = st.floats(0.5, 10.0)


def narrow(middle_s: float) -> Quantiles:
    """Intervals of a forecaster that is too sure of itself: one minute and two."""
    return Quantiles(middle_s - 60.0, middle_s - 30.0, middle_s, middle_s + 30.0, middle_s + 60.0)


@given(st.lists(st.floats(0.0, 1e6), min_size=5, max_size=5), st.builds(Widening, FACTORS, FACTORS, FACTORS, FACTORS))
def test_intervals_keep_their_order_and_begin_no_earlier_than_now(ahead_s: list[float], widening: Widening) -> None:
    p5_s, p25_s, p50_s, p75_s, p95_s = sorted(NOW_S + s for s in ahead_s)
    found = widening.applied(Quantiles(p5_s, p25_s, p50_s, p75_s, p95_s), NOW_S)
    times = [found.p5_s, found.p25_s, found.p50_s, found.p75_s, found.p95_s]
    known = [time_s for time_s in times if time_s is not None]
    assert known == pytest.approx(sorted(known))
    assert len(known) == 5
    assert known[0] >= NOW_S - 1e-6
    assert found.p50_s == p50_s


def drawn(count: int, spread_s: float, seed: int) -> list[Outcome]:
    random_ = random.Random(seed)
    middle_s = NOW_S + 7200.0
    return [
        Outcome("end", "command", NOW_S, narrow(middle_s), Widening(), middle_s + random_.gauss(0.0, spread_s))
        for _ in range(count)
    ]


@given(st.floats(100.0, 300.0), st.integers(0, 10))
def test_errors_of_the_past_widen_the_next_intervals_to_what_they_say(spread_s: float, seed: int) -> None:
    past, coming = drawn(300, spread_s, seed), drawn(300, spread_s, seed + 1000)
    widening = learned(past)["end"]
    shown = [(one, widening.applied(one.raw, one.at_s)) for one in coming]
    within90 = sum(is_within(one.came_s, q.p5_s, q.p95_s) for one, q in shown) / len(shown)
    within50 = sum(is_within(one.came_s, q.p25_s, q.p75_s) for one, q in shown) / len(shown)
    assert 0.8 <= within90 <= 0.98
    assert 0.38 <= within50 <= 0.62


def test_what_is_always_late_is_widened_on_its_late_side() -> None:
    middle_s = NOW_S + 7200.0
    late = [Outcome("start", "command", NOW_S, narrow(middle_s), Widening(), middle_s + 4.0 * n) for n in range(60)]
    widening = learned(late)["start"]
    assert widening.p95 > 3.0
    assert widening.p5 == 1.0


def test_a_few_outcomes_change_nothing() -> None:
    assert learned(drawn(19, 300.0, 1)) == {}


def test_calibration_is_told_by_kind_and_horizon() -> None:
    soon, later = NOW_S + 300.0, NOW_S + 7200.0
    outcomes = [
        Outcome("start", "command", NOW_S, narrow(soon), Widening(), soon + 10.0),
        Outcome("start", "command", NOW_S, narrow(soon), Widening(), soon + 500.0),
        Outcome("end", "elastic", NOW_S, narrow(later), Widening(2.0, 2.0, 2.0, 2.0), later + 100.0),
    ]
    start, end = scores(outcomes)
    assert (start.what, start.horizon, start.count) == ("start", "10m", 2)
    assert (start.within50, start.within90, start.width90_s) == (0.5, 0.5, 120.0)
    assert (end.what, end.horizon, end.within50, end.within90) == ("end", "2h", 0.0, 1.0)
    assert end.width90_s == 240.0, "as it was shown"


def test_forecasts_are_kept_with_what_came_of_them(tmp_path: Path) -> None:
    """Until its start has come twice as near no second one is stored; a cancelled job leaves nothing."""
    job, gone = JobId("1"), JobId("2")

    def forecast(at_s: float) -> Forecast:
        return Forecast(at_s=at_s, rollouts=100, start=narrow(NOW_S + 800.0), end=narrow(NOW_S + 2000.0))

    async def live() -> None:
        store = OutcomeStore(tmp_path / "forecasts.db")
        kinds = {job: "command", gone: "command"}
        for at_s in (NOW_S, NOW_S + 100.0, NOW_S + 500.0):
            await store.keep({job: forecast(at_s), gone: forecast(at_s)}, kinds)
        await store.forget([gone])
        assert await store.scores() == []
        await store.came("start", {job: NOW_S + 820.0})
        found = await store.scores()
        assert [(one.horizon, one.within50, one.within90) for one in found] == [("10m", 1.0, 1.0), ("2h", 1.0, 1.0)]
        store.close()

    anyio.run(live)
    with sqlite3.connect(tmp_path / "forecasts.db") as database:
        stored = database.execute("SELECT at_s, came_s FROM forecasts WHERE what = 'start'").fetchall()
        (ends,) = database.execute("SELECT count(*) FROM forecasts WHERE what = 'end' AND came_s IS NULL").fetchone()
    assert stored == [(NOW_S, NOW_S + 820.0), (NOW_S + 500.0, NOW_S + 820.0)]
    assert ends == 1
