"""Observation of the memory that jobs hold on devices that they share, from the samples that agents send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio

from clusterd.core import events as e
from clusterd.core.state import Attempt
from clusterd.daemon.journal.engine import Engine
from clusterd.protocol.agent import Usage
from clusterd.types import HostId

EVERY_S = 10.0
"""Agents sample as often."""


class SharedDeviceMemory:
    """Posts when a job holds more of a device's memory than its part, and when it does no more.

    Args:
        latest: newest sample of a host; None: there is none.
    """

    def __init__(
        self, engine: Engine, latest: Callable[[HostId], Usage | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._engine, self._latest, self._clock = engine, latest, clock

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            for event in self.observe():
                await self._engine.post(event)

    def observe(self) -> list[e.DeviceMemoryObserved]:
        """Events about jobs that began to hold too much, or hold it no more."""
        running = self._engine.scheduler.state.running_attempts()
        return [event for attempt in running for event in self._of_attempt(attempt)]

    def _of_attempt(self, attempt: Attempt) -> Iterator[e.DeviceMemoryObserved]:
        state = self._engine.scheduler.state
        share = state.jobs[attempt.job].spec.resources.share
        if share < 2:
            return
        for host in attempt.hosts:
            if (usage := self._latest(host)) is None:
                continue
            for device in state.hosts[host].devices:
                if device.id not in attempt.devices or device.kind != "cuda":
                    continue
                used = [use.device_memory.get(device.uuid, 0) for use in usage.attempts if use.job == attempt.job]
                part = device.memory_bytes // share
                if used and (sum(used) > part) != bool(attempt.over_share):
                    yield e.DeviceMemoryObserved(
                        at_s=self._clock(), job=attempt.job, attempt=attempt.number, device=device.id,
                        used_bytes=sum(used), part_bytes=part,
                    )  # fmt: skip
