"""Commands that users run inside attempts, beside a rank, and connections to ports that they forward.

A command has the devices, variables and working directory of its rank. It is a child of the agent and carries the
attempt's tag, so it ends with the attempt at the latest. The daemon pulls its output in chunks; a terminal that is no
longer polled has lost its daemon and is closed. A connection to a port is read and written like a terminal.
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
from pathlib import Path

from clusterd.agent.host import programs, rank_environment
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.ranks import containers
from clusterd.agent.ranks.launching import inside_of
from clusterd.process_attributes import inherited_umask
from clusterd.protocol.launch import RankSpec
from clusterd.protocol.requests import Output, Screen

CHUNK_BYTES = 1 << 16
READ_WAIT_S = 20.0
"""A read returns within this time, empty if there was no output."""
SILENT_S = 120.0
"""A terminal without requests for this long is closed."""

PORT_CHUNK_BYTES = 1 << 18
CONNECT_S = 10.0


class Terminals:
    """Open terminals of this host, by unguessable name.

    Args:
        rank_socket: on which this agent serves ranks.
    """

    def __init__(self, rank_socket: Path) -> None:
        self._rank_socket = rank_socket
        self._open: dict[str, Terminal | PortConnection] = {}

    async def open(
        self,
        attempt: Attempt,
        rank: int,
        argv: Sequence[str],
        tag: str,
        variables: Mapping[str, str],
        screen: Screen | None,
    ) -> str:
        """Start `argv`, or this user's shell if it is empty; return the terminal's name.

        Args:
            variables: the job's, with its secrets.
            screen: of the pseudo-terminal; None: pipes.
        Raises:
            Refused: ``unknown`` (no such rank runs here), ``workdir``, ``starting`` (its container does not run yet).
        """
        given = _running_rank(attempt, rank)
        work = rank_environment.work_of(attempt)
        if not work.is_dir():
            raise Refused("workdir", f"the working directory {work} is gone")
        env = rank_environment.variables(attempt, given, tag, variables)
        rank_environment.forget_rank(env)
        if screen is not None:
            env["TERM"] = screen.term
        if attempt.launch.container:
            inside = inside_of(attempt, given, tag, env, variables, self._rank_socket)
            if not await containers.is_running(inside):
                raise Refused("starting", f"{attempt.launch.container} does not run yet")
            argv, env = containers.beside(inside, argv, on_screen=screen is not None)
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        group = attempt.ranks[rank].cgroup
        cores = ",".join(str(core) for core in given.device.cores)
        # A separate program acquires the controlling terminal: this process has threads, and running code in a fork
        # of it would be unsafe.
        command = programs.command("inside", str(work), cores, group, *(argv or [shell]))
        name = uuid.uuid4().hex
        self._open[name] = await Terminal.start(command, env, screen)
        return name

    async def open_port(self, attempt: Attempt, rank: int, port: int) -> str:
        """Connect to a port of this host; return the connection's name.

        Raises:
            Refused: ``unknown`` (no such rank runs here), ``port`` (nothing listens there).
        """
        _running_rank(attempt, rank)
        connection = await PortConnection.open(port)
        name = uuid.uuid4().hex
        self._open[name] = connection
        return name

    @property
    def sessions(self) -> set[int]:
        """Ids of the sessions of the commands that are open."""
        return {found.session for found in self._open.values() if isinstance(found, Terminal)}

    def get(self, name: str) -> Terminal | PortConnection:
        """Return an open terminal.

        Raises:
            Refused: ``unknown``: it was closed, or the agent restarted since.
        """
        found = self._open.get(name)
        if found is None:
            raise Refused("unknown", "this terminal is closed")
        found.asked_at = time.monotonic()
        return found

    def close(self, name: str) -> None:
        """Close one terminal."""
        if found := self._open.pop(name, None):
            found.hang_up()

    def poll(self) -> None:
        """Close the terminals whose daemon is gone."""
        for name, terminal in list(self._open.items()):
            if time.monotonic() - terminal.asked_at > SILENT_S:
                self.close(name)

    def close_all(self) -> None:
        """Close all terminals, when the agent exits."""
        for name in list(self._open):
            self.close(name)


def _running_rank(attempt: Attempt, rank: int) -> RankSpec:
    given = next((spec for spec in attempt.launch.ranks if spec.rank == rank), None)
    if given is None or attempt.stopped or not attempt.running:
        raise Refused("unknown", f"rank {rank} of {attempt.name} does not run here")
    return given


class Terminal:
    """One command with its input and output.

    Attributes:
        asked_at: monotonic time of the last request for it.
    """

    def __init__(self, process: asyncio.subprocess.Process, source: int, sink: int) -> None:
        self._process, self._source, self._sink = process, source, sink
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._readable = asyncio.Event()
        self._ended = False
        self._writing = asyncio.Lock()
        self._write_ready: asyncio.Future[None] | None = None  # awaited by `write`
        self.asked_at = time.monotonic()
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._loop.add_reader(source, self._take)
        self._ending = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], screen: Screen | None) -> Terminal:
        """Run a command in its own session."""
        if screen is None:
            child_in, sink = os.pipe()
            source, child_out = os.pipe()
        else:
            source, child_in = os.openpty()
            _resize(source, screen)
            sink, child_out = os.dup(source), os.dup(child_in)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=child_in, stdout=child_out, stderr=subprocess.STDOUT, env=dict(env),
                start_new_session=True, cwd="/", umask=inherited_umask(),
            )  # fmt: skip
        except OSError:
            os.close(source)
            os.close(sink)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        return cls(process, source, sink)

    @property
    def session(self) -> int:
        """Id of its session."""
        return self._process.pid

    async def read(self, wait_s: float = READ_WAIT_S) -> Output:
        """New output, and the exit code once the output is complete (negative: the signal that killed it)."""
        with contextlib.suppress(asyncio.TimeoutError):
            if not self._output and not self._ended:
                await asyncio.wait_for(self._readable.wait(), wait_s)
        data = bytes(self._output[:CHUNK_BYTES])
        del self._output[:CHUNK_BYTES]
        if self._output or self._ended:
            self._readable.set()
        else:
            self._readable.clear()
        if not self._ended and len(self._output) < CHUNK_BYTES:
            self._loop.add_reader(self._source, self._take)
        return Output(data, self._process.returncode if self._ended and not self._output else None)

    async def write(self, data: bytes) -> None:
        """Write to the command's input; wait until all of it was accepted."""
        async with self._writing:
            while data and self._sink >= 0:
                try:
                    data = data[os.write(self._sink, data) :]
                except BlockingIOError:
                    await self._writable()
                except OSError:  # the command no longer reads; `read` reports its exit
                    return

    def end_input(self) -> None:
        """Close a piped input. On a terminal, end of file is a character that is written like others."""
        if self._sink >= 0:
            self._loop.remove_writer(self._sink)
            os.close(self._sink)
            self._sink = -1
        self._may_write()

    def resize(self, screen: Screen) -> None:
        """Set the window size."""
        with contextlib.suppress(OSError):
            _resize(self._source, screen)

    def hang_up(self) -> None:
        """Send SIGHUP to the command's process group and close its terminal."""
        self._ending.cancel()
        self._loop.remove_reader(self._source)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGHUP)
        self.end_input()
        os.close(self._source)
        self._ended = True
        self._readable.set()

    def _take(self) -> None:
        try:
            data = os.read(self._source, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # end of file on a pseudo-terminal
            data = b""
        self._output += data
        if not data or len(self._output) >= CHUNK_BYTES:
            self._loop.remove_reader(self._source)
        if data:
            self._readable.set()

    async def _wait(self) -> None:
        await self._process.wait()
        # Read the remaining output. Background children may hold the other end open indefinitely.
        while len(self._output) < CHUNK_BYTES << 4:
            before = len(self._output)
            self._take()
            if len(self._output) == before:
                break
        self._loop.remove_reader(self._source)
        self._ended = True
        self._readable.set()

    async def _writable(self) -> None:
        self._write_ready = self._loop.create_future()
        self._loop.add_writer(self._sink, self._may_write)
        await self._write_ready
        if self._sink >= 0:
            self._loop.remove_writer(self._sink)

    def _may_write(self) -> None:
        if self._write_ready is not None and not self._write_ready.done():
            self._write_ready.set_result(None)


def _resize(terminal: int, screen: Screen) -> None:
    rows, columns = (max(1, min(size, 0x7FFF)) for size in (screen.rows, screen.columns))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


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
            connecting = asyncio.open_connection("127.0.0.1", port, limit=PORT_CHUNK_BYTES)
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
                data = await asyncio.wait_for(self._reader.read(PORT_CHUNK_BYTES), wait_s)
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
