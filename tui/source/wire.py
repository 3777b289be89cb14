"""Client of the daemon's socket for asyncio: one connection for requests, and one for each stream.

Streams are read only as fast as they are consumed: a slow terminal fills a socket buffer, not memory of the daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from clusterd import errors, protocol
from tui.source.preconnect import HELLO, WATCH

READ_BYTES = 1 << 18
ANSWER_S = 30.0
"""Timeout of the handshake; a daemon that takes longer counts as absent."""

_CODES = {
    kind.exit_code: kind for kind in (errors.ClusterError, errors.UsageError, errors.DaemonAbsent, errors.TryLater)
}


class InvalidReply(errors.ClusterError):
    """The peer does not speak the protocol."""


class Wire:
    """One connection to the daemon."""

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path = path
        self._reader = reader
        self._writer = writer
        self._decoder = protocol.Decoder()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answers: asyncio.Task[None] | None = None
        self._preconnected: list[protocol.Message] = []
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
        wire._ids = itertools.count(WATCH + 1)
        try:
            async with asyncio.timeout(ANSWER_S):
                while not wire.greeting:
                    messages = await wire._receive()
                    for at, message in enumerate(messages):
                        if message.get("id") == HELLO:
                            wire.greeting = dict(_answer(message))
                            wire._preconnected = messages[at + 1 :]
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
        buffered, self._preconnected = self._preconnected, []
        async for item in self._stream(WATCH, buffered):
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
        number = next(self._ids)
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._send(number, verb, args)
            return await waiting
        finally:
            self._waiting.pop(number, None)

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """Send a request and yield items until the daemon ends the stream. The connection serves nothing else.

        Raises:
            ClusterError: as `call`.
        """
        number = next(self._ids)
        self._send(number, verb, args)
        async for item in self._stream(number, []):
            yield item

    async def _stream(self, number: int, buffered: list[protocol.Message]) -> AsyncGenerator[Any, None]:
        while True:
            for message in buffered or await self._receive():
                if message.get("id") != number:
                    continue
                if "item" not in message:
                    _answer(message)
                    return
                yield message["item"]
            buffered = []
            await asyncio.sleep(0)  # a read with data at hand does not yield; let key events run

    async def _request(self, verb: str, **args: Any) -> Any:
        number = next(self._ids)
        self._send(number, verb, args)
        while True:
            for message in await self._receive():
                if message.get("id") == number:
                    return _answer(message)

    async def _read_replies(self) -> None:
        failure: errors.ClusterError = self._gone()
        try:
            while True:
                for message in await self._receive():
                    number = message.get("id")
                    waiting = self._waiting.get(number) if isinstance(number, int) else None
                    if waiting is None or waiting.done():
                        continue
                    try:
                        waiting.set_result(_answer(message))
                    except errors.ClusterError as refused:
                        waiting.set_exception(refused)
        except errors.ClusterError as error:
            failure = error
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(failure)

    def _send(self, number: int, verb: str, args: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise self._gone()
        self._writer.write(protocol.encode({"id": number, "verb": verb, **args}))

    async def _receive(self) -> list[protocol.Message]:
        try:
            while True:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise self._gone()
                if messages := self._decoder.feed(data):
                    return messages
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


def _answer(message: protocol.Message) -> Any:
    error = message.get("error")
    if error is None:
        return message.get("ok")
    if not isinstance(error, dict):
        raise InvalidReply(f"the daemon sent an invalid error: {error!r}")
    kind = _CODES.get(error.get("exit_code", 1), errors.ClusterError)
    raise kind(str(error.get("message", "the daemon refused without a message")))
