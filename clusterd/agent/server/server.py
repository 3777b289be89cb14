"""The agent process: serves daemons and ranks on one Unix socket, and outlives both."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
import traceback
from collections.abc import Coroutine
from typing import Any

from clusterd import protocol
from clusterd.agent.host import processes, programs
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import Home, default_home, forget_directory, listen, write_json
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Workdirs
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.progress import Progress
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.connection import Connection, Message
from clusterd.agent.server.hardware_reports import Hardware
from clusterd.agent.server.housekeeping import Housekeeping
from clusterd.agent.server.sessions import Sessions
from clusterd.agent.server.verbs import Verbs
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.moves import Moves
from clusterd.agent.threads import in_thread
from clusterd.socket_files import inode, is_still

PRELOAD = "clusterd.train.process.preload"
"""Module that the fork server of an elastic job imports before it forks."""


SOCKET_CHECK_S = 1.0
"""Interval between checks that the socket file still exists."""


class Agent:
    """The agent of one host and user."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._id = home.identity()
        self._sessions = Sessions(home.root / "epochs.json")
        self._progress = Progress(self._sessions.send_to_daemons)
        self._attempts = Attempts(
            home,
            self._id,
            self._sessions.send_to_daemons,
            self._sessions.request_stop,
            self._progress.poll,
            os.environ.get("CLUSTERD_PRELOAD", PRELOAD),
        )
        self._workdirs = Workdirs(home.snapshots)
        self._datasets = Datasets()
        sessions = self._sessions
        self._moves = Moves(
            home.root, self._id, sessions.send_to_ranks, self._send_to_attempt, sessions.send_to_daemons, self._datasets
        )
        self._ports = Ports(home.root / "ports.json")
        self._hardware = Hardware(self._attempts, home.root)
        self._done = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._terminals = Terminals()
        self._housekeeping = Housekeeping(
            self._attempts, self._sessions, self._terminals, self._ports, self._workdirs, self._done.set
        )
        verbs = Verbs(
            home, self._attempts, self._progress, self._workdirs, self._datasets, self._moves, self._ports,
            self._terminals,
        )  # fmt: skip
        self._verbs = {"facts": self._facts, "shutdown": self._shutdown, **verbs.table}

    async def run(self) -> None:
        """Adopt the attempts of an earlier agent, then serve until asked to exit."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._done.set)
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
                self._listen(),
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
        await self._sessions.close()
        self._terminals.close_all()
        self._ports.close()
        self._moves.close()
        self._home.socket.unlink(missing_ok=True)
        forget_directory(self._home.sockets)

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        if not service.cancelled() and (error := service.exception()):
            # A half-working agent would look healthy. It exits instead, and the daemon starts a new one.
            log_line("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            self._done.set()

    # ---- connections ---------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Serve until cancelled. Listen on a new socket if the file is removed, as by a clean-up of /tmp."""
        while True:
            self._home.make()
            server = await asyncio.start_unix_server(self._connected, sock=listen(self._home))
            made = inode(self._home.socket)
            try:
                while is_still(self._home.socket, made):  # noqa: ASYNC110 - the removal of a file wakes no task
                    await asyncio.sleep(SOCKET_CHECK_S)
            finally:
                server.close()
            log_line(f"agent: the socket {self._home.socket} was removed: listening there again")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._sessions.opened(connection)
        try:
            while True:
                message = await protocol.read(reader)
                self._housekeeping.mark_needed()
                if "event" in message:
                    self._rank_event(connection, message)
                elif message.get("verb") in ("rank_hello", "data_hello"):
                    await self._answer(connection, message)  # in order: an event may follow directly
                else:
                    request = asyncio.create_task(self._answer(connection, message))
                    self._requests.add(request)
                    request.add_done_callback(self._requests.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except protocol.ProtocolError as error:
            log_line(f"agent: a caller was cut off: {error}")
        finally:
            await self._sessions.closed(connection)

    async def _answer(self, connection: Connection, message: Message) -> None:
        verb = message.get("verb")
        try:
            if verb == "rank_hello":
                answer = self._rank_hello(connection, message)
            elif verb == "data_hello":
                connection.reads_for = self._admitted(message)
                answer = {}
            elif connection.reads_for is not None:
                answer = await self._data(connection.reads_for, str(verb), message)
            elif connection.rank is not None:
                answer = await self._rank_request(*connection.rank, str(verb), message)
            elif verb == "hello":
                self._sessions.check(connection, verb)
                answer = await self._hello(connection, message)
            elif verb in self._verbs:
                self._sessions.check(connection, str(verb))
                answer = await self._verbs[str(verb)](message)
            else:
                raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r}")
            reply: Message = {"ok": answer}
        except Refused as refused:
            reply = {"error": {"kind": refused.kind, "message": str(refused)}}
        except (KeyError, TypeError, ValueError) as error:
            reply = {"error": {"kind": "request", "message": f"{verb}: {type(error).__name__}: {error}"}}
            log_line(traceback.format_exc())
        except Exception as error:  # one failed request must not end the agent
            reply = {"error": {"kind": "host", "message": f"{verb}: {error}"}}
            log_line(traceback.format_exc())
        connection.send({"id": message.get("id"), **reply})

    def _send_to_attempt(self, job: str, number: int, message: Message) -> None:
        """Send to the connected ranks of an attempt, of all its generations."""
        for attempt in self._attempts.generations(job, number):
            self._sessions.send_to_ranks(attempt, message)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def _admitted(self, message: Message) -> Attempt:
        """Check a rank's token and return its attempt."""
        rank_id = (message["job"], message["attempt"], message["generation"], int(message["rank"]))
        return self._attempts.admit(*rank_id, str(message["token"]))

    async def _data(self, attempt: Attempt, verb: str, message: Message) -> Message:
        """Answer a rank that reads a data set of another host."""
        if verb not in ("data_look", "data_read"):
            raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r} of data sets")
        return await in_thread(lambda: self._datasets.ask(attempt, verb, message), "data")

    def _rank_hello(self, connection: Connection, message: Message) -> Message:
        rank = int(message["rank"])
        attempt = self._admitted(message)
        connection.rank = (attempt, rank)
        if attempt.stopped:
            connection.send({"event": "stop", "reason": "stopped", "deadline_s": 0.0})
        elif missed := self._moves.missed(attempt):
            connection.send(missed)
        return {}

    async def _rank_request(self, attempt: Attempt, rank: int, verb: str, message: Message) -> Message:
        if verb == "segment":
            return await self._moves.segment(attempt, message)
        if verb == "publish":
            return await self._moves.publish(attempt, message)
        if verb == "fetch":
            return await self._moves.fetch(attempt, message)
        if verb == "segments":
            return self._moves.segments(message)
        if verb == "failed":
            self._attempts.failed(attempt, rank, str(message["reason"]), str(message["message"]))
            return {}
        raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r} of a rank's")

    def _rank_event(self, connection: Connection, message: Message) -> None:
        if connection.rank is None:
            return
        attempt, rank = connection.rank
        if message["event"] == "failed":  # an event of ranks that an agent of an earlier version started
            self._attempts.failed(attempt, rank, str(message.get("reason")), str(message.get("message")))
        elif message["event"] == "said":
            self._sessions.send_to_daemons(
                {
                    "event": "rank_said",
                    "job": attempt.job,
                    "attempt": attempt.attempt,
                    "generation": attempt.generation,
                    "rank": rank,
                    "at_s": time.time(),
                    "said": message["said"],
                }
            )

    # ---- verbs ---------------------------------------------------------------------------------------------------

    async def _hello(self, connection: Connection, message: Message) -> Message:
        if message["protocol"] != protocol.VERSION:
            raise Refused(
                "protocol",
                f"the agent speaks protocol {protocol.VERSION}, the daemon {message['protocol']}",
            )
        found = await self._hardware.facts()
        # No await from here on: changes after this report reach this connection as events.
        self._sessions.lead(connection, str(message["daemon"]), int(message["epoch"]))
        return {
            "agent": self._id,
            "version": programs.version(),
            "boot_id": processes.boot_id(),
            "machine": processes.machine(),
            "now_s": time.time(),
            "facts": found,
            "attempts": [attempt.report() for attempt in self._attempts],
            "snapshots": self._moves.replicas.report(),
        }

    async def _facts(self, _message: Message) -> Message:
        return await self._hardware.facts()

    async def _shutdown(self, message: Message) -> Message:
        running = self._attempts.running
        if running and not message.get("force"):
            raise Refused("busy", f"{len(running)} attempts run here: {', '.join(sorted(running))}")
        await self._attempts.settle()
        await self._attempts.fork_servers.shutdown()
        # The delay lets the reply leave first.
        asyncio.get_running_loop().call_later(0.05, self._done.set)
        return {}


def main() -> int:
    """Run the agent of this home; exit at once if one runs already."""
    home = default_home()
    home.make()
    lock = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _acquire_lock(lock):
        return 0
    serving: Coroutine[Any, Any, None] = _serve(home)
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


async def _serve(home: Home) -> None:
    await Agent(home).run()
