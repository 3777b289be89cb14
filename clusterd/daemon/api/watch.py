"""Numbered changes for watchers: a window of the past, and a wake-up when a new change is published.

Watchers pull at their own pace; one that falls out of the window starts again from a baseline, so that a slow
one costs the daemon nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import anyio

from clusterd import protocol
from clusterd.core.decisions import Decision
from clusterd.core.events import Event

WINDOW = 4096
"""Changes that a watcher may be behind."""


ROWS_MAX = 16
"""Changes whose rows are kept for other watchers; few watchers are further behind, and rows are large."""


class SharedRow(dict[str, Any]):
    """Row that goes to many clients, and is packed once for all of them."""

    @cached_property
    def packed(self) -> bytes:
        """The row as a part of a frame."""
        return protocol.pack(self)


@dataclass(slots=True)
class Change:
    """Events and decisions of one batch."""

    number: int  # of its last event
    events: tuple[Event, ...]
    decisions: tuple[Decision, ...]
    row: SharedRow | None = None  # as watchers get it, once one of them did


class Feed:
    """Window of the newest changes."""

    def __init__(self) -> None:
        self._window: deque[Change] = deque(maxlen=WINDOW)
        self._bell = anyio.Event()
        self.number = 0
        """Number of the newest event."""

    def add(self, events: Sequence[Event], decisions: Sequence[Decision]) -> None:
        """Publish the change of a handled batch."""
        self.number = events[-1].id
        self._window.append(Change(self.number, tuple(events), tuple(decisions)))
        if len(self._window) > ROWS_MAX:
            self._window[-1 - ROWS_MAX].row = None
        self._bell.set()
        self._bell = anyio.Event()

    def after(self, number: int) -> list[Change] | None:
        """Changes newer than `number`; None when some are out of the window, or `number` is of another journal."""
        if number > self.number:
            return None
        if number == self.number:
            return []
        if not self._window or (self._window[0].events[0].id > number + 1):
            return None
        # From the new end: a watcher is rarely more than a few behind, and there may be many.
        newer = list(itertools.takewhile(lambda change: change.number > number, reversed(self._window)))
        return newer[::-1]

    async def wait(self, number: int) -> None:
        """Wait for a change newer than `number`."""
        while self.number <= number:
            await self._bell.wait()
