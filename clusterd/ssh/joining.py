"""A machine that dials in: its connection to the daemon over the user's own ssh, and the agent that runs here.

The command stays in the foreground. It runs the bootstrap of the agent whenever the daemon asks for it, copies bytes
between the two, and dials again when the connection breaks; agent and ranks go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from clusterd import protocol
from clusterd.agent.host import processes
from clusterd.agent.host.home import Home, read_json, write_json
from clusterd.agent.server import environment_limits
from clusterd.client import frame, refusal
from clusterd.errors import ClusterError, DaemonAbsent, UsageError, first_of
from clusterd.protocol import calls
from clusterd.remote import CONNECT_S, FIND_SOCKET, KEEPALIVE, URL
from clusterd.ssh.bootstrap import COMMAND, ERRORS_S, PROGRAM
from clusterd.trusted_paths import private_directory

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0
OUTPUT_BYTES = 256 << 10
LEAVE_S = 60.0
"""Time before the end in which jobs that are still here are stopped; at most half of the margin."""
GIVE_UP_S = 10.0
"""Time for a daemon that does not answer when the host leaves; Slurm gives 30 s between SIGTERM and SIGKILL."""

IN_ALLOCATION = "SLURM_JOB_ID"
_PR_SET_PDEATHSIG = 1

Report = Callable[[str], None]
"""Shows a line to the user."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A host as its user wants it in the cluster."""

    name: str
    is_exact: bool = False  # no other name will do
    options: dict[str, Any] = field(default_factory=dict)
    until_s: float | None = None  # wall clock of its end
    margin_s: float = 300.0  # jobs leave this long before


@asynccontextmanager
async def _task_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Task group that raises the first error as it is: callers tell errors by their types."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


class Slot:
    """Directory of one joined host on this machine: its identity, and the home of its agent.

    A command that starts again finds the slot, and so the agent and its ranks, of one that was killed.

    Args:
        root: of all slots of this machine and user; home directories are shared between machines.
    """

    def __init__(self, root: Path) -> None:
        for number in range(1, 1 << 16):
            self.directory = root / str(number)
            private_directory(str(self.directory))
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            break
        self._lock = lock  # held until this process ends
        known = read_json(self.directory / "identity.json")
        if known is None:
            known = {"identity": uuid.uuid4().hex}
            write_json(self.directory / "identity.json", known)
        self.identity = str(known["identity"])

    def home(self, cluster: str) -> Home:
        """Home of the agent of a cluster."""
        return Home(self.directory / "agent" / cluster)


class Joining:
    """The command's work, from the first dial to the host's end.

    Args:
        url: of the head node, as in ``ssh://HEAD``.
        report: receives lines for the user.
    """

    def __init__(self, url: str, wanted: Wanted, slot: Slot, report: Report) -> None:
        self._url, self._wanted, self._slot, self._report = url, wanted, slot, report
        self._name = ""  # in the cluster, once it is part of it
        self._home: Home | None = None
        self._is_connected = False
        self._is_over = False  # the host is no longer part of the cluster
        self._leaves = anyio.Event()
        self._drains = anyio.Event()
        self._why_drained = ""

    async def run(self) -> None:
        """Serve until the host has left the cluster.

        Raises:
            ClusterError: the first dial failed, or the daemon refuses the host.
        """
        if IN_ALLOCATION in os.environ:
            # Slurm may lose track of a process whose shell has ended, and its devices are others' then.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        async with _task_group() as tasks:
            tasks.start_soon(self._signals)
            tasks.start_soon(self._clock, tasks.cancel_scope)
            tasks.start_soon(self._give_up, tasks.cancel_scope)
            await self._serve()
            tasks.cancel_scope.cancel()
        if not self._is_over:
            self._report("the daemon does not answer: agent and jobs are ended here")
            self._end_here()

    async def _serve(self) -> None:
        failures = 0
        while not self._is_over:
            began_s = time.monotonic()
            try:
                async with Head.dial(self._url) as head:
                    await self._session(head)
            except (HeadLost, DaemonAbsent) as lost:
                self._is_connected = False
                if not self._name:
                    raise
                failures = 1 if time.monotonic() - began_s > BACKOFF_MAX_S else failures + 1
                pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 16)) * random.uniform(0.5, 1.0)
                self._report(f"{lost}; dialing again in {pause_s:.1f} s, jobs go on")
                with anyio.move_on_after(pause_s):
                    await anyio.sleep_forever() if self._leaves.is_set() else await self._leaves.wait()

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if self._leaves.is_set():
                    self._report("not waiting for the daemon")
                    self._end_here()
                    os._exit(128 + number)
                self._report(f"{number.name}: leaving the cluster; once more to end at once")
                self._leaves.set()

    async def _clock(self, serving: anyio.CancelScope) -> None:
        """Drain the host in time before its end, leave before it, and end in any case."""
        until_s, margin_s = self._wanted.until_s, self._wanted.margin_s
        if until_s is None:
            return
        await anyio.sleep(max(until_s - margin_s - time.time(), 0.0))
        self._why_drained = f"its allocation ends at {time.strftime('%Y-%m-%d %H:%M', time.localtime(until_s))}"
        self._drains.set()
        await anyio.sleep(max(until_s - min(LEAVE_S, margin_s / 2) - time.time(), 0.0))
        self._leaves.set()
        await anyio.sleep(max(until_s - time.time(), GIVE_UP_S))
        serving.cancel()

    async def _give_up(self, serving: anyio.CancelScope) -> None:
        """Stop dialing a while after the host was to leave: what started it kills it soon."""
        await self._leaves.wait()
        while True:
            await anyio.sleep(GIVE_UP_S)
            if not self._is_connected:
                serving.cancel()

    async def _end(self, head: Head) -> None:
        """Carry out what the clock or a signal asks for, over the connection."""
        async with _task_group() as tasks:
            tasks.start_soon(self._drain, head)
            await self._leaves.wait()
            tasks.cancel_scope.cancel()
        await head.call("leave")

    async def _drain(self, head: Head) -> None:
        await self._drains.wait()
        self._report(f"{self._name} is drained: {self._why_drained}")
        await head.call("host_drain", host=self._name, why=self._why_drained)

    def _end_here(self) -> None:
        """End agent and ranks without the daemon, which gives the host up after a while."""
        if self._home is None:
            return
        known, identity = read_json(self._home.record) or {}, read_json(self._home.root / "identity.json") or {}
        if known:
            processes.send(int(known["pid"]), int(known["start_time"]), signal.SIGKILL)
        if not (agent := str(identity.get("agent", ""))):
            return
        for tag in processes.tags(f"{agent}/"):
            for pid in processes.of_attempt(tag):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # --- one connection -----------------------------------------------------------------------------------------------

    async def _session(self, head: Head) -> None:
        """Serve one connection until it breaks, or the host has left."""
        wanted = self._wanted
        name = self._name or wanted.name
        arguments = {"identity": self._slot.identity, "name": name, "exact": wanted.is_exact, "options": wanted.options}
        arguments |= {"until_s": wanted.until_s} if wanted.until_s is not None else {}
        commands = head.stream("join", **arguments)
        first = await anext(commands, None)
        if first is None:
            raise HeadLost("the daemon ended the connection")
        if first["name"] != self._name:
            self._name = first["name"]
            until = f" until {time.strftime('%H:%M', time.localtime(wanted.until_s))}" if wanted.until_s else ""
            self._report(f"this machine is {self._name} in the cluster{until}; Ctrl-C takes it out")
        else:
            self._report(f"{self._name} is connected again")
        self._home = self._slot.home(first["cluster"])
        self._is_connected = True
        async with _task_group() as tasks:
            tasks.start_soon(_first_error, self._end(head))
            with _Children(head, self._home, tasks) as children:
                async for command in commands:
                    if "removed" in command:
                        self._is_over = True
                        self._report(f"{self._name} has left the cluster")
                        break
                    await children.obey(command)
            tasks.cancel_scope.cancel()
        if not self._is_over:
            raise HeadLost("the daemon ended the connection")


async def _first_error(work: Coroutine[Any, Any, None]) -> None:
    """Await work whose connection may break: the loop that reads from it reports that."""
    with contextlib.suppress(HeadLost):
        await work


class _Children:
    """Bootstraps of the agent on this machine, by the daemon's number of each."""

    def __init__(self, head: Head, home: Home, tasks: anyio.abc.TaskGroup) -> None:
        self._head, self._home, self._tasks = head, home, tasks
        self._inputs: dict[int, asyncio.Queue[bytes]] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._processes):
            self._kill(number)

    async def obey(self, command: dict[str, Any]) -> None:
        """Carry out a command of the daemon's."""
        if "open" in command:
            await self._open(command["open"])
        elif "close" in command:
            self._kill(command["close"])
        elif (waiting := self._inputs.get(command.get("of", 0))) is not None:
            waiting.put_nowait(command["data"])

    async def _open(self, number: int) -> None:
        private_directory(str(self._home.root))
        limits = json.dumps(environment_limits.of_allocation(os.environ))
        ours = {"CLUSTERD_AGENT_HOME": str(self._home.root), environment_limits.VARIABLE: limits}
        pipe = asyncio.subprocess.PIPE
        # Its own session: Ctrl-C here is for this command alone.
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-E", "-c", PROGRAM, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self._home.root,
            env={**os.environ, **ours}, start_new_session=True,
        )  # fmt: skip
        self._processes[number], self._inputs[number] = child, asyncio.Queue()
        self._tasks.start_soon(self._feed, number, child)
        self._tasks.start_soon(_first_error, self._report_output(number, child))

    async def _feed(self, number: int, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, which is reported
            while True:
                child.stdin.write(await self._inputs[number].get())
                await child.stdin.drain()

    async def _report_output(self, number: int, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None and child.stderr is not None

        async def copy(source: asyncio.StreamReader, **more: Any) -> None:
            while data := await source.read(OUTPUT_BYTES):
                await self._head.call("join_output", process=number, data=data, **more)

        await asyncio.gather(copy(child.stdout), copy(child.stderr, error=True))
        await self._head.call("join_output", process=number, exit_code=await child.wait())
        self._processes.pop(number, None)
        self._inputs.pop(number, None)

    def _kill(self, number: int) -> None:
        if (child := self._processes.pop(number, None)) is not None:
            _end(child)


def _end(child: asyncio.subprocess.Process) -> None:
    """Kill a child. Its own `kill` may collect its exit code, and asyncio, which waits for that, says so on stderr."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


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
            _end(process)
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
        replies: asyncio.Queue[calls.Reply] = asyncio.Queue()
        await self._send(self._calls.open(replies.put_nowait), verb, arguments)
        return calls.result(await replies.get(), refusal)

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
