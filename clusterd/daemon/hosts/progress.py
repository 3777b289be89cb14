"""Steps of running attempts as events, seldom enough that a month of training is no million lines of history."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc

from clusterd.core import events as e
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.types import HostId, JobId

log = logging.getLogger(__name__)

EVERY_S, EVERY_MOST_S = 2.0, 10.0
"""Between two progress events of one attempt in the journal; the steps themselves are on the host."""

SHARE = 1 / 360
"""Of an attempt's age that may lie between two: who has run for an hour need not be heard of every other second."""

FIRST_STEP_BYTES = 512
"""Enough for one line of steps.jsonl."""

Request = Callable[..., Awaitable[dict[str, Any]]]


class Progress:
    """Of all attempts.

    Args:
        request: asks the agent of a host.
    """

    def __init__(self, engine: Engine, tasks: anyio.abc.TaskGroup, request: Request) -> None:
        self._engine = engine
        self._tasks = tasks
        self._request = request
        self._told_at: dict[tuple[str, int], float] = {}
        self._held_back: dict[tuple[str, int], dict[str, Any]] = {}

    async def heard(self, host: HostId, message: dict[str, Any]) -> None:
        """An agent tells of an attempt's newest step."""
        key = (message["job"], message["attempt"])
        first_loss = None if key in self._told_at else await self._first_loss(host, *key)
        now_s = time.monotonic()
        wait_s = self._told_at.get(key, float("-inf")) + self._every_s(*key) - now_s
        if wait_s > 0 and not message.get("last"):
            # The newest is told when it is time: a job whose next step takes an hour must not look a step behind.
            if key not in self._held_back:
                self._tasks.start_soon(self._tell_later, host, key, wait_s)
            self._held_back[key] = message
            return
        self._told_at[key] = now_s
        self._held_back.pop(key, None)
        await self._engine.report(
            e.AttemptProgressed(
                at_s=time.time(),
                job=JobId(message["job"]),
                attempt=message["attempt"],
                step=message["step"],
                loss=message["loss"],
                step_time_s=message["step_time_s"],
                first_loss=first_loss,
            )
        )

    def _every_s(self, job: str, number: int) -> float:
        attempt = self._engine.scheduler.state.attempt(JobId(job), number)
        age_s = time.time() - attempt.started_s if attempt is not None else 0.0
        return min(max(age_s * SHARE, EVERY_S), EVERY_MOST_S)

    async def _tell_later(self, host: HostId, key: tuple[str, int], wait_s: float) -> None:
        await anyio.sleep(wait_s)
        message = self._held_back.pop(key, None)
        if message is not None:
            self._told_at[key] = float("-inf")
            await self.heard(host, message)

    async def _first_loss(self, host: HostId, job: str, attempt: int) -> float | None:
        """Of step 1: progress events carry the newest step alone."""
        try:
            answer = await self._request(host, "steps", job=job, attempt=attempt, offset=0, limit=FIRST_STEP_BYTES)
            first = json.loads(answer["data"].partition(b"\n")[0])
        except (ClusterError, ValueError) as error:
            log.info("the first step of %s is not known: %s", job, error)
            return None
        loss: float | None = first.get("loss")  # None where it was not finite
        return loss
