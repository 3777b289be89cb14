"""The last words of running ranks, brought to the head node now and then: a host may be gone the next minute."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from clusterd.core.state import Attempt
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive, Tail
from clusterd.errors import ClusterError
from clusterd.types import AttemptState, HostId, HostState

log = logging.getLogger(__name__)

EVERY_S = 20.0
TAIL_BYTES = 64 << 10
"""Of each rank's log; the whole of it comes when the rank is over."""

Which = tuple[str, int, int, int]
"""Job, attempt, generation, rank."""


class LogTails:
    """Of all running attempts."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine = engine
        self._hosts = hosts
        self._archive = archive
        self._ends: dict[Which, int] = {}

    async def run(self) -> None:
        """Serve for ever."""
        while True:
            await anyio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Bring what is new; hosts are asked side by side, so that a slow one delays no other."""
        by_host = self._running()
        known = {which for ranks in by_host.values() for which in ranks}
        self._ends = {which: end for which, end in self._ends.items() if which in known}
        async with anyio.create_task_group() as group:
            for host, ranks in by_host.items():
                group.start_soon(self._look_at, host, ranks)

    def _running(self) -> dict[HostId, list[Which]]:
        state = self._engine.scheduler.state
        found: dict[HostId, list[Which]] = {}
        for job in state.active:
            attempt: Attempt | None = state.jobs[job].attempt
            if attempt is None or attempt.state is not AttemptState.RUNNING:
                continue
            for number, rank in attempt.ranks.items():
                if rank.end is None and state.hosts[rank.place.host].state is HostState.UP:
                    which = (attempt.job, attempt.number, attempt.generation, number)
                    found.setdefault(rank.place.host, []).append(which)
        return found

    async def _look_at(self, host: HostId, ranks: list[Which]) -> None:
        for which in ranks:
            try:
                await self._bring(host, which)
            except ClusterError as error:
                log.debug("%s: the end of the log of %s.%d: %s", host, *which[:2], error)  # not started yet, or lost
            except OSError as error:
                log.warning("the end of the log of %s.%d is not kept here: %s", *which[:2], error)

    async def _bring(self, host: HostId, which: Which) -> None:
        names = dict(zip(("job", "attempt", "generation", "rank"), which, strict=True))
        size = int((await self._pull(host, names, 0, 0))["size"])
        if size == self._ends.get(which, 0):
            return
        begin = max(size - TAIL_BYTES, 0)
        answer = await self._pull(host, names, begin, TAIL_BYTES)
        end = int(answer["offset"])
        await self._archive.write_tail(*which, Tail(begin, end, answer["data"]))
        self._ends[which] = end

    async def _pull(self, host: HostId, names: dict[str, Any], offset: int, limit: int) -> dict[str, Any]:
        return await self._hosts.request(host, "logs", offset=offset, limit=limit, **names)
