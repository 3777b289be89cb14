"""Work that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from clusterd.agent.log import say


class Background:
    """Tasks that are kept until they are over; what one fails of is said."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[object]) -> None:
        """Begin it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def wait(self) -> None:
        """Until all is over, also what begins meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _over(self, work: asyncio.Future[Any]) -> None:
        self._tasks.discard(work)
        if not work.cancelled() and (error := work.exception()):
            say(f"agent: {type(error).__name__}: {error}")
