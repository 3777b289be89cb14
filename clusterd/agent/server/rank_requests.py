"""Connections of ranks: their messages to the daemon, and their requests about their own attempt.

Ranks run code of users. They have a socket of their own, on which no verb of a daemon exists; each shows the token that
it was launched with, and may name segments and migrations of its own attempt only.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from clusterd import protocol
from clusterd.agent.background_tasks import in_thread
from clusterd.agent.host import programs
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.server.connection import Connection, Message, Sessions, outcome
from clusterd.agent.tensors.datasets import RANGE_BYTES_MAX, Datasets
from clusterd.agent.tensors.moves import Moves
from clusterd.protocol import control
from clusterd.protocol.agent import RankReport
from clusterd.protocol.budget import ByteBudget
from clusterd.protocol.messages import Done, Request, from_map, read_event
from clusterd.protocol.rank import Orphaned

REPORT_BYTES_MAX = 256 << 10
"""Largest report of a rank to the daemon; ranks of clusterd send a few hundred bytes."""
BURST_BYTES, BYTES_PER_S, REPORT_COST_BYTES = 1 << 20, 256 << 10, 1 << 10
"""Limits on reports of one rank: bytes at once, bytes per second in the long run, cost of a report beside its bytes.

The daemon journals some reports, for all jobs."""
FRAMES = (16 << 20, 64 << 20)
"""Budget of large frames of ranks: of one attempt, and of all."""
DATA = (8 * RANGE_BYTES_MAX, 16 * RANGE_BYTES_MAX)
"""Budget of ranges of data sets on their way to ranks: of one attempt, and of all."""


_Reply = Done | control.SegmentReply | control.SegmentsReply | control.GpuState


class RankRequests:
    """Serves the connections of ranks.

    Args:
        inspect_gpu: asks the driver about the GPU with a uuid.
        mark_needed: called at each message.
    """

    def __init__(
        self,
        attempts: Attempts,
        sessions: Sessions,
        moves: Moves,
        datasets: Datasets,
        inspect_gpu: Callable[[str], Awaitable[control.GpuState]],
        mark_needed: Callable[[], None],
    ) -> None:
        self._inspect_gpu = inspect_gpu
        self._attempts, self._sessions, self._moves, self._datasets = attempts, sessions, moves, datasets
        self._mark_needed = mark_needed
        self._frames, self._data_budget = ByteBudget(*FRAMES), ByteBudget(*DATA)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        connection = Connection(reader, writer, self._frames)
        pace = _Pace()
        async with self._sessions.serving(connection, "a rank"):
            while True:
                # What ranks send goes to the daemon: while that takes nothing, nothing more is read from them.
                await self._sessions.wait_daemons_writable()
                message, finish = await connection.receive()
                self._mark_needed()
                if "event" in message:
                    self._on_event(connection, message)
                    finish()
                    await pace.spend(connection.received_bytes)
                elif connection.rank is None:  # in order: an event may follow a hello directly
                    await self._serve(connection, message, finish)
                else:
                    self._sessions.start(self._serve(connection, message, finish))

    async def _serve(self, connection: Connection, message: Message, finish: Callable[[], None]) -> None:
        verb = str(message.get("verb"))
        try:
            if connection.reads_for is not None:
                await self._serve_data(connection, connection.reads_for, verb, message)
            else:
                await connection.reply(message.get("id"), await outcome(verb, self._answer(connection, verb, message)))
        finally:
            finish()

    async def _answer(self, connection: Connection, verb: str, message: Message) -> _Reply:
        kind = control.REQUESTS.get(verb)
        if connection.rank is None and kind not in (control.RankHello, control.DataHello):
            raise Refused("hello", f"{verb} came before a rank's hello")
        if kind is None or kind in (control.LookUpData, control.ReadData):
            raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r} of a rank's")
        request = from_map(kind, message, verb)
        if isinstance(request, (control.RankHello, control.DataHello)):
            return self._hello(connection, request)
        assert connection.rank is not None
        return await self._request(*connection.rank, request)

    def _hello(self, connection: Connection, hello: control.RankHello | control.DataHello) -> Done:
        attempt = self._attempts.admit(hello.job, hello.attempt, hello.generation, hello.rank, hello.token)
        if isinstance(hello, control.DataHello):
            connection.reads_for = attempt
            return Done()
        connection.rank = (attempt, hello.rank)
        if attempt.stopped:
            connection.send(control.Stop("stopped").to_message())
        elif missed := self._moves.missed(attempt):
            connection.send(missed.to_message())
        return Done()

    async def _request(self, attempt: Attempt, rank: int, request: Request[Any]) -> _Reply:
        match request:
            case control.MakeSegment():
                _check_own(attempt, request.name)
                return await self._moves.segment(attempt, request)
            case control.PublishSegment():
                _check_own(attempt, request.name)
                return await self._moves.publish(attempt, request)
            case control.FetchSegments():
                _check_own(attempt, request.move)
                _check_own(attempt, request.name)
                for source in request.sources:
                    # A state snapshot may be of an earlier attempt.
                    _check_own(attempt, source.name, any_attempt=True)
                return await self._moves.fetch(attempt, request)
            case control.ListSegments():
                _check_own(attempt, request.move)
                return self._moves.segments(request.move)
            case control.ReportDeviceOpened():
                _check_own(attempt, request.move)
                return self._moves.device_opened(attempt, request)
            case control.ReportFailure():
                self._attempts.failed(attempt, rank, request.reason, request.message)
                return Done()
            case control.InspectGpu():
                device = next(each.device for each in attempt.launch.ranks if each.rank == rank)
                return await self._inspect_gpu(device.uuid) if device.kind == "cuda" else control.GpuState()
            case control.Flush():
                return Done()  # messages of a connection are handled in their order
        raise AssertionError(request)

    async def _serve_data(self, connection: Connection, attempt: Attempt, verb: str, message: Message) -> None:
        """Answer a rank that reads a data set of another host; its bytes count until the rank took them."""
        await self._data_budget.reserve(attempt.name, RANGE_BYTES_MAX)
        try:
            await connection.reply(message.get("id"), await outcome(verb, self._data(attempt, verb, message)))
            await connection.wait_flushed()
        finally:
            self._data_budget.release(attempt.name, RANGE_BYTES_MAX)

    async def _data(self, attempt: Attempt, verb: str, message: Message) -> Message:
        kind = control.REQUESTS.get(verb)
        if kind not in (control.LookUpData, control.ReadData):
            raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r} of data sets")
        request = from_map(kind, message, verb)
        return await in_thread(lambda: self._datasets.ask(attempt, request), "data")

    def _on_event(self, connection: Connection, message: Message) -> None:
        if connection.rank is None:
            return
        attempt, rank = connection.rank
        sender = f"rank {rank} of {attempt.name}"
        if connection.received_bytes > REPORT_BYTES_MAX:
            log_line(f"agent: dropped a report of {connection.received_bytes} bytes by {sender}")
            return
        try:
            event = read_event(control.OF_RANKS, message)
        except protocol.ProtocolError as error:
            log_line(f"agent: dropped a malformed message of {sender}: {error}")
            return
        if isinstance(event, control.FailedEvent):
            self._attempts.failed(attempt, rank, event.reason, event.message)
        elif isinstance(event, control.Report):
            report = RankReport(attempt.job, attempt.attempt, attempt.generation, rank, event.said, time.time())
            if isinstance(event.said, dict) and event.said.get("what") == Orphaned.what:
                connection.orphaned = report  # it says so once, and a daemon that ends may have read it or not
            self._sessions.send_to_daemons(report)


class _Pace:
    """Token bucket of what one rank reports; a rank that reports more is read from more slowly."""

    def __init__(self) -> None:
        self._left_bytes = float(BURST_BYTES)
        self._at_s = time.monotonic()

    async def spend(self, count: int) -> None:
        """Wait until a report of this size is within the rate."""
        now_s = time.monotonic()
        earned = (now_s - self._at_s) * BYTES_PER_S
        self._at_s = now_s
        self._left_bytes = min(self._left_bytes + earned, BURST_BYTES) - count - REPORT_COST_BYTES
        if self._left_bytes < 0:
            await asyncio.sleep(-self._left_bytes / BYTES_PER_S)


def _check_own(attempt: Attempt, name: str, any_attempt: bool = False) -> None:
    """Refuse a migration or segment of another attempt, or of another job.

    Raises:
        Refused: ``foreign``.
    """
    number = r"\d+" if any_attempt else str(attempt.attempt)
    if not re.match(rf"{re.escape(attempt.job)}\.{number}\.", name):
        raise Refused("foreign", f"{name} is not of {attempt.name}")
