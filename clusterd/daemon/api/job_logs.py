"""A job's output, wherever it is: on its hosts while it runs, on the head node when it is over or its host is away."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

from clusterd import projection
from clusterd.core.queueing import admission
from clusterd.core.state import Attempt, Job
from clusterd.daemon.access import Peer
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.archive import Archive, Tail
from clusterd.errors import AgentLost, ClusterError, UsageError
from clusterd.protocol.forkserver import STREAM_CHANGE
from clusterd.protocol.requests import ReadLog, ReadSteps
from clusterd.ssh.host import AgentRefused
from clusterd.types import AttemptState, HostId, HostState, JobState
from clusterd.units import counted, size

CHUNK_BYTES = 1 << 18
POLL_S = 0.2
"""Between two looks at a log that did not grow."""

ANSWER_S = 10.0
"""For a piece of a log, before what was copied here is shown in its place."""

BLINK_S = 2.0
"""Whoever follows is not told of a host that does not answer for less."""


@dataclass(frozen=True, slots=True)
class Position:
    """Read position in a job's logs: all earlier generations, and an offset in each log of this one."""

    attempt: int
    generation: int
    offsets: dict[str, int]  # by rank


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Selection of an attempt's logs to read."""

    rank: int | None
    follow: bool
    last_bytes: int | None
    apart: bool
    is_last: bool
    """No later attempt will be looked at."""


class JobLogs:
    """Pulls by offset: what a broken connection swallowed is asked for again."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive, feed: Feed) -> None:
        self._engine, self._hosts, self._archive, self._feed = engine, hosts, archive, feed
        self._state = engine.state

    async def logs(
        self,
        peer: Peer,
        job: str,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        after: Position | None = None,
        last_bytes: int | None = None,
        apart: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        """Pieces of one rank's log, or of all: ``{attempt, generation, rank, data, offset}``.

        Whoever follows is told what there is to wait for: a piece without data has it as ``says``.

        `follow`: until the job is over; `after`: what came before is left out; `last_bytes`: of each log, at most;
        `apart`: pieces of stderr have ``stderr``, where the job was submitted to have it apart.
        """
        state = self._state
        known = admission.find_job(state, job, peer.user)
        number = attempt
        if number is None and after is not None and after.attempt:  # 0 described it, and is no attempt
            number = after.attempt
        wanted = _Wanted(rank, follow, last_bytes, apart, is_last=not follow or attempt is not None)
        while True:
            if number is None and not known.attempts:
                if _is_over(known):
                    if after is None:
                        async for piece in self._description(known):
                            yield piece
                    return
                if not follow:
                    raise ClusterError(
                        f"job {known.id} ({known.spec.name}) has not started yet: clusterd why {known.id}"
                    )
                await self._feed.wait(self._feed.number)
                continue
            current = self._attempt(known, number)
            begin = after if after is not None and after.attempt == current.number else None
            last: dict[str, Any] = {"attempt": current.number, "generation": current.generation, "rank": rank or 0}
            async for piece in self._attempt_logs(known, current, wanted, begin):
                last = piece
                yield piece
            if wanted.is_last:
                return
            is_reported = False
            while known.attempts[-1].number == current.number:  # over, and the next one not begun
                if _is_over(known):
                    return
                if known.state is JobState.QUEUED and not is_reported:
                    is_reported = True
                    yield {
                        "offset": 0,
                        **last,
                        "data": b"",
                        "says": f"is queued again: {projection.reason(known, state)}",
                    }
                await self._feed.wait(self._feed.number)
            number = current.number + 1

    async def _attempt_logs(
        self, job: Job, attempt: Attempt, wanted: _Wanted, after: Position | None
    ) -> AsyncIterator[dict[str, Any]]:
        """One generation after the other: a move goes on in another log, on another host.

        Raises:
            ClusterError: there is nothing, and no later attempt will be looked at.
        """
        done = after.generation - 1 if after is not None else 0
        while True:
            generation = next((g for g in (*sorted(attempt.former), attempt.generation) if g > done), None)
            if generation is None:
                return
            offsets = after.offsets if after is not None and after.generation == generation else {}
            async for piece in self._generation_logs(job, attempt, generation, wanted, offsets):
                yield piece
            done = generation

    async def _generation_logs(
        self, job: Job, attempt: Attempt, generation: int, wanted: _Wanted, offsets: dict[str, int]
    ) -> AsyncIterator[dict[str, Any]]:
        hosts, rank = _hosts_of(attempt, generation), wanted.rank
        if rank is not None and rank not in hosts:
            every = [len(_hosts_of(attempt, each)) for each in {*attempt.former, attempt.generation}]
            if rank in range(max(every)):
                return  # that plan had fewer ranks than another one
            raise UsageError(f"attempt {attempt.number} of job {job.id} has ranks 0 to {max(every) - 1}, not {rank}")
        at = {
            r: max(offsets[str(r)], 0)
            if str(r) in offsets
            else await self._near_end(job, attempt, generation, r, wanted.last_bytes)
            for r in (sorted(hosts) if rank is None else [rank])
        }
        silent: dict[HostId, float] = {}  # since when; infinity: that is told
        streams: dict[int, list[int]] = {}  # offsets at which a rank's log changes between stdout and stderr
        while True:
            # Looked up before reading: nothing comes after it.
            is_over = attempt.state is AttemptState.ENDED or self._is_archived(job, attempt, generation, at)
            grew, unknown = False, 0
            for number in at:
                try:
                    answer = await self._read(job, attempt, generation, number, at[number])
                except AgentLost as lost:
                    if not wanted.follow:
                        raise ClusterError(f"{hosts[number]} cannot be reached now: {lost}") from None
                    answer = {"data": b"", "offset": at[number], "is_away": True}
                if not answer.pop("is_away", False):
                    silent.pop(hosts[number], None)
                elif wanted.follow and self._is_away(hosts[number], silent):
                    why = projection.reason(job, self._state)
                    which = {"attempt": attempt.number, "generation": generation, "rank": number}
                    yield {**which, "data": b"", "offset": at[number], "says": why}
                unknown += bool(answer.pop("is_unknown", False))
                if answer["data"]:
                    grew = True
                    at[number] = answer["offset"]
                    which = {"attempt": attempt.number, "generation": generation, "rank": number}
                    if wanted.apart:
                        changes = streams.setdefault(number, [])
                        await self._extend(changes, job, which, hosts[number])
                        for piece in _apart(answer, changes):
                            yield {**which, **piece}
                    else:
                        yield {**which, **answer}
            if not grew:
                nothing = unknown == len(at) and generation == attempt.generation
                if nothing and wanted.is_last and attempt.state is AttemptState.ENDED:
                    why = "it never started, or was forgotten"
                    raise ClusterError(f"attempt {attempt.number} of job {job.id} ({job.spec.name}) has no log: {why}")
                if is_over or not wanted.follow:
                    return
                await anyio.sleep(POLL_S)

    async def _near_end(self, job: Job, attempt: Attempt, generation: int, rank: int, last_bytes: int | None) -> int:
        """The offset of a log's last so many bytes; 0 where nobody knows its size now."""
        if last_bytes is None:
            return 0
        archived = self._archive.log_file(job.id, attempt.number, generation, rank)
        which: dict[str, Any] = {"job": job.id, "attempt": attempt.number, "generation": generation, "rank": rank}
        if archived.exists():
            whole = self._archive.log_begins_at(job.id, attempt.number, generation, rank) + archived.stat().st_size
        else:
            host = _hosts_of(attempt, generation)[rank]
            try:
                answer = await self._hosts.request(host, ReadLog(offset=0, limit=0, **which))
            except ClusterError:  # not there yet, or away: whoever reads meets it
                return 0
            whole = answer.size
        return max(whole - last_bytes, 0)

    def _is_away(self, host: HostId, silent: dict[HostId, float]) -> bool:
        """True once per outage of a host, after it has not answered for `BLINK_S`."""
        known, now_s = self._state.hosts.get(host), time.monotonic()
        if known is None or known.state is HostState.UP or now_s - silent.setdefault(host, now_s) < BLINK_S:
            return False
        silent[host] = math.inf
        return True

    def _is_archived(self, job: Job, attempt: Attempt, generation: int, ranks: Iterable[int]) -> bool:
        return all(self._archive.log_file(job.id, attempt.number, generation, rank).exists() for rank in ranks)

    async def _extend(self, changes: list[int], job: Job, which: dict[str, Any], host: HostId) -> None:
        """Append the offsets of a log's later changes between stdout and stderr, of which the log's reader needs all.

        Raises:
            ClusterError: the host does not answer.
        """
        fetched = self._archive.streams_file(job.id, which["attempt"], which["generation"], which["rank"])
        while True:
            begin = len(changes) * STREAM_CHANGE.size
            if fetched.exists():
                answer = await _read_file(fetched, begin)
            else:
                wanted = ReadLog(job=job.id, **which, offset=begin, limit=CHUNK_BYTES, streams=True)
                answer = await self._pull(host, wanted)
            whole = len(answer["data"]) // STREAM_CHANGE.size * STREAM_CHANGE.size
            changes += (offset for (offset,) in STREAM_CHANGE.iter_unpack(answer["data"][:whole]))
            if not whole:
                return

    async def _read(self, job: Job, attempt: Attempt, generation: int, rank: int, offset: int) -> dict[str, Any]:
        archived = self._archive.log_file(job.id, attempt.number, generation, rank)
        which: dict[str, Any] = {"job": job.id, "attempt": attempt.number, "generation": generation, "rank": rank}
        host = _hosts_of(attempt, generation)[rank]
        if not archived.exists():
            try:
                return await self._pull(host, ReadLog(offset=offset, limit=CHUNK_BYTES, **which))
            except AgentLost:
                tail = self._archive.tail(job.id, attempt.number, generation, rank)
                if tail is None:
                    raise
                return _log_tail(host, tail, offset)
        begin = self._archive.log_begins_at(job.id, attempt.number, generation, rank)
        if offset >= begin:
            return await _read_file(archived, offset, begin)
        try:
            answer = await self._pull(host, ReadLog(offset=offset, limit=CHUNK_BYTES, **which))
        except ClusterError:
            answer = {"data": b""}
        if answer["data"]:
            return answer
        rest = await _read_file(archived, begin, begin)
        return {**rest, "data": _missing(host, begin - offset) + rest["data"]}

    async def _pull(self, host: HostId, wanted: ReadLog | ReadSteps) -> dict[str, Any]:
        try:
            with anyio.fail_after(ANSWER_S):
                answer = await self._hosts.request(host, wanted)
        except TimeoutError:  # of a host that is silent the connection ends later
            raise AgentLost(f"it has not answered for {ANSWER_S:.0f} s") from None
        except AgentRefused as refused:
            if refused.kind != "unknown":
                raise
            return {"data": b"", "offset": wanted.offset, "is_unknown": True}  # not launched there yet, or forgotten
        return {"data": answer.data, "offset": answer.offset, "size": answer.size}

    async def _description(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        archived = self._archive.log_file(job.id, 0, 1, 0)
        if archived.exists():
            yield {"attempt": 0, "generation": 1, "rank": 0, **await _read_file(archived, 0)}

    async def steps(
        self, peer: Peer, job: str, attempt: int | None = None, last_bytes: int | None = None
    ) -> dict[str, Any]:
        """Training steps of an attempt, one JSON object a line, as its rank 0 wrote them.

        Args:
            last_bytes: this much of the newest ones alone; the first line may be incomplete.
        """
        known = admission.find_job(self._state, job, peer.user)
        if not known.attempts:
            return {"job": known.id, "data": b""}
        current = self._attempt(known, attempt)
        if last_bytes is not None:
            return {"job": known.id, "data": await self._last_steps(known, current, last_bytes)}
        parts = [await self._steps_of(known, current, g) for g in (*sorted(current.former), current.generation)]
        return {"job": known.id, "data": b"".join(parts)}

    async def _last_steps(self, job: Job, attempt: Attempt, last_bytes: int) -> bytes:
        archived = self._archive.steps_file(job.id, attempt.number, attempt.generation)
        if archived.exists():
            start = archived.stat().st_size - last_bytes
            return bytes((await _read_file(archived, max(start, 0)))["data"])
        host = _hosts_of(attempt, attempt.generation)[0]

        which: dict[str, Any] = {"job": job.id, "attempt": attempt.number, "generation": attempt.generation}
        size = (await self._pull(host, ReadSteps(offset=0, limit=0, **which))).get("size", 0)
        wanted = ReadSteps(offset=max(size - last_bytes, 0), limit=CHUNK_BYTES, **which)
        return bytes((await self._pull(host, wanted))["data"])

    async def _steps_of(self, job: Job, attempt: Attempt, generation: int) -> bytes:
        archived = self._archive.steps_file(job.id, attempt.number, generation)
        if archived.exists():
            return await anyio.Path(archived).read_bytes()
        which: dict[str, Any] = {"job": job.id, "attempt": attempt.number, "generation": generation}
        parts: list[bytes] = []
        offset = 0
        while True:
            wanted = ReadSteps(offset=offset, limit=CHUNK_BYTES, **which)
            answer = await self._pull(_hosts_of(attempt, generation)[0], wanted)
            if not answer["data"]:
                return b"".join(parts)
            parts.append(answer["data"])
            offset = answer["offset"]

    def _attempt(self, job: Job, number: int | None) -> Attempt:
        if number is None:
            return job.attempts[-1]
        if not 1 <= number <= len(job.attempts):
            raise UsageError(
                f"job {job.id} has had {counted(len(job.attempts), 'attempt')}; there is no attempt {number}"
            )
        return job.attempts[number - 1]


def _apart(piece: dict[str, Any], changes: list[int]) -> Iterator[dict[str, Any]]:
    """Parts of a piece of a log that are of one stream each; `changes` are offsets at which it changes."""
    end, data = piece["offset"], piece["data"]
    begin = end - len(data)
    first = bisect_right(changes, begin)
    cuts = [begin, *changes[first : bisect_left(changes, end)], end]
    for number, (start, stop) in enumerate(pairwise(cuts), first):
        stderr = {"stderr": True} if number % 2 else {}
        yield {**piece, "data": data[start - begin : stop - begin], "offset": stop, **stderr}


def _is_over(job: Job) -> bool:
    return job.state.is_final


def _hosts_of(attempt: Attempt, generation: int) -> dict[int, HostId]:
    """Host by rank."""
    if generation in attempt.former:
        return attempt.former[generation].hosts
    return {number: rank.place.host for number, rank in attempt.ranks.items()}


def _log_tail(host: HostId, tail: Tail, offset: int) -> dict[str, Any]:
    """Log tail fetched before the host stopped answering; empty if `offset` is beyond it."""
    if offset >= tail.end:
        return {"data": b"", "offset": offset, "is_away": True}
    before = _missing(host, tail.begin - offset) if offset < tail.begin else b""
    after = f"\n[clusterd: {host} does not answer; what this rank said last is there]\n".encode()
    return {"data": before + tail.data[max(offset - tail.begin, 0) :] + after, "offset": tail.end, "is_away": True}


def _missing(host: HostId, bytes_: int) -> bytes:
    return f"\n[clusterd: {size(bytes_)} of this log are on {host} alone, which does not answer]\n".encode()


async def _read_file(file: Path, offset: int, begin: int = 0) -> dict[str, Any]:
    """From `offset` of a log on; the file holds what comes after its first `begin` bytes."""
    async with await anyio.open_file(file, "rb") as opened:
        await opened.seek(offset - begin)
        data = await opened.read(CHUNK_BYTES)
    return {"data": data, "offset": offset + len(data)}
