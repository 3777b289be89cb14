"""Periodic copies of the ends of running ranks' logs on the head node, for the case that their host fails."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from clusterd.core.state import Attempt
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive, Tail
from clusterd.errors import ClusterError
from clusterd.protocol.requests import Chunk, ReadLog
from clusterd.types import AttemptState, HostId

log = logging.getLogger(__name__)

EVERY_S = 20.0
TAIL_BYTES = 64 << 10
"""Bytes copied of each rank's log; the archive fetches the log itself when the rank has ended."""

Which = tuple[str, int, int, int]
"""Job, attempt, generation, rank."""


class LogTails:
    """Copies the log tails of all running attempts."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine = engine
        self._hosts = hosts
        self._archive = archive
        self._ends: dict[Which, int] = {}

    async def run(self) -> None:
        """Copy tails every `EVERY_S` seconds until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Copy the tails of logs that have grown; hosts are asked concurrently, so that a slow one delays no other."""
        by_host = self._running()
        known = {which for ranks in by_host.values() for which in ranks}
        self._ends = {which: end for which, end in self._ends.items() if which in known}
        async with anyio.create_task_group() as group:
            for host, ranks in by_host.items():
                group.start_soon(self._copy_tails, host, ranks)

    def _running(self) -> dict[HostId, list[Which]]:
        state = self._engine.scheduler.state
        found: dict[HostId, list[Which]] = {}
        for job in state.active:
            attempt: Attempt | None = state.jobs[job].attempt
            if attempt is None or attempt.state is not AttemptState.RUNNING:
                continue
            for number, rank in attempt.ranks.items():
                if rank.end is None and state.hosts[rank.place.host].reaches(attempt.account):
                    which = (attempt.job, attempt.number, attempt.generation, number)
                    found.setdefault(rank.place.host, []).append(which)
        return found

    async def _copy_tails(self, host: HostId, ranks: list[Which]) -> None:
        for which in ranks:
            try:
                await self._copy(host, which)
            except ClusterError as error:
                log.debug("%s: the log tail of %s.%d: %s", host, *which[:2], error)  # not started yet, or host lost
            except OSError as error:
                log.warning("cannot store the log tail of %s.%d: %s", *which[:2], error)

    async def _copy(self, host: HostId, which: Which) -> None:
        names = dict(zip(("job", "attempt", "generation", "rank"), which, strict=True))
        size = (await self._pull(host, names, 0, 0)).size
        if size == self._ends.get(which, 0):
            return
        begin = max(size - TAIL_BYTES, 0)
        answer = await self._pull(host, names, begin, TAIL_BYTES)
        end = answer.offset
        await self._archive.write_tail(*which, Tail(begin, end, answer.data))
        self._ends[which] = end

    async def _pull(self, host: HostId, names: dict[str, Any], offset: int, limit: int) -> Chunk:
        return await self._hosts.request(host, ReadLog(offset=offset, limit=limit, **names))
