"""Connections of hosts that dial in: processes on such a host, over a client's connection to the daemon.

The host runs one program for the daemon, the bootstrap of its agent, as often as `attach` asks for it. `JoinedDialer`
and `JoinedConnection` stand in the place of the dialer and the connection of asyncssh.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

Message = dict[str, Any]

PIECE_BYTES = 256 << 10
"""Of the input of a process in one message."""

UNSENT_BYTES_MAX = 4 << 20
"""Input that the host has not taken; beyond it `drain` waits."""

OUTPUT_LINE_BYTES_MAX = 1 << 20
"""Longest line of a process; twice as much output that nobody reads stops the host from sending more."""


class JoinedConnection:
    """One connection of a host that dialed in.

    The daemon's side calls `create_process`; the server of the socket sends `commands` and brings output to `receive`.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._processes: dict[int, JoinedProcess] = {}
        self._numbers = itertools.count(1)
        self._unsent: deque[Message] = deque()
        self._unsent_bytes = 0
        self._changed = asyncio.Event()

    async def create_process(self, command: str, encoding: None = None) -> JoinedProcess:
        """Start the bootstrap on the host, whatever the command that starts it over SSH.

        Raises:
            ConnectionError: the connection is over.
        """
        if self.is_over:
            raise ConnectionResetError("the host's connection ended")
        process = JoinedProcess(next(self._numbers), self)
        self._processes[process.number] = process
        self.send({"open": process.number})
        return process

    def send(self, command: Message, length: int = 0) -> None:
        """Queue a command for the host."""
        if not self.is_over:
            self._unsent.append(command)
            self._unsent_bytes += length
            self._notify()

    async def drain(self) -> None:
        """Wait until the host took most of the input.

        Raises:
            ConnectionError: the connection is over.
        """
        while self._unsent_bytes > UNSENT_BYTES_MAX and not self.is_over:
            await self._changed.wait()
        if self.is_over:
            raise ConnectionResetError("the host's connection ended")

    async def commands(self) -> AsyncIterator[Message]:
        """Commands for the host, until the connection is over."""
        while True:
            while not self._unsent:
                if self.is_over:
                    return
                await self._changed.wait()
            command = self._unsent.popleft()
            yield command
            self._unsent_bytes -= len(command.get("data", b""))
            self._notify()

    async def receive(self, number: int, data: bytes, is_error: bool, exit_code: int | None) -> None:
        """Take output of a process, or its end; waits while nobody reads what came before."""
        process = self._processes.get(number)
        if process is None:  # it was closed meanwhile
            return
        if exit_code is not None:
            del self._processes[number]
            process.end(exit_code)
        elif is_error:
            process.stderr.feed_data(data)
        else:
            process.stdout.feed_data(data)
            await process.is_read.wait()

    def close_process(self, number: int) -> None:
        """End a process on the host."""
        if (process := self._processes.pop(number, None)) is not None:
            self.send({"close": number})
            process.end(None)

    def end(self) -> None:
        """End the connection and its processes; commands that are queued still leave."""
        self.is_over = True
        for process in self._processes.values():
            process.end(None)
        self._processes.clear()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class JoinedProcess:
    """A process on the host, with the part of asyncssh's interface that `attach` uses."""

    def __init__(self, number: int, connection: JoinedConnection) -> None:
        self.number = number
        self.exit_status: int | None = None
        self.stdin = JoinedWriter(number, connection)
        self.stdout = asyncio.StreamReader(OUTPUT_LINE_BYTES_MAX)
        self.stderr = asyncio.StreamReader(OUTPUT_LINE_BYTES_MAX)
        self.is_read = asyncio.Event()
        self.is_read.set()
        self.stdout.set_transport(cast(asyncio.ReadTransport, _Pausing(self.is_read)))
        self._connection = connection
        self._ended = asyncio.Event()

    def close(self) -> None:
        """End the process."""
        self._connection.close_process(self.number)

    async def wait_closed(self) -> None:
        """Wait for the end of the process."""
        await self._ended.wait()

    def end(self, exit_code: int | None) -> None:
        """Record the end; what reads from the process finds the end of its output."""
        self.exit_status = exit_code
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self.is_read.set()
        self._ended.set()


class JoinedWriter:
    """Standard input of a process on the host."""

    def __init__(self, number: int, connection: JoinedConnection) -> None:
        self._number, self._connection = number, connection

    def write(self, data: bytes) -> None:
        """Queue input."""
        for start in range(0, len(data), PIECE_BYTES):
            part = data[start : start + PIECE_BYTES]
            self._connection.send({"of": self._number, "data": part}, len(part))

    async def drain(self) -> None:
        """Wait until most of the input was taken; raises as `JoinedConnection.drain`."""
        await self._connection.drain()


class _Pausing:
    """Transport of a reader that is fed by hand: it clears an event while the reader has too much."""

    def __init__(self, is_read: asyncio.Event) -> None:
        self._is_read = is_read

    def pause_reading(self) -> None:
        self._is_read.clear()

    def resume_reading(self) -> None:
        self._is_read.set()


class JoinedDialer:
    """Place where the link to one host waits for the host's own connection."""

    def __init__(self) -> None:
        self.current: JoinedConnection | None = None
        self._arrived = asyncio.Event()

    def offer(self) -> JoinedConnection:
        """A new connection of the host, which replaces the one before: the host has given that up."""
        if self.current is not None:
            self.current.end()
        self.current = JoinedConnection()
        self._arrived.set()
        return self.current

    @asynccontextmanager
    async def connect(self, route: object) -> AsyncIterator[JoinedConnection]:
        """Wait for a connection of the host, as a `Dialer` makes one."""
        while self.current is None or self.current.is_over:
            self._arrived.clear()
            await self._arrived.wait()
        yield self.current
