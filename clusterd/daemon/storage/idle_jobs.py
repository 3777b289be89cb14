"""Observation of jobs whose devices do nothing, from the samples that agents send.

It decides nothing: the core learns since when a job is idle, and what an operator allows to be done about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import anyio

from clusterd.core import events as e
from clusterd.core.state import Attempt
from clusterd.daemon.journal.engine import Engine
from clusterd.types import Device, JobId, Reclaim

EVERY_S = 10.0
"""Agents sample as often."""

WORKS = 0.02
"""Least share of the time in which a device works that counts as use: drivers and idle notebooks take a little."""


class IdleJobs:
    """Posts when devices of a running job have done nothing for `idle_after_s`, and when they work again.

    Args:
        busy: share of the time in which a device of a job works; None: not known, which is no proof of either.
        reclaim_idle_s: devices that are idle for so long are reclaimed; None: they are not.
        reclaim: from whom, and how.
    """

    def __init__(
        self,
        engine: Engine,
        busy: Callable[[Device, str], float | None],
        idle_after_s: float,
        reclaim_idle_s: float | None,
        reclaim: Reclaim,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._busy = engine, busy
        self._clock, self._monotonic = clock, monotonic
        self._idle_after_s, self._reclaim_idle_s, self._reclaim = idle_after_s, reclaim_idle_s, reclaim
        # Newest time at which an attempt was not known to be idle, by the clock that is never set.
        self._worked_s: dict[tuple[JobId, int], float] = {}

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            for event in self.observe():
                await self._engine.post(event)

    def observe(self) -> list[e.IdlenessObserved]:
        """Events about jobs that became idle, or work again, since the last call."""
        attempts = [each for each in self._engine.scheduler.state.running_attempts() if each.devices]
        known = {(attempt.job, attempt.number) for attempt in attempts}
        self._worked_s = {key: at_s for key, at_s in self._worked_s.items() if key in known}
        return [event for attempt in attempts if (event := self._of_attempt(attempt)) is not None]

    def _of_attempt(self, attempt: Attempt) -> e.IdlenessObserved | None:
        works, now_s = self._is_working(attempt), self._monotonic()
        worked_s = self._worked_s.setdefault((attempt.job, attempt.number), now_s)
        is_idle = attempt.idle_since_s is not None
        if works is not False or is_idle:
            self._worked_s[attempt.job, attempt.number] = now_s
        if works and is_idle:
            return e.IdlenessObserved(at_s=self._clock(), job=attempt.job, attempt=attempt.number, since_s=None)
        if is_idle or works is not False or now_s - worked_s < self._idle_after_s:
            return None
        at_s = self._clock()
        since_s = at_s - (now_s - worked_s)
        reclaim_at_s = since_s + self._reclaim_idle_s if self._reclaim_idle_s is not None else None
        found = e.IdlenessObserved(at_s=at_s, job=attempt.job, attempt=attempt.number, since_s=since_s)
        return replace(found, reclaim_at_s=reclaim_at_s, reclaim=self._reclaim)

    def _is_working(self, attempt: Attempt) -> bool | None:
        """True if one of its devices works, False if all are known to do nothing."""
        hosts = self._engine.scheduler.state.hosts
        devices = [d for host in attempt.hosts for d in hosts[host].devices if d.id in set(attempt.devices)]
        shares = [self._busy(device, attempt.job) for device in devices]
        if any(share is not None and share >= WORKS for share in shares):
            return True
        return None if None in shares or not shares else False
