"""Forecasts that were shown, and what came of them: calibration, and the widening that follows from it.

Kept in a database beside the journal: it may be lost without losing a job. A forecast of a start or an end is stored
when it is the first, and then each time that the time to it has halved, so that every horizon has its share.
"""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from clusterd.forecasting import SHARES
from clusterd.rows import Forecast, ForecastScore, Quantiles
from clusterd.types import JobId

RETENTION_DAYS = 90

LEARNED_FROM = 500
"""Newest outcomes from which the widening is learned."""

LEAST_OUTCOMES = 20
"""Outcomes from which on intervals are widened."""

NARROWEST, WIDEST = 1.0, 10.0
"""Limits of the widening factor: outcomes of one hour resemble each other, so a few of them are no reason to be surer
than the roll-outs; and a burst of odd jobs must not make intervals useless for weeks."""

HORIZONS = {"10m": 600.0, "2h": 7200.0, "1d": 86400.0, "later": math.inf}
"""Largest time from a forecast to its median, by the name of the class in reports."""

_SCHEMA = """
    CREATE TABLE IF NOT EXISTS forecasts (
        job TEXT NOT NULL, what TEXT NOT NULL, kind TEXT NOT NULL, at_s REAL NOT NULL, p5_s REAL, p25_s REAL,
        p50_s REAL NOT NULL, p75_s REAL, p95_s REAL, wide5 REAL NOT NULL, wide25 REAL NOT NULL, wide75 REAL NOT NULL,
        wide95 REAL NOT NULL, came_s REAL,
        PRIMARY KEY (job, what, at_s)
    ) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Widening:
    """Factors on the distances of an interval's ends from the median, as past errors ask for (split conformal).

    Each side has its own: jobs that are submitted later make starts late, never early.
    """

    p5: float = 1.0
    p25: float = 1.0
    p75: float = 1.0
    p95: float = 1.0

    def applied(self, raw: Quantiles, now_s: float) -> Quantiles:
        """Quantiles with the intervals scaled; nothing is before now."""
        middle_s, floor_s = raw.p50_s, min(now_s, raw.p50_s)
        p5_s = None if raw.p5_s is None else max(middle_s - self.p5 * (middle_s - raw.p5_s), floor_s)
        p25_s = None if raw.p25_s is None else max(middle_s - self.p25 * (middle_s - raw.p25_s), floor_s)
        p75_s = None if raw.p75_s is None else middle_s + self.p75 * (raw.p75_s - middle_s)
        p95_s = None if raw.p95_s is None else middle_s + self.p95 * (raw.p95_s - middle_s)
        p5_s = min(p5_s, p25_s) if p5_s is not None and p25_s is not None else p5_s
        p95_s = max(p95_s, p75_s) if p95_s is not None and p75_s is not None else p95_s
        return Quantiles(p5_s, p25_s, middle_s, p75_s, p95_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One forecast with what came of it."""

    what: str
    kind: str
    at_s: float
    raw: Quantiles
    widening: Widening  # that applied
    came_s: float

    def error(self, end_s: float | None) -> float:
        """Distance of the outcome beyond the median, in distances of an interval's end; negative: on the other side."""
        if end_s is None:  # infinitely far
            return 0.0
        distance_s = end_s - self.raw.p50_s
        # Ends closer than a second say nothing of their side: the outcome's own seconds count.
        return (self.came_s - self.raw.p50_s) / distance_s if abs(distance_s) >= 1.0 else abs(self.came_s - end_s)


def learned(outcomes: Iterable[Outcome]) -> dict[str, Widening]:
    """Widening for starts and for ends: the quantile of their past errors at the share that the interval is to hold."""
    found: dict[str, Widening] = {}
    by_what: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_what.setdefault(one.what, []).append(one)
    for what, some in by_what.items():
        if len(some) >= LEAST_OUTCOMES:
            found[what] = Widening(
                p5=_factor((one.error(one.raw.p5_s) for one in some), 0.95),
                p25=_factor((one.error(one.raw.p25_s) for one in some), 0.75),
                p75=_factor((one.error(one.raw.p75_s) for one in some), 0.75),
                p95=_factor((one.error(one.raw.p95_s) for one in some), 0.95),
            )
    return found


def _factor(errors: Iterable[float], share: float) -> float:
    """Quantile of errors, with the correction of conformal prediction for a finite sample, within the limits."""
    ordered = sorted(errors)
    found = ordered[min(math.ceil((len(ordered) + 1) * share), len(ordered)) - 1]
    return min(max(found, NARROWEST), WIDEST)


def scores(outcomes: Iterable[Outcome]) -> list[ForecastScore]:
    """Calibration of forecasts as they were shown, by start or end, kind of job, and horizon."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        ahead_s = one.raw.p50_s - one.at_s
        horizon = next(name for name, most_s in HORIZONS.items() if ahead_s <= most_s)
        groups.setdefault((one.what, one.kind, horizon), []).append(one)
    order = list(HORIZONS)
    keys = sorted(groups, key=lambda key: (key[0] != "start", key[1], order.index(key[2])))
    return [_score(*key, groups[key]) for key in keys]


def _score(what: str, kind: str, horizon: str, some: list[Outcome]) -> ForecastScore:
    shown = [(one, one.widening.applied(one.raw, one.at_s)) for one in some]
    widths = [q.p95_s - q.p5_s for _, q in shown if q.p5_s is not None and q.p95_s is not None]
    return ForecastScore(
        what=what,
        kind=kind,
        horizon=horizon,
        count=len(some),
        within50=statistics.fmean(is_within(one.came_s, q.p25_s, q.p75_s) for one, q in shown),
        within90=statistics.fmean(is_within(one.came_s, q.p5_s, q.p95_s) for one, q in shown),
        width90_s=statistics.median(widths) if widths else None,
        pinball_s=statistics.fmean(pinball_s(one.came_s, q) for one, q in shown),
    )


def is_within(came_s: float, low_s: float | None, high_s: float | None) -> bool:
    """True for an outcome in an interval; an end that is not known is infinitely far, to the second."""
    return (low_s is None or came_s >= low_s - 1.0) and (high_s is None or came_s <= high_s + 1.0)


def pinball_s(came_s: float, shown: Quantiles) -> float:
    """Mean pinball loss of the known quantiles, in seconds."""
    known = zip(SHARES, (shown.p5_s, shown.p25_s, shown.p50_s, shown.p75_s, shown.p95_s), strict=True)
    losses = [max(share * (came_s - x), (share - 1.0) * (came_s - x)) for share, x in known if x is not None]
    return statistics.fmean(losses)


class OutcomeStore:
    """Forecasts and outcomes, and the widening that they ask for.

    Attributes:
        widening: by "start" and "end"; those without enough outcomes are missing.
    """

    def __init__(self, file: Path) -> None:
        """Open, or create, the database.

        Raises:
            sqlite3.DatabaseError: it is damaged.
        """
        self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._writing = anyio.Lock()
        self._ahead_s: dict[tuple[JobId, str], float] = {}  # of the newest forecast that was stored
        self.widening: dict[str, Widening] = learned(self._outcomes(LEARNED_FROM))

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    async def keep(self, raw: Mapping[JobId, Forecast], kinds: Mapping[JobId, str]) -> None:
        """Store those of the forecasts that are due."""
        found: list[tuple[object, ...]] = []
        for job, forecast in raw.items():
            for what, times in (("start", forecast.start), ("end", forecast.end)):
                ahead_s = times.p50_s - forecast.at_s if times is not None else math.inf
                if times is None or ahead_s * 2.0 > self._ahead_s.get((job, what), math.inf):
                    continue
                self._ahead_s[job, what] = ahead_s
                used = self.widening.get(what, Widening())
                five = (times.p5_s, times.p25_s, times.p50_s, times.p75_s, times.p95_s)
                found.append((job, what, kinds[job], forecast.at_s, *five, *astuple(used)))
        await self._write(
            "INSERT OR REPLACE INTO forecasts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", found
        )

    async def came(self, what: str, at_s: Mapping[JobId, float]) -> None:
        """Record starts or ends, and learn from them."""
        for job in at_s:
            self._ahead_s.pop((job, what), None)
        statement = "UPDATE forecasts SET came_s = ? WHERE job = ? AND what = ? AND came_s IS NULL"
        await self._write(statement, [(time_s, job, what) for job, time_s in at_s.items()])
        oldest_s = max(at_s.values()) - RETENTION_DAYS * 86400.0
        await self._write("DELETE FROM forecasts WHERE at_s < ?", [(oldest_s,)])
        self.widening = learned(await anyio.to_thread.run_sync(self._outcomes, LEARNED_FROM))

    async def forget(self, jobs: Iterable[JobId]) -> None:
        """Drop forecasts that nothing can come of, as of cancelled jobs."""
        gone = list(jobs)
        for job in gone:
            self._ahead_s.pop((job, "start"), None)
            self._ahead_s.pop((job, "end"), None)
        await self._write("DELETE FROM forecasts WHERE job = ? AND came_s IS NULL", [(job,) for job in gone])

    async def scores(self) -> list[ForecastScore]:
        """Calibration of all stored forecasts with an outcome."""
        async with self._writing:
            return scores(await anyio.to_thread.run_sync(self._outcomes))

    def _outcomes(self, newest: int = -1) -> list[Outcome]:
        found = self._database.execute(
            "SELECT what, kind, at_s, p5_s, p25_s, p50_s, p75_s, p95_s, wide5, wide25, wide75, wide95, came_s"
            " FROM forecasts WHERE came_s IS NOT NULL ORDER BY came_s DESC LIMIT ?",
            (newest,),
        )
        return [
            Outcome(what, kind, at_s, Quantiles(*some[:5]), Widening(*some[5:]), came_s)
            for what, kind, at_s, *some, came_s in found.fetchall()
        ]

    async def _write(self, statement: str, values: list[tuple[object, ...]]) -> None:
        async with self._writing:
            await anyio.to_thread.run_sync(self._database.executemany, statement, values)
