"""Numbered changes for watchers: a window of the past, and a wake-up when a new change is published.

Watchers pull at their own pace; one that falls out of the window starts again from a baseline, so that a slow
one costs the daemon nothing.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import anyio

from clusterd.core.decisions import Decision
from clusterd.core.events import Event
from clusterd.core.scheduler import NO_SIDE_EFFECTS, SideEffects
from clusterd.core.state import Job
from clusterd.rows import pack

WINDOW = 4096
"""Changes that a watcher may be behind."""


ROWS_MAX = 16
"""Changes whose rows are kept for other watchers; few watchers are further behind, and rows are large."""


@dataclass(frozen=True)
class SharedRow:
    """Row that goes to many clients, and is packed once for all of them."""

    row: Any
    number: int  # of the change or baseline

    @cached_property
    def packed(self) -> bytes:
        """The row as a part of a frame."""
        return pack(self.row)


JOBS_PER_ITEM = 1000
"""Jobs in one item of a baseline."""

SHARED_S = 5.0
"""Age up to which watchers share a baseline: what changed since comes after it."""


@dataclass(slots=True)
class Change:
    """Events and decisions of one batch."""

    number: int  # of its last event
    events: tuple[Event, ...]
    decisions: tuple[Decision, ...]
    side_effects: SideEffects = NO_SIDE_EFFECTS
    row: SharedRow | None = None  # as watchers get it, once one of them did


class Feed:
    """Window of the newest changes."""

    def __init__(self) -> None:
        self._window: deque[Change] = deque(maxlen=WINDOW)
        self._published = anyio.Event()
        self.number = 0
        """Number of the newest event."""

    def add(
        self, events: Sequence[Event], decisions: Sequence[Decision], side_effects: SideEffects = NO_SIDE_EFFECTS
    ) -> None:
        """Publish the change of a handled batch."""
        self.number = events[-1].id
        self._window.append(Change(self.number, tuple(events), tuple(decisions), side_effects))
        if len(self._window) > ROWS_MAX:
            self._window[-1 - ROWS_MAX].row = None
        self._published.set()
        self._published = anyio.Event()

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
            await self._published.wait()


class _Baseline:
    """One baseline; an item is made when the first watcher comes to it, and lives while it is sent to one."""

    def __init__(self, number: int, jobs: list[Job]) -> None:
        self.number, self.begun_s = number, time.monotonic()
        self.pages = [jobs[at : at + JOBS_PER_ITEM] for at in range(0, len(jobs), JOBS_PER_ITEM)] or [[]]
        self.items: WeakValueDictionary[int, SharedRow] = WeakValueDictionary()


class Baselines:
    """First items of `watch`; watchers that connect at about the same time share them.

    Rows may be newer than the number of their baseline: the changes after it bring them once more. The items before the
    last have number 0, from which nobody can resume.

    Args:
        listed: returns the jobs of a baseline.
        made: returns an item with these jobs, its number, and true if it is the first.
    """

    def __init__(
        self, feed: Feed, listed: Callable[[], Awaitable[list[Job]]], made: Callable[[list[Job], int, bool], Any]
    ) -> None:
        self._feed, self._listed, self._made = feed, listed, made
        self._current: Callable[[], _Baseline | None] = lambda: None  # it lives while a watcher reads it

    async def items(self) -> AsyncIterator[SharedRow]:
        """Items of a baseline that is at most `SHARED_S` old."""
        current = self._fresh()
        if current is None:
            number, jobs = self._feed.number, await self._listed()
            current = self._fresh() or _Baseline(number, jobs)  # another watcher may have been as fast
            self._current = weakref.ref(current)
        for index, jobs in enumerate(current.pages):
            if (item := current.items.get(index)) is None:
                number = current.number if index == len(current.pages) - 1 else 0
                item = current.items[index] = SharedRow(self._made(jobs, number, index == 0), number)
            yield item

    def _fresh(self) -> _Baseline | None:
        current = self._current()
        return current if current is not None and time.monotonic() - current.begun_s < SHARED_S else None
