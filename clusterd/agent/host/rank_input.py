"""Standard input of a rank: pieces in a named pipe, which the rank's relay reads as fast as the rank does."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

FRAME = struct.Struct("<I")
"""Length of a piece before it; 0: the end, which the death of the agent does not feign."""

OPENING_S = 0.02


class RankInput:
    """Writer of the pipe, and the count of bytes that it took."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = 0
        self._unwritten = bytearray()
        self._writing = asyncio.Lock()
        self._sink = -1

    async def write(self, data: bytes, offset: int, end: bool, runs: Callable[[], bool]) -> bool:
        """Write input that begins at `offset`, but for what was taken before; wait until the pipe has all of it.

        Args:
            end: it is the last.
            runs: false once the rank is over, after which nothing is written.
        Returns:
            False if there is a gap before it: this rank did not get what another one took.
        """
        async with self._writing:
            if offset > self.taken:
                return False
            new = data[self.taken - offset :]
            self.taken += len(new)
            self._unwritten += FRAME.pack(len(new)) + new if new else b""
            self._unwritten += FRAME.pack(0) if end else b""
            while self._unwritten and runs():
                try:
                    if self._sink < 0:
                        self._sink = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
                    del self._unwritten[: os.write(self._sink, self._unwritten)]
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        self._unwritten.clear()  # nobody reads any more
                        break
                    await asyncio.sleep(OPENING_S)  # its relay has not opened it yet
            if end:
                self.close()
            return True

    async def _writable(self) -> None:
        """Wait until the pipe has space, or no reader."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._sink, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._sink)

    def close(self) -> None:
        """Close the pipe, after the end of the input or of the rank."""
        if self._sink >= 0:
            os.close(self._sink)
            self._sink = -1
