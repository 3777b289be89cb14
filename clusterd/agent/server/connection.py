"""One connection to the agent's socket."""

from __future__ import annotations

import asyncio
from typing import Any

from clusterd import protocol
from clusterd.agent.host.attempt_records import Attempt
from clusterd.agent.log import log_line

EVENTS_WAITING_MAX = 1000

Message = dict[str, Any]


class Connection:
    """Connection from a daemon or a rank. One task sends the queued frames in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.daemon: tuple[str, int] | None = None  # its name and epoch, after hello
        self.rank: tuple[Attempt, int] | None = None  # after rank_hello
        self.reads_for: Attempt | None = None  # after data_hello
        self._writer = writer
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self.pump = asyncio.create_task(self._pump())

    def send(self, message: Message) -> None:
        """Queue a frame. Progress and facts are dropped if the peer does not read; other messages are few."""
        if message.get("event") in ("progress", "facts") and self._outgoing.qsize() > EVENTS_WAITING_MAX:
            return
        self._outgoing.put_nowait(message)

    async def _pump(self) -> None:
        try:
            while True:
                self._writer.write(protocol.encode(await self._outgoing.get()))
                await self._writer.drain()
                self._outgoing.task_done()
        except (OSError, protocol.ProtocolError) as error:
            log_line(f"agent: a connection broke: {error}")
            self._writer.close()

    async def close(self) -> None:
        """Close after sending the queued frames, waiting at most one second for the peer to read them."""
        try:
            await asyncio.wait_for(self._outgoing.join(), 1.0)
        except asyncio.TimeoutError:
            pass
        self.pump.cancel()
        self._writer.close()
