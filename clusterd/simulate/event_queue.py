"""Pending events and the virtual clock that goes from one to the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import Any

from clusterd.core.events import EventId


class EventQueue:
    """Pending events in the order of their time.

    Attributes:
        now_s: virtual time.

    Args:
        round_s: interval of the instants at which events are observed; 0: at once.
    """

    def __init__(self, round_s: float) -> None:
        self.now_s = 0.0
        self._round_s = round_s
        self._heap: list[tuple[float, int, str, Any]] = []
        self._numbers, self._ids = count(), count(1)

    def add(self, at_s: float, kind: str, payload: Any) -> None:
        """Add an event; one in the past happens now."""
        at_s = max(at_s, self.now_s)
        if at_s > self.now_s and kind != "done":
            at_s = self.observed_s(at_s)
        heapq.heappush(self._heap, (at_s, next(self._numbers), kind, payload))

    def observed_s(self, at_s: float) -> float:
        """Time at which the scheduler observes an event: the next round, if rounds are set."""
        return math.ceil(at_s / self._round_s - 1e-9) * self._round_s if self._round_s else at_s

    def stamp(self) -> dict[str, Any]:
        """Time and id of an event that the scheduler observes now."""
        return {"at_s": self.now_s, "id": EventId(next(self._ids))}

    def next_s(self) -> float | None:
        """Time of the next event; None: none is pending."""
        return self._heap[0][0] if self._heap else None

    def last_s(self, until_s: float) -> float:
        """Time of the last pending event until then."""
        return max(at_s for at_s, *_ in self._heap if at_s <= until_s)

    def take_until(self, at_s: float) -> Iterator[tuple[str, Any]]:
        """Remove the events until this time, also those that are added meanwhile; yields kinds and payloads."""
        while self._heap and self._heap[0][0] <= at_s:
            _, _, kind, payload = heapq.heappop(self._heap)
            yield kind, payload

    def has_only_timers(self) -> bool:
        """True if nothing but the policy's own timers is pending."""
        return all(kind == "timer" for _, _, kind, _ in self._heap)
