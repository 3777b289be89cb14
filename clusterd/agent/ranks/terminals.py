"""Commands that people run inside attempts: with the devices, the variables and the working directory of a rank.

Each is a child of the agent, carries the attempt's tag, and so ends with the attempt at the latest. What it writes is
pulled, a piece at a time; one that nobody asks for any more has lost its daemon, and is hung up on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import signal
import struct
import subprocess
import termios
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from clusterd.agent.host import programs, rank_environment
from clusterd.agent.host.attempt_records import Attempt, Refused

PIECE_BYTES = 1 << 16
READ_WAIT_S = 20.0
"""A reader is answered within this time, with nothing where nothing was written."""
SILENT_S = 120.0
"""A terminal that was not asked for for so long is hung up on."""


class Terminals:
    """Those that are open on this host, by a name that cannot be guessed."""

    def __init__(self) -> None:
        self._open: dict[str, Terminal] = {}

    async def open(
        self,
        attempt: Attempt,
        rank: int,
        argv: Sequence[str],
        tag: str,
        secrets: Mapping[str, str],
        screen: Mapping[str, Any] | None,
    ) -> str:
        """Start `argv`, or this user's shell where it is empty.

        Args:
            screen: (term, columns, rows) of the terminal that it gets; None: pipes.
        Raises:
            Refused: ``unknown`` (no such rank runs here), ``workdir``.
        """
        given = next((one for one in attempt.launch["ranks"] if int(one["rank"]) == rank), None)
        if given is None or attempt.stopped or not attempt.running:
            raise Refused("unknown", f"rank {rank} of {attempt.name} does not run here")
        work = rank_environment.work_of(attempt)
        if not work.is_dir():
            raise Refused("workdir", f"the working directory {work} is gone")
        env = rank_environment.variables(attempt, given, tag, secrets)
        rank_environment.forget_rank(env)
        if screen is not None:
            env["TERM"] = str(screen["term"])
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        cores = ",".join(str(core) for core in (given.get("device") or {}).get("cores") or ())
        # A program of its own makes the terminal its own: this process has threads, and may not do so in a fork.
        command = programs.command("inside", str(work), cores, *(argv or [shell]))
        name = uuid.uuid4().hex
        self._open[name] = await Terminal.start(command, env, screen)
        return name

    def get(self, name: str) -> Terminal:
        """One that is open.

        Raises:
            Refused: ``unknown``: it ended, or the agent was started again since.
        """
        found = self._open.get(name)
        if found is None:
            raise Refused("unknown", "this terminal is closed")
        found.asked_at = time.monotonic()
        return found

    def close(self, name: str) -> None:
        """Hang up."""
        if found := self._open.pop(name, None):
            found.hang_up()

    def look_after(self) -> None:
        """Hang up on those whose daemon is gone."""
        for name, terminal in list(self._open.items()):
            if time.monotonic() - terminal.asked_at > SILENT_S:
                self.close(name)

    def close_all(self) -> None:
        """The agent ends."""
        for name in list(self._open):
            self.close(name)


class Terminal:
    """One command, and both ends of what is said to it and by it.

    Attributes:
        asked_at: monotonic time of the last word about it.
    """

    def __init__(self, process: asyncio.subprocess.Process, source: int, sink: int) -> None:
        self._process, self._source, self._sink = process, source, sink
        self._loop = asyncio.get_running_loop()
        self._said = bytearray()
        self._news = asyncio.Event()
        self._over = False
        self._writing = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None  # what a writer waits for
        self.asked_at = time.monotonic()
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._loop.add_reader(source, self._take)
        self._ending = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], screen: Mapping[str, Any] | None) -> Terminal:
        """Run it in a session of its own."""
        if screen is None:
            theirs_in, sink = os.pipe()
            source, theirs_out = os.pipe()
        else:
            source, theirs_in = os.openpty()
            _resize(source, screen)
            sink, theirs_out = os.dup(source), os.dup(theirs_in)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs_in, stdout=theirs_out, stderr=subprocess.STDOUT, env=dict(env),
                start_new_session=True, cwd="/",
            )  # fmt: skip
        except OSError:
            os.close(source)
            os.close(sink)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        return cls(process, source, sink)

    async def read(self, wait_s: float = READ_WAIT_S) -> dict[str, Any]:
        """What it wrote since, and its exit code when there is no more to come; negative: the signal that ended it."""
        with contextlib.suppress(asyncio.TimeoutError):
            if not self._said and not self._over:
                await asyncio.wait_for(self._news.wait(), wait_s)
        data = bytes(self._said[:PIECE_BYTES])
        del self._said[:PIECE_BYTES]
        if self._said or self._over:
            self._news.set()
        else:
            self._news.clear()
        if not self._over and len(self._said) < PIECE_BYTES:
            self._loop.add_reader(self._source, self._take)
        return {"data": data, "exit_code": self._process.returncode if self._over and not self._said else None}

    async def write(self, data: bytes) -> None:
        """Type, or send; waits until all of it was taken."""
        async with self._writing:
            while data and self._sink >= 0:
                try:
                    data = data[os.write(self._sink, data) :]
                except BlockingIOError:
                    await self._writable()
                except OSError:  # nobody reads it any more; how it ended is told to the reader
                    return

    def end_input(self) -> None:
        """There is no more to come; on a terminal that is a character, and sent like others."""
        if self._sink >= 0:
            self._loop.remove_writer(self._sink)
            os.close(self._sink)
            self._sink = -1
        self._may_write()

    def resize(self, screen: Mapping[str, Any]) -> None:
        """The window has another size."""
        with contextlib.suppress(OSError):
            _resize(self._source, screen)

    def hang_up(self) -> None:
        """As when a line breaks: the command's process group gets SIGHUP, and its terminal is gone."""
        self._ending.cancel()
        self._loop.remove_reader(self._source)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGHUP)
        self.end_input()
        os.close(self._source)
        self._over = True
        self._news.set()

    def _take(self) -> None:
        try:
            data = os.read(self._source, PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # on a terminal, how the end is told
            data = b""
        self._said += data
        if not data or len(self._said) >= PIECE_BYTES:
            self._loop.remove_reader(self._source)
        if data:
            self._news.set()

    async def _wait(self) -> None:
        await self._process.wait()
        # What it wrote last; what it left running in the background may hold the other end for ever.
        while len(self._said) < PIECE_BYTES << 4:
            before = len(self._said)
            self._take()
            if len(self._said) == before:
                break
        self._loop.remove_reader(self._source)
        self._over = True
        self._news.set()

    async def _writable(self) -> None:
        self._room = self._loop.create_future()
        self._loop.add_writer(self._sink, self._may_write)
        await self._room
        if self._sink >= 0:
            self._loop.remove_writer(self._sink)

    def _may_write(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def _resize(terminal: int, screen: Mapping[str, Any]) -> None:
    rows, columns = (max(1, min(int(screen[name]), 0x7FFF)) for name in ("rows", "columns"))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
