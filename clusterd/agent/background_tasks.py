"""Background tasks whose result no caller awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from clusterd.agent.log import log_line


class Background:
    """Hold references to running tasks and log their exceptions."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[object]) -> None:
        """Start `work` as a task."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def wait(self) -> None:
        """Wait until all tasks are done, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _on_done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log_line(f"agent: {type(error).__name__}: {error}")
