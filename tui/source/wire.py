"""The daemon's socket from the interface's side: asyncio, one connection for requests, one for each stream.

A stream is read only as fast as it is taken, so a slow terminal fills a socket's buffer and nothing in the daemon.
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
"""A daemon that has not even taken a connection's greeting after this long is taken for gone."""

_CODES = {
    kind.exit_code: kind for kind in (errors.ClusterError, errors.UsageError, errors.DaemonAbsent, errors.TryLater)
}


class InvalidReply(errors.ClusterError):
    """What answers at the socket does not speak our protocol."""


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
        """Connect and agree on a version.

        Raises:
            DaemonAbsent: nobody listens there, or we are not let in.
            ClusterError: the daemon is of another version.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=READ_BYTES)
                wire = cls(path, reader, writer)
                try:
                    answer = await wire._ask_alone("hello", protocol_version=protocol.VERSION)
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
            raise InvalidReply(f"what answers at {path} is no clusterd")
        wire.greeting = answer
        return wire

    @classmethod
    async def adopt(cls, path: Path, preconnected: socket.socket) -> Wire:
        """Go on with a connection that `tui.source.preconnect.preconnect` made: the greeting is here, or on its way.

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
        """The stream that was asked for ahead.

        Raises:
            ClusterError: as `call`.
        """
        early, self._preconnected = self._preconnected, []
        async for item in self._stream(WATCH, early):
            yield item

    async def call(self, verb: str, **args: Any) -> Any:
        """Ask, and wait for the answer; several requests may be under way.

        Raises:
            ClusterError: the daemon refused, in its words; DaemonAbsent: it went away.
        """
        if self._answers is None:
            self._answers = asyncio.create_task(self._collect(), name="answers")
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
        """Ask, and give what comes until the daemon says it is all. Nothing else may use this connection.

        Raises:
            ClusterError: as `call`.
        """
        number = next(self._ids)
        self._send(number, verb, args)
        async for item in self._stream(number, []):
            yield item

    async def _stream(self, number: int, early: list[protocol.Message]) -> AsyncGenerator[Any, None]:
        while True:
            for message in early or await self._receive():
                if message.get("id") != number:
                    continue
                if "item" not in message:
                    _answer(message)
                    return
                yield message["item"]
            early = []
            await asyncio.sleep(0)  # reading does not yield while there is something to read; keys want their turn

    async def _ask_alone(self, verb: str, **args: Any) -> Any:
        number = next(self._ids)
        self._send(number, verb, args)
        while True:
            for message in await self._receive():
                if message.get("id") == number:
                    return _answer(message)

    async def _collect(self) -> None:
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
            raise InvalidReply(f"what answers at {self._path} does not speak our protocol: {error}") from None

    def _gone(self) -> errors.DaemonAbsent:
        return errors.DaemonAbsent(f"the daemon at {self._path} went away: clusterd status")

    def close(self) -> None:
        """Hang up; whatever the daemon was asked to do, it does."""
        if self._answers is not None:
            self._answers.cancel()
        self._writer.close()


def _answer(message: protocol.Message) -> Any:
    error = message.get("error")
    if error is None:
        return message.get("ok")
    if not isinstance(error, dict):
        raise InvalidReply(f"the daemon answered with an error of no known form: {error!r}")
    kind = _CODES.get(error.get("exit_code", 1), errors.ClusterError)
    raise kind(str(error.get("message", "the daemon refused without a word")))
