"""Timers: turns `SetTimer` decisions into `TimerFired` events when they are due."""

from __future__ import annotations

import time

import anyio

from clusterd.core.events import TimerFired
from clusterd.core.state import State
from clusterd.daemon.journal.engine import Engine

LOOK_S = 10.0
"""Longest time between two checks of the wall clock for a step."""


class Timers:
    """Fires due timers. The scheduler's state holds the timers, so they survive a restart."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = anyio.Event()

    def changed(self) -> None:
        """Wake the task after a timer was set."""
        self._changed.set()

    async def run(self) -> None:
        """Fire timers until cancelled."""
        state: State = self._engine.scheduler.state
        while True:
            state = self._engine.scheduler.state
            due_s = min(state.timers.values(), default=None)
            wait_s = max(due_s - time.time(), 0.0) if due_s is not None else LOOK_S
            if wait_s:
                with anyio.move_on_after(min(wait_s, LOOK_S)):
                    await self._changed.wait()
            self._changed = anyio.Event()
            self._engine.mind_the_clock()
            now_s = time.time()
            for name, at_s in sorted(state.timers.items(), key=lambda item: item[1]):
                if at_s <= now_s:
                    await self._engine.report(TimerFired(at_s=now_s, timer=name))
