"""The agent process: serves daemons on one Unix socket and ranks on another, and outlives both."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.host import cgroups, files, processes, programs
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import Home, default_home, forget_directory, listen, write_json
from clusterd.agent.host.ports import UNUSED_S as PORT_UNUSED_S
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Workdirs
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.environments import Environments
from clusterd.agent.ranks.reports import Progress
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.connection import Connection, Message, Sessions, outcome
from clusterd.agent.server.hardware_reports import Hardware, reportable
from clusterd.agent.server.rank_requests import RankRequests
from clusterd.agent.server.verbs import Verbs, handlers_of
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.moves import Moves
from clusterd.process_attributes import make_files_private
from clusterd.protocol.agent import HelloReply
from clusterd.protocol.budget import ByteBudget
from clusterd.protocol.messages import Done, Event, from_map
from clusterd.protocol.proof import new_nonce, proves
from clusterd.protocol.requests import REQUESTS, Challenge, ChallengeReply, Facts, Heartbeat, Hello, Shutdown
from clusterd.socket_files import inode, is_still

IDLE_S = 24 * 3600.0
"""An agent without a connected daemon and without running attempts exits after this long."""

PRELOAD = "clusterd.train.process.preload"
"""Module that the fork server of an elastic job imports before it forks."""

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SOCKET_CHECK_S = 1.0
"""Interval between checks that the socket file still exists."""


class Agent:
    """The agent of one host and user.

    Args:
        key: of the cluster; daemons prove that they know it. "": none does.
    """

    def __init__(self, home: Home, key: str) -> None:
        self._home, self._key = home, key
        self._id = home.identity()
        self._sessions = Sessions(home.root / "epochs.json", home.root / "events.json")
        self._progress = Progress(self._sessions.send_to_daemons)
        self._attempts = Attempts(
            home,
            self._id,
            self._sessions.send_to_daemons,
            self._sessions.request_stop,
            self._progress.poll,
            os.environ.get("CLUSTERD_PRELOAD", PRELOAD),
            cgroups.prepare(),
        )
        self._workdirs = Workdirs(home.workdirs)
        self._datasets = Datasets()
        sessions = self._sessions
        self._moves = Moves(
            home.root, sessions.send_to_ranks, self._send_to_attempt, sessions.send_to_daemons, self._datasets
        )
        self._ports = Ports(home.root / "ports.json")
        self._hardware = Hardware(self._attempts, home.root)
        self._done = asyncio.Event()
        self._terminals = Terminals(home.rank_socket)
        self._environments = Environments(home.root / "environments", self._attempts.tag)
        self._housekeeping = Housekeeping(
            self._attempts, self._sessions, self._terminals, self._ports, self._workdirs, self._environments,
            self._done.set,
        )  # fmt: skip
        verbs = Verbs(
            home, self._attempts, self._progress, self._workdirs, self._datasets, self._moves, self._ports,
            self._terminals, self._environments,
        )  # fmt: skip
        self._frames = ByteBudget(protocol.FRAME_BYTES_MAX, protocol.FRAME_BYTES_MAX)
        self._ranks = RankRequests(
            self._attempts, self._sessions, self._moves, self._datasets, self._hardware.inspect_gpu,
            self._housekeeping.mark_needed,
        )  # fmt: skip
        self._verbs = {**handlers_of(self), **handlers_of(verbs)}

    async def run(self) -> None:
        """Adopt the attempts of an earlier agent, then serve until asked to exit."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._done.set)
        await self._environments.adopt()
        await self._attempts.adopt()
        found = processes.stat(os.getpid())
        write_json(
            self._home.record,
            {
                "pid": os.getpid(),
                "start_time": found.start_time if found else 0,
                "boot_id": processes.boot_id(),
                "version": programs.version(),
                "socket": str(self._home.socket),
            },
        )
        services = [
            asyncio.create_task(work)
            for work in (
                self._listen(self._home.socket, self._connected),
                self._listen(self._home.rank_socket, self._ranks.connected),
                self._progress.follow(self._attempts),
                self._housekeeping.every_second(),
                self._hardware.watch(self._sessions),
            )
        ]
        for service in services:
            service.add_done_callback(self._service_ended)
        await self._done.wait()
        for task in services:
            task.cancel()
        await self._environments.close()
        self._sessions.save()
        await self._sessions.close()
        self._terminals.close_all()
        self._ports.close()
        self._moves.close()
        self._home.socket.unlink(missing_ok=True)
        self._home.rank_socket.unlink(missing_ok=True)
        forget_directory(self._home.sockets)

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        if not service.cancelled() and (error := service.exception()):
            # A half-working agent would look healthy. It exits instead, and the daemon starts a new one.
            log_line("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            self._done.set()

    # ---- connections ---------------------------------------------------------------------------------------------

    async def _listen(self, path: Path, connected: Connected) -> None:
        """Serve until cancelled. Listen on a new socket if the file is removed, as by a clean-up of /tmp."""
        while True:
            self._home.make()
            server = await asyncio.start_unix_server(connected, sock=listen(path))
            made = inode(path)
            try:
                while is_still(path, made):  # noqa: ASYNC110 - the removal of a file wakes no task
                    await asyncio.sleep(SOCKET_CHECK_S)
            finally:
                server.close()
            log_line(f"agent: the socket {path} was removed: listening there again")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, self._frames)
        async with self._sessions.serving(connection, "a caller"):
            while True:
                message, finish = await connection.receive()
                self._housekeeping.mark_needed()
                if connection.daemon is None:
                    await self._serve(connection, message, finish)  # in order: what may follow depends on the hello
                else:
                    self._sessions.start(self._serve(connection, message, finish))

    async def _serve(self, connection: Connection, message: Message, finish: Callable[[], None]) -> None:
        verb = str(message.get("verb"))
        try:
            await connection.reply(message.get("id"), await outcome(verb, self._answer(connection, verb, message)))
        finally:
            finish()

    async def _answer(self, connection: Connection, verb: str, message: Message) -> object:
        if verb == Challenge.verb:
            challenge = from_map(Challenge, message, verb)
            connection.nonce = new_nonce()
            identity = f"{self._id}@{processes.machine() or processes.boot_id()}"
            return ChallengeReply(connection.nonce, self._sessions.seen(challenge.daemon), identity)
        if verb == Hello.verb:
            hello = from_map(Hello, message, verb)
            self._check_proof(connection, hello)
            return await self._hello(connection, hello)
        self._sessions.check(connection, verb, message)
        kind = REQUESTS.get(verb)
        if kind is None:
            raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r}")
        return await self._verbs[kind](from_map(kind, message, verb))

    def _check_proof(self, connection: Connection, hello: Hello) -> None:
        """Check that a daemon knows the key that this agent was started with.

        Raises:
            Refused: ``key``.
        """
        nonce, connection.nonce = connection.nonce, ""
        if not nonce or hello.proof is None:
            raise Refused("key", "a daemon has to prove its cluster's key here; this one is of an older version")
        if not proves(self._key, hello.proof, "hello", nonce, hello.daemon, hello.epoch):
            raise Refused(
                "key",
                f"the agent at {self._home.root} was started with the key of another cluster or state directory: "
                f"`kill {os.getpid()}` there has it started anew, and its jobs go on",
            )
        connection.proven = True

    def _send_to_attempt(self, job: str, number: int, event: Event) -> None:
        """Send to the connected ranks of an attempt, of all its generations."""
        for attempt in self._attempts.generations(job, number):
            self._sessions.send_to_ranks(attempt, event)

    # ---- verbs ---------------------------------------------------------------------------------------------------

    async def _hello(self, connection: Connection, hello: Hello) -> HelloReply:
        if hello.protocol != protocol.VERSION:
            raise Refused("protocol", f"the agent speaks protocol {protocol.VERSION}, the daemon {hello.protocol}")
        found = await self._hardware.facts()
        self._attempts.login.renew()
        # No await from here on: changes after this report reach this connection as events.
        self._sessions.lead(connection, hello.daemon, hello.epoch)
        connection.facts = reportable(found)
        self._sessions.see(hello.daemon, list(hello.newest) if hello.newest is not None else None)
        self._sessions.save()
        return HelloReply(
            agent=self._id,
            version=programs.version(),
            boot_id=processes.boot_id(),
            machine=processes.machine(),
            now_s=time.time(),
            facts=found,
            attempts=tuple(attempt.row() for attempt in self._attempts),
            snapshots=self._moves.replicas.rows(),
            orphaned=self._sessions.orphaned(),
        )

    async def _facts(self, request: Facts) -> Message:
        return await self._hardware.facts()

    async def _heartbeat(self, request: Heartbeat) -> Done:
        return Done()

    async def _shutdown(self, request: Shutdown) -> Done:
        running = self._attempts.running
        if running and not request.force:
            raise Refused("busy", f"{len(running)} attempts run here: {', '.join(sorted(running))}")
        await self._attempts.settle()
        await self._attempts.fork_servers.shutdown()
        # The delay lets the reply leave first.
        asyncio.get_running_loop().call_later(0.05, self._done.set)
        return Done()


class Housekeeping:
    """Runs every second; some of the work only every Nth tick.

    Args:
        idle: called once the agent was idle for `IDLE_S`.
    """

    def __init__(
        self,
        attempts: Attempts,
        sessions: Sessions,
        terminals: Terminals,
        ports: Ports,
        workdirs: Workdirs,
        environments: Environments,
        idle: Callable[[], object],
    ) -> None:
        self._attempts, self._sessions, self._terminals = attempts, sessions, terminals
        self._ports, self._workdirs, self._environments, self._idle = ports, workdirs, environments, idle
        self._needed_at = time.monotonic()

    def mark_needed(self) -> None:
        """Restart the idle timer, as after a request."""
        self._needed_at = time.monotonic()

    async def every_second(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            self._attempts.poll()
            self._terminals.poll()
            self._ports.release(self._port_is_unused)
            if self._attempts.running or self._sessions.any_daemon:
                self.mark_needed()
            if time.monotonic() - self._needed_at > IDLE_S:
                await self._attempts.fork_servers.shutdown()
                self._idle()
            if ticks % 10 == 0:
                await self.shorten_logs()
            if ticks % 3600 == 0:
                used = {attempt.launch.snapshot or "" for attempt in self._attempts}
                await loop.run_in_executor(None, self._workdirs.clean, used)
                pythons = [Path(a.launch.python) for a in self._attempts if a.running and a.launch.python]
                await loop.run_in_executor(None, self._environments.clean, pythons)
            ticks += 1
            await asyncio.sleep(1.0)

    async def shorten_logs(self) -> None:
        """Trim logs of running attempts, and once more after they end: a rank writes gigabytes within seconds."""
        due = [attempt for attempt in self._attempts if attempt.running or not attempt.is_shortened]
        ended = [attempt for attempt in due if not attempt.running]
        logs = [attempt.log(rank) for attempt in due for rank in attempt.ranks]
        await asyncio.get_running_loop().run_in_executor(None, _trim, logs)
        for attempt in ended:
            attempt.is_shortened = True

    def _port_is_unused(self, name: str, generation: int, age_s: float) -> bool:
        for attempt in self._attempts:
            if attempt.name == name and attempt.generation == generation and attempt.running:
                return False
        # A lease may precede its launch, or serve ranks on other hosts, whose exit this agent cannot observe.
        return age_s > PORT_UNUSED_S


def _trim(logs: list[Path]) -> None:
    for file in logs:
        try:
            dropped = files.trim(file)
        except OSError as error:
            log_line(f"agent: cannot shorten {file}: {error}")
            continue
        if dropped:
            log_line(f"agent: dropped {dropped} bytes of {file}, which was too long")


def main() -> int:
    """Run the agent of this home; exit at once if one runs already."""
    make_files_private()
    home = default_home()
    home.make()
    key = _read_key()
    lock = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _acquire_lock(lock):
        return 0
    serving: Coroutine[Any, Any, None] = _serve(home, key)
    asyncio.run(serving)
    return 0


def _acquire_lock(lock: int) -> bool:
    """Take the lock; false if another agent holds it. Retries, because `attach` holds it briefly to test it."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


def _read_key() -> str:
    """Read the cluster's key from stdin, where no other process sees it; it stays in memory and is never stored.

    An agent that is started after this one died gets it the same way, from the daemon's next connection.
    """
    key = os.read(0, 4096).decode("ascii", "replace")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return key


async def _serve(home: Home, key: str) -> None:
    await Agent(home, key).run()
