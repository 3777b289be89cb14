"""Submissions of the next day, drawn from the same hours of past weeks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from clusterd.forecasting import PastJob

HOUR_S, WEEK_S = 3600.0, 7 * 86400.0

AHEAD_HOURS = 24
"""Hours for which later submissions are drawn; the jobs asked about have mostly started by then."""

LEAST_WEEKS, MOST_WEEKS = 2, 4
"""Weeks of history: with fewer, no later submission is drawn."""


class Arrivals:
    """Submissions by hour ahead and past week.

    Attributes:
        weeks: of history; 0: too few, and nothing is ever drawn.
    """

    def __init__(self, past: Sequence[PastJob], now_s: float) -> None:
        oldest_s = min((job.at_s for job in past), default=now_s)
        weeks = min(int((now_s - oldest_s) / WEEK_S), MOST_WEEKS)
        self.weeks = weeks if weeks >= LEAST_WEEKS else 0
        self._hours: list[list[list[tuple[float, PastJob]]]] = [
            [[] for _ in range(self.weeks)] for _ in range(AHEAD_HOURS)
        ]
        for job in past:
            for week in range(self.weeks):
                at_s = job.at_s + (week + 1) * WEEK_S
                hour = int((at_s - now_s) // HOUR_S)
                if 0 <= hour < AHEAD_HOURS:
                    self._hours[hour][week].append((at_s, job))

    def draw(self, random_: random.Random) -> list[tuple[float, PastJob]]:
        """Submissions with their times: of each hour those of one past week."""
        return [one for weeks in self._hours if weeks for one in random_.choice(weeks)]
