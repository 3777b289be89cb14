"""Connections to ports of this host that users forward: read and written like a terminal, which a daemon relays."""

from __future__ import annotations

import asyncio
import contextlib
import time

from clusterd.agent.host.attempt_records import Refused
from clusterd.protocol.requests import Output, Screen

CHUNK_BYTES = 1 << 18
CONNECT_S = 10.0


class PortConnection:
    """A TCP connection to a port of 127.0.0.1; each of its two directions ends on its own.

    Attributes:
        asked_at: monotonic time of the last request for it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._writing = asyncio.Lock()
        self._input_ended = asyncio.Event()
        self._output_ended = False
        self._is_broken = False
        self.asked_at = time.monotonic()

    @classmethod
    async def open(cls, port: int) -> PortConnection:
        """Connect.

        Raises:
            Refused: ``port``: nothing listens there.
        """
        try:
            connecting = asyncio.open_connection("127.0.0.1", port, limit=CHUNK_BYTES)
            return cls(*await asyncio.wait_for(connecting, CONNECT_S))
        except asyncio.TimeoutError:
            raise Refused("port", f"port {port} of 127.0.0.1 does not answer") from None
        except OSError as error:
            raise Refused("port", f"nothing listens on port {port} of 127.0.0.1: {error.strerror or error}") from None

    async def read(self, wait_s: float) -> Output:
        """New bytes from the port; `end` once after the last of them; the exit code once both directions ended.

        The exit code is 1 where the connection broke.
        """
        try:
            if not self._output_ended:
                # No more is taken from the port than was asked for: a slow reader slows the writer down.
                data = await asyncio.wait_for(self._reader.read(CHUNK_BYTES), wait_s)
                if data:
                    return Output(data)
                self._output_ended = True
                return Output(b"", self._exit_code(), end=True)
            await asyncio.wait_for(self._input_ended.wait(), wait_s)
        except asyncio.TimeoutError:
            pass
        except OSError:  # reset by the program behind the port
            self._break()
        return Output(b"", self._exit_code())

    def _exit_code(self) -> int | None:
        if self._is_broken:
            return 1
        return 0 if self._output_ended and self._input_ended.is_set() else None

    def _break(self) -> None:
        self._is_broken = self._output_ended = True
        self._input_ended.set()

    async def write(self, data: bytes) -> None:
        """Write to the port; wait until the program behind it takes most of it."""
        async with self._writing:
            if not data or self._input_ended.is_set():
                return
            try:
                self._writer.write(data)
                await self._writer.drain()
            except OSError:  # `read` reports it, after what the program wrote before
                self._input_ended.set()

    def end_input(self) -> None:
        """Send end of file to the port, which may go on writing."""
        if not self._input_ended.is_set():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
            self._input_ended.set()

    def resize(self, screen: Screen) -> None:
        """Do nothing: a port has no window."""

    def hang_up(self) -> None:
        """Close the connection; one that has not ended is reset, so that the program behind it notices."""
        if self._exit_code() == 0:
            self._writer.close()
        else:
            self._writer.transport.abort()
        self._break()
