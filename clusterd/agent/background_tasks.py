"""Background tasks whose result no caller awaits, and threads for long blocking calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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


Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """Run `work`, which may block for long, on a thread of its own; return its result or raise its exception."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if answer.done():  # the waiting task was cancelled
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer
