"""Training progress: new lines of each running attempt's steps.jsonl, sent at most twice a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, steps_after
from clusterd.agent.ranks.attempts import Attempts
from clusterd.protocol import agent
from clusterd.protocol.messages import Event

PERIOD_S = 0.5
_DETAILS = ("phases", "device_bytes", "host_bytes", "overhead_bytes")


class Progress:
    """Follows the step files by polling, because inotify misses changes on network file systems.

    Args:
        emit: sends an event to the daemon; false: none took it, and its step counts as not sent.
    """

    def __init__(self, emit: Callable[[Event], bool]) -> None:
        self._emit = emit
        self._sizes: dict[str, int] = {}

    async def follow(self, attempts: Attempts) -> None:
        """Poll running attempts until cancelled."""
        while True:
            for attempt in attempts:
                if attempt.running:
                    self.poll(attempt)
            await asyncio.sleep(PERIOD_S)

    def poll(self, attempt: Attempt) -> None:
        """Send the newest step if it was not sent before."""
        try:
            size = os.stat(attempt.steps).st_size
        except OSError:
            return
        if size == self._sizes.get(attempt.name):
            return
        steps, end = steps_after(attempt.steps, self._sizes.get(attempt.name, 0))
        if not steps:
            self._sizes[attempt.name] = end
            return
        step = steps[-1]
        details: dict[str, Any] = next((s for s in reversed(steps) if "phases" in s), {})
        report = agent.Progress(
            attempt.job,
            attempt.attempt,
            attempt.generation,
            step=step["step"],
            loss=step.get("loss"),
            is_nan="loss" in step and step["loss"] is None,
            step_time_s=step["time_s"],
            steps=tuple((s["step"], s["time_s"]) for s in steps if s.get("plan") == step.get("plan")),
            plan=step.get("plan") or "",
            samples=step.get("samples"),
            at_s=step.get("at_s"),
            **{k: details[k] for k in _DETAILS if k in details},
        )
        if self._emit(report):
            self._sizes[attempt.name] = end

    def forget(self, name: str) -> None:
        """Drop the read position of an attempt that was removed."""
        self._sizes.pop(name, None)
