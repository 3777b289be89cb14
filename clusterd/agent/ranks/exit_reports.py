"""Ends of ranks: found out, kept until what they leave behind is gone, and told once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from clusterd.agent.background_tasks import Background
from clusterd.agent.host import processes
from clusterd.agent.host.attempt_records import Attempt, Rank
from clusterd.agent.ranks import stopping

STRAGGLER_GRACE_S = 1.0
"""What outlives the last rank of an attempt gets SIGTERM, and SIGKILL after this long."""

CLEAR_S = 10.0
"""The end of one rank of several is told after this long, whatever still lingers of it: its peers wait."""

Emit = Callable[[dict[str, Any]], object]


class Ends:
    """Of the ranks of all attempts.

    Args:
        emit: sends an event to the daemon, if one listens.
        before_end: called before the end of a rank is told, to tell first what it had still written.
        tag: what marks the processes of an attempt of this name.
    """

    def __init__(
        self, emit: Emit, before_end: Callable[[Attempt], None], tag: Callable[[str], str], background: Background
    ) -> None:
        self._emit = emit
        self._before_end = before_end
        self._tag = tag
        self._background = background

    def look(self, attempt: Attempt) -> None:
        """Find ranks that ended without anyone to tell."""
        for rank in attempt.ranks.values():
            if rank.state == "running" and rank.end is None and (record := _end_of(attempt, rank)):
                self.came(attempt, rank, record)

    def came(self, attempt: Attempt, rank: Rank, record: dict[str, Any]) -> None:
        """A rank has ended, as this record says."""
        if rank.end is None and rank.state != "exited":
            rank.end = record
            if not attempt.lock.locked():
                self.settle(attempt)

    def settle(self, attempt: Attempt) -> None:
        """Tell the ends that came in; the last when nothing of the attempt is left, for that frees the devices."""
        if any(rank.state == "running" and rank.end is None for rank in attempt.ranks.values()):
            for rank in attempt.ranks.values():
                if rank.end is not None:
                    self._background.start(self._clear_and_tell(attempt, rank))
        elif any(rank.end for rank in attempt.ranks.values()):
            self._background.start(self._sweep_and_tell(attempt))

    def tell_all(self, attempt: Attempt) -> None:
        """Tell those that came in and are not told."""
        for rank in attempt.ranks.values():
            self._tell(attempt, rank)

    async def wait_for(self, attempt: Attempt, rank: Rank) -> dict[str, Any]:
        """The record that its fork server is about to write; for a disk that takes none, it may come as an event."""
        while (record := rank.end or _end_of(attempt, rank)) is None:  # noqa: ASYNC110  # it waits for a file
            await asyncio.sleep(0.01)
        return record

    async def _clear_and_tell(self, attempt: Attempt, rank: Rank) -> None:
        """The end of one of several: where it died, a rank that takes over from it may come at once."""
        died = rank.end is not None and rank.end["exit_code"] != 0 and attempt.launch["kind"] == "elastic"
        if died and rank.pid in attempt.sessions:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # one of Python 3.10, where they are two
                await asyncio.wait_for(stopping.clear_session(rank.pid, self._tag(attempt.name)), CLEAR_S)
        self._tell(attempt, rank)

    async def _sweep_and_tell(self, attempt: Attempt) -> None:
        async with attempt.lock:
            await stopping.sweep(self._tag(attempt.name), STRAGGLER_GRACE_S, attempt.sessions)
            self.tell_all(attempt)

    def _tell(self, attempt: Attempt, rank: Rank) -> None:
        if rank.end is None:
            return
        self._before_end(attempt)
        rank.take(attempt.judged(rank.end))
        rank.end = None
        self._emit(
            {
                "event": "rank_exited",
                "job": attempt.job,
                "attempt": attempt.attempt,
                "generation": attempt.generation,
                **{k: v for k, v in rank.report().items() if k not in ("pid", "state")},
            }
        )


def _end_of(attempt: Attempt, rank: Rank) -> dict[str, Any] | None:
    """The record of its end; None while it runs, or while its fork server is about to write the record."""
    if processes.lives(rank.pid, rank.start_time, rank.boot_id):
        return None
    spawner_lives = processes.lives(*rank.spawner, boot=rank.boot_id)  # asked before the disk: it writes, then dies
    record = attempt.read_rank(rank.rank)
    if record is not None and record["state"] == "exited":
        return record
    return None if spawner_lives else rank.lost(time.time())
