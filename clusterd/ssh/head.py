"""Connection of a host that dials in to the daemon: `ssh` to the head node, a relay there, the socket's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import anyio

from clusterd import protocol
from clusterd.client import frame, refusal
from clusterd.errors import ClusterError, DaemonAbsent, UsageError
from clusterd.protocol import calls
from clusterd.remote import CONNECT_S, FIND_SOCKET, KEEPALIVE, URL
from clusterd.ssh.bootstrap import COMMAND, ERRORS_S

_OPTIONS = (*KEEPALIVE, "EscapeChar=none", "RequestTTY=no")
_NOISE_LINES_MAX = 1000
_GREETING = b"clusterd-relay "


class HeadLost(ClusterError):
    """The connection to the head node cannot be made, or broke."""


class Head:
    """Requests to the daemon, over one `ssh`."""

    def __init__(self, destination: str, process: asyncio.subprocess.Process) -> None:
        self._destination, self._process = destination, process
        self._calls = calls.Calls()
        self._error = ""  # last line of ssh's standard error
        self._errors: asyncio.Task[None] | None = None  # reads them
        self._write = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def dial(cls, url: str) -> AsyncIterator[Head]:
        """Connect to the daemon.

        Args:
            url: ``ssh://[USER@]HEAD[:PORT][/PATH/OF.sock]``.
        Raises:
            UsageError: it is none.
            HeadLost: ssh cannot connect; or later, within the block: the connection broke.
            DaemonAbsent: no daemon answers there.
        """
        match = URL.fullmatch(url)
        if match is None:
            raise UsageError(f"{url!r} is no head node; write ssh://HEAD, or ssh://USER@HEAD:PORT/PATH/OF.sock")
        destination, path = match.groups()
        options = [part for option in _OPTIONS for part in ("-o", option)]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                "ssh", *options, destination, COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=_ignore_signals
            )
        except FileNotFoundError:
            raise DaemonAbsent("there is no `ssh` program on this machine: install OpenSSH's client") from None
        head = cls(destination, process)
        errors = head._errors = asyncio.create_task(head._keep_errors())
        try:
            try:
                with anyio.fail_after(CONNECT_S):
                    await head._start_relay(path or "")
            except TimeoutError:
                raise HeadLost(f"`ssh {destination}` did not connect within {CONNECT_S:.0f} s") from None
            reading = asyncio.create_task(head._read())
            try:
                yield head
            finally:
                reading.cancel()
        finally:
            errors.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def _start_relay(self, path: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        text = resources.files("clusterd.ssh").joinpath("relay.py").read_text()
        source = f"{text}\nmain({path!r}, {FIND_SOCKET!r})\n".encode()
        with contextlib.suppress(OSError):  # the end of the output tells more
            self._process.stdin.write(b"%d\n" % len(source) + source)
            await self._process.stdin.drain()
        for _ in range(_NOISE_LINES_MAX):
            line = await self._process.stdout.readline()
            if not line:
                break
            _, greeting, answer = line.partition(_GREETING)  # start-up files may print without a newline
            if greeting and answer.strip() == b"ok":
                return
            if greeting:
                message = answer.decode(errors="backslashreplace").strip().removeprefix("failed ")
                raise DaemonAbsent(f"no daemon answers on {self._destination}: {message}")
        code = await self._process.wait()
        if self._errors is not None:
            await asyncio.wait([self._errors], timeout=ERRORS_S)
        raise HeadLost(f"`ssh {self._destination}` failed: {self._error or f'exit code {code}'}")

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Send a request and return its answer.

        Raises:
            ClusterError: the daemon refused.
            HeadLost: the connection broke.
        """
        future: asyncio.Future[calls.Reply] = asyncio.get_running_loop().create_future()
        await self._send(self._calls.open(calls.resolve(future)), verb, arguments)
        return calls.result(await future, refusal)

    async def stream(self, verb: str, **arguments: Any) -> AsyncIterator[Any]:
        """Send a request and yield its items; raises as `call`."""
        replies: asyncio.Queue[calls.Reply] = asyncio.Queue()
        await self._send(self._calls.open(replies.put_nowait), verb, arguments)
        while isinstance(reply := await replies.get(), calls.Item):
            yield reply.value
        calls.result(reply, refusal)

    async def _send(self, number: int, verb: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            async with self._write:
                self._process.stdin.write(frame(number, verb, arguments))
                await self._process.stdin.drain()
        except OSError:
            self._calls.close(number)
            raise HeadLost(f"the connection to {self._destination} broke") from None

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._calls.take(await protocol.read(self._process.stdout))
        except (asyncio.IncompleteReadError, OSError, protocol.ProtocolError) as error:
            broken = isinstance(error, protocol.ProtocolError)
            why = f": {error}" if broken else f": {self._error}" if self._error else ""
            self._calls.end(HeadLost(f"the connection to {self._destination} broke{why}"))

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._error = line.decode(errors="backslashreplace").strip() or self._error


def _ignore_signals() -> None:
    """Leave signals of the terminal and of a batch system to the command: it still needs its connection to leave."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
