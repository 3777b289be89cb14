"""One connection to a socket of the agent, with bounded memory in both directions.

A peer that does not take its frames is not read from, and is cut off if it takes none for long. Large frames are
received within a budget that all connections share.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from clusterd import protocol
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.log import log_line
from clusterd.protocol.agent import RankReport
from clusterd.protocol.budget import FREE_BYTES, ByteBudget
from clusterd.protocol.calls import Failure, Ok, reply
from clusterd.protocol.codec import to_map
from clusterd.protocol.proof import CHALLENGE_BYTES_MAX

QUEUE_BYTES_MAX = 4 << 20
"""Of frames that the peer has not taken; beyond it nothing more is read from the peer."""
QUEUE_BYTES_LIMIT = 4 * QUEUE_BYTES_MAX
"""A peer that lets even more events accumulate is cut off: it reconnects and asks for what it missed."""
WORK_BYTES_MAX = 16 << 20
"""Of requests of one connection that are being answered, with the bytes that they ask for."""
REQUEST_BYTES = 16 << 10
"""Least cost of a request: about a thousand small ones are answered side by side."""
RANK_FRAME_BYTES_MAX = 8 << 20
"""Longest frame of a rank; the metadata that it publishes with a segment grows with its script's own state."""

STALLED_S = 120.0
ADMISSION_S = 30.0
RECEIVE_S = 60.0
_PIECE_BYTES = 1 << 16

Message = dict[str, Any]


class Connection:
    """Connection from a daemon or a rank. One task sends the queued frames in order.

    Args:
        budget: for large frames of all connections, by daemon or attempt.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: ByteBudget) -> None:
        self.daemon: tuple[str, int] | None = None  # its name and epoch, after hello
        self.facts: object = None  # what was last sent of the facts whose change is reported
        self.nonce = ""  # of the challenge that the next hello answers
        self.proven = False  # the daemon knows the cluster's key
        self.rank: tuple[Attempt, int] | None = None  # after rank_hello
        self.orphaned: RankReport | None = None  # what the rank said when it lost its peers
        self.reads_for: Attempt | None = None  # after data_hello
        self.received_bytes = 0  # of the last message
        self._reader, self._writer, self._budget = reader, writer, budget
        self._outgoing: deque[bytes] = deque()
        self._queued_bytes = 0
        self._work_bytes = 0
        self._is_open = True
        self._changed = asyncio.Event()
        self.pump = asyncio.create_task(self._pump())
        self._expiry = asyncio.get_running_loop().call_later(ADMISSION_S, self._expire)

    @property
    def is_admitted(self) -> bool:
        """True once the peer showed who it is."""
        return self.proven or self.rank is not None or self.reads_for is not None

    # ---- out -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> bool:
        """Queue an event; false if it was not. Progress and facts are dropped if the peer does not read."""
        if message.get("event") in ("progress", "facts") and self._queued_bytes > QUEUE_BYTES_MAX:
            return False
        if self._queued_bytes > QUEUE_BYTES_LIMIT:
            log_line(f"agent: a peer that left {self._queued_bytes} bytes unread was cut off")
            self.cut()
            return False
        try:
            self._queue(protocol.encode(message))
        except protocol.ProtocolError as error:
            log_line(f"agent: {message.get('event')} was not sent: {error}")
            return False
        return True

    async def reply(self, number: object, outcome: Ok | Failure) -> None:
        """Queue the reply to a request once the peer took most of the earlier frames."""
        try:
            frame = protocol.encode(reply(number, outcome))
        except protocol.ProtocolError as error:
            frame = protocol.encode(reply(number, Failure(str(error), "size")))
        await self.wait_writable()
        self._queue(frame)

    async def wait_writable(self) -> None:
        """Wait until the peer took most of its frames, or is gone."""
        await self._until(lambda: self._queued_bytes <= QUEUE_BYTES_MAX)

    async def wait_flushed(self) -> None:
        """Wait until the peer took all of its frames, or is gone."""
        await self._until(lambda: not self._queued_bytes)

    def _queue(self, frame: bytes) -> None:
        if self._is_open:
            self._outgoing.append(frame)
            self._queued_bytes += len(frame)
            self._notify()

    async def _pump(self) -> None:
        try:
            while True:
                while not self._outgoing:
                    await self._changed.wait()
                frame = memoryview(self._outgoing.popleft())
                for start in range(0, len(frame), _PIECE_BYTES):
                    self._writer.write(frame[start : start + _PIECE_BYTES])
                    await asyncio.wait_for(self._writer.drain(), STALLED_S)
                    if not self._is_open:
                        return
                self._queued_bytes -= len(frame)
                self._notify()
        except (OSError, asyncio.TimeoutError) as error:
            log_line(f"agent: a connection broke: {error or f'its peer took nothing for {STALLED_S:.0f} s'}")
            self.cut()

    # ---- in ------------------------------------------------------------------------------------------------------

    async def receive(self) -> tuple[Message, Callable[[], None]]:
        """The next message once there is room for it and its reply; the function is called once it is answered.

        Raises:
            ProtocolError: no frame, or one that is longer than this peer's may be.
            OSError, asyncio.IncompleteReadError: the connection ended.
        """
        await self._until(lambda: self._queued_bytes <= QUEUE_BYTES_MAX and self._work_bytes <= WORK_BYTES_MAX)
        if not self._is_open:
            raise ConnectionError("the connection was closed")
        length = await protocol.read_length(self._reader, self._frame_bytes_max)
        if length <= FREE_BYTES or self.proven:
            message, release = protocol.decode(await self._reader.readexactly(length)), None
        else:
            message, release = await self._receive_within_budget(length)
        self.received_bytes = length
        cost = max(length, REQUEST_BYTES) + _requested_bytes(message)
        self._work_bytes += cost

        def finish() -> None:
            self._work_bytes -= cost
            self._notify()
            if release is not None:
                release()

        return message, finish

    async def _receive_within_budget(self, length: int) -> tuple[Message, Callable[[], None]]:
        attempt = self.rank[0] if self.rank is not None else self.reads_for
        owner = attempt.name if attempt is not None else ""
        await self._budget.reserve(owner, length)
        try:
            message = protocol.decode(await asyncio.wait_for(self._reader.readexactly(length), RECEIVE_S))
        except BaseException as error:
            self._budget.release(owner, length)
            if isinstance(error, asyncio.TimeoutError):
                raise protocol.ProtocolError(f"{length} bytes did not come within {RECEIVE_S:.0f} s") from None
            raise
        return message, lambda: self._budget.release(owner, length)

    @property
    def _frame_bytes_max(self) -> int:
        if self.proven:
            return protocol.FRAME_BYTES_MAX
        return RANK_FRAME_BYTES_MAX if self.is_admitted else CHALLENGE_BYTES_MAX

    # ---- end -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Close at once; the queued frames are lost."""
        self._is_open = False
        self._outgoing.clear()
        self._queued_bytes = 0
        self._notify()
        self._expiry.cancel()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close after sending the queued frames, waiting at most one second for the peer to read them."""
        try:
            await asyncio.wait_for(self.wait_flushed(), 1.0)
        except asyncio.TimeoutError:
            pass
        self.pump.cancel()
        self._is_open = False
        self._expiry.cancel()
        self._notify()
        self._writer.close()

    def _expire(self) -> None:
        if not self.is_admitted:
            self.cut()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._is_open and not condition():
            await self._changed.wait()


def _requested_bytes(message: Message) -> int:
    """Bytes that a request wants in its reply."""
    limit = message.get("limit")
    return min(limit, protocol.FRAME_BYTES_MAX) if isinstance(limit, int) and limit > 0 else 0


async def outcome(verb: object, work: Awaitable[object]) -> Ok | Failure:
    """Reply to a request: the result of `work`, a message or its map, or its failure."""
    try:
        result = await work
        return Ok(result if isinstance(result, dict) else to_map(result))
    except Refused as refused:
        return Failure(str(refused), refused.kind)
    except protocol.ProtocolError as error:
        return Failure(f"{verb}: {error}", "request")
    except (KeyError, TypeError, ValueError) as error:
        log_line(traceback.format_exc())
        return Failure(f"{verb}: {type(error).__name__}: {error}", "request")
    except Exception as error:  # one failed request must not end the agent
        log_line(traceback.format_exc())
        return Failure(f"{verb}: {error}", "host")
