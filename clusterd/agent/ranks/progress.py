"""Training progress: new lines of each running attempt's steps.jsonl, sent at most twice a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, steps_after
from clusterd.agent.ranks.attempts import Attempts

PERIOD_S = 0.5
_STEP_FIELDS = ("step", "loss", "samples", "at_s", "plan")
_DETAILS = ("phases", "device_bytes", "host_bytes")


class Progress:
    """Follows the step files by polling, because inotify misses changes on network file systems."""

    def __init__(self, emit: Callable[[dict[str, Any]], object]) -> None:
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
        self._sizes[attempt.name] = end
        if not steps or steps[-1] == attempt.step:
            return
        attempt.step = step = steps[-1]
        details: dict[str, Any] = next((s for s in reversed(steps) if "phases" in s), {})
        self._emit(
            {
                "event": "progress",
                "job": attempt.job,
                "attempt": attempt.attempt,
                "generation": attempt.generation,
                "step_time_s": step.get("time_s"),
                **{k: step.get(k) for k in _STEP_FIELDS},
                **{k: details[k] for k in _DETAILS if k in details},
                "steps": [[s["step"], s["time_s"]] for s in steps if s.get("plan") == step.get("plan")],
            }
        )

    def forget(self, name: str) -> None:
        """Drop the read position of an attempt that was removed."""
        self._sizes.pop(name, None)
