"""Client of the daemon's socket for asyncio: one connection for requests, and one for each stream.

Streams are read only as fast as they are consumed: a slow terminal fills a socket buffer, not memory of the daemon.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from clusterd import errors, protocol
from clusterd.protocol import calls
from clusterd.socket_files import refuse_impostor
from clusterd.tui.source.preconnect import HELLO, WATCH

READ_BYTES = 1 << 18
ANSWER_S = 30.0
"""Timeout of the handshake; a daemon that takes longer counts as absent."""


class InvalidReply(errors.ClusterError):
    """The peer does not speak the protocol."""


class Wire:
    """One connection to the daemon."""

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path = path
        self._reader = reader
        self._writer = writer
        self._decoder = protocol.Decoder()
        self._calls = calls.Calls()
        self._answers: asyncio.Task[None] | None = None
        self._watched: deque[calls.Reply] = deque()  # replies to the `watch` that was sent ahead
        self.greeting: dict[str, Any] = {}

    @classmethod
    async def open(cls, path: Path) -> Wire:
        """Connect and agree on a protocol version.

        Raises:
            DaemonAbsent: nobody listens, or access is denied.
            ClusterError: the daemon's version differs.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=READ_BYTES)
                wire = cls(path, reader, writer)
                try:
                    refuse_impostor(writer.get_extra_info("socket"), path)
                    answer = await wire._request("hello", protocol_version=protocol.VERSION)
                except BaseException:
                    wire.close()
                    raise
        except PermissionError:
            raise errors.DaemonAbsent(
                f"{path} does not let this user in: ask its owner to set socket_group in clusterd.toml"
            ) from None
        except TimeoutError:
            raise errors.DaemonAbsent(f"the daemon at {path} does not answer: clusterd status") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise errors.DaemonAbsent(f"no daemon answers at {path} ({reason}): clusterd start") from None
        if not isinstance(answer, dict):
            wire.close()
            raise InvalidReply(f"the server at {path} is not clusterd")
        wire.greeting = answer
        return wire

    @classmethod
    async def adopt(cls, path: Path, preconnected: socket.socket) -> Wire:
        """Take over a connection opened by `tui.source.preconnect.preconnect` and wait for its greeting.

        Raises:
            ClusterError: as `open`.
        """
        reader, writer = await asyncio.open_unix_connection(sock=preconnected, limit=READ_BYTES)
        wire = cls(path, reader, writer)
        greeting: deque[calls.Reply] = deque()
        ahead = wire._calls.open(greeting.append), wire._calls.open(wire._watched.append)
        assert ahead == (HELLO, WATCH)
        try:
            async with asyncio.timeout(ANSWER_S):
                wire.greeting = dict(_result(await wire._next(greeting)))
        except TimeoutError:
            wire.close()
            raise errors.DaemonAbsent(f"the daemon at {path} does not answer: clusterd status") from None
        except BaseException:
            wire.close()
            raise
        return wire

    async def watch_preconnected(self) -> AsyncGenerator[Any, None]:
        """The `watch` stream requested ahead.

        Raises:
            ClusterError: as `call`.
        """
        async for item in self._stream(self._watched):
            yield item

    async def call(self, verb: str, **args: Any) -> Any:
        """Send a request and wait for the reply; requests may overlap.

        Raises:
            ClusterError: the daemon refused, with its message.
            DaemonAbsent: the connection was lost.
        """
        if self._answers is None:
            self._answers = asyncio.create_task(self._read_replies(), name="answers")
        elif self._answers.done():
            raise self._gone()
        replies: asyncio.Queue[calls.Reply] = asyncio.Queue()
        number = self._calls.open(replies.put_nowait)
        try:
            self._send(number, verb, args)
            return _result(await replies.get())
        finally:
            self._calls.close(number)

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """Send a request and yield items until the daemon ends the stream. The connection serves nothing else.

        Raises:
            ClusterError: as `call`.
        """
        replies: deque[calls.Reply] = deque()
        self._send(self._calls.open(replies.append), verb, args)
        async for item in self._stream(replies):
            yield item

    async def _stream(self, replies: deque[calls.Reply]) -> AsyncGenerator[Any, None]:
        while True:
            while replies:
                reply = replies.popleft()
                if not isinstance(reply, calls.Item):
                    _result(reply)
                    return
                yield reply.value
            await self._take()
            await asyncio.sleep(0)  # a read with data at hand does not yield; let key events run

    async def _request(self, verb: str, **args: Any) -> Any:
        replies: deque[calls.Reply] = deque()
        self._send(self._calls.open(replies.append), verb, args)
        return _result(await self._next(replies))

    async def _next(self, replies: deque[calls.Reply]) -> calls.Reply:
        while not replies:
            await self._take()
        return replies.popleft()

    async def _read_replies(self) -> None:
        failure: errors.ClusterError = self._gone()
        try:
            while True:
                await self._take()
        except errors.ClusterError as error:
            failure = error
        finally:
            self._calls.end(failure)

    def _send(self, number: int, verb: str, args: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise self._gone()
        self._writer.write(protocol.encode(calls.request(number, verb, args)))

    async def _take(self) -> None:
        """Read what there is, and deliver the replies in it."""
        try:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise self._gone()
            for message in self._decoder.feed(data):
                self._calls.take(message)
        except OSError:
            raise self._gone() from None
        except protocol.ProtocolError as error:
            raise InvalidReply(f"the server at {self._path} does not speak this protocol: {error}") from None

    def _gone(self) -> errors.DaemonAbsent:
        return errors.DaemonAbsent(f"the daemon at {self._path} went away: clusterd status")

    def close(self) -> None:
        """Disconnect; requests already sent are still carried out."""
        if self._answers is not None:
            self._answers.cancel()
        self._writer.close()


def _result(reply: calls.Reply) -> Any:
    return calls.result(reply, lambda failure: errors.of_exit_code(failure.exit_code, failure.message))
