"""The agent: answers the daemon's requests and the ranks' hellos on one socket, and outlives both kinds of callers."""

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
from clusterd.agent.host.home import Home, default_home, forget_directory, inode, is_still, listen, write_json
from clusterd.agent.host.ports import Ports
from clusterd.agent.host.workdirs import Snapshots
from clusterd.agent.log import say
from clusterd.agent.ranks.attempts import Attempts
from clusterd.agent.ranks.progress import Progress
from clusterd.agent.ranks.terminals import Terminals
from clusterd.agent.server.connection import Connection, Message
from clusterd.agent.server.hardware_reports import Hardware
from clusterd.agent.server.housekeeping import Chores
from clusterd.agent.server.sessions import Callers
from clusterd.agent.server.verbs import Verbs
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.moves import Moves
from clusterd.agent.threads import in_thread

PRELOAD = "clusterd.train.process.preload"
"""What the fork server of an elastic job imports before it forks."""


LOOK_EVERY_S = 1.0
"""Between two looks whether the socket is still there."""


class Agent:
    """Everything of one host and user."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._id = home.identity()
        self._callers = Callers(home.root / "epochs.json")
        self._progress = Progress(self._callers.tell_daemons)
        self._attempts = Attempts(
            home,
            self._id,
            self._callers.tell_daemons,
            self._callers.ask_ranks,
            self._progress.look,
            os.environ.get("CLUSTERD_PRELOAD", PRELOAD),
        )
        self._snapshots = Snapshots(home.snapshots)
        self._datasets = Datasets()
        callers = self._callers
        self._moves = Moves(
            home.root, self._id, callers.tell_ranks, self._tell_attempt, callers.tell_daemons, self._datasets
        )
        self._ports = Ports(home.root / "ports.json")
        self._hardware = Hardware(self._attempts, home.root)
        self._done = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._terminals = Terminals()
        self._chores = Chores(
            self._attempts, self._callers, self._terminals, self._ports, self._snapshots, self._done.set
        )
        verbs = Verbs(
            home, self._attempts, self._progress, self._snapshots, self._datasets, self._moves, self._ports,
            self._terminals,
        )  # fmt: skip
        self._verbs = {"facts": self._facts, "shutdown": self._shutdown, **verbs.table}

    async def run(self) -> None:
        """Adopt what an earlier agent left, then serve until told to end."""
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
        chores = [
            asyncio.create_task(work)
            for work in (
                self._listen(),
                self._progress.follow(self._attempts),
                self._chores.every_second(),
                self._hardware.watch(self._callers),
            )
        ]
        for chore in chores:
            chore.add_done_callback(self._chore_ended)
        await self._done.wait()
        for task in chores:
            task.cancel()
        await self._callers.close()
        self._terminals.close_all()
        self._ports.close()
        self._moves.close()
        self._home.socket.unlink(missing_ok=True)
        forget_directory(self._home.sockets)

    def _chore_ended(self, chore: asyncio.Task[None]) -> None:
        if not chore.cancelled() and (error := chore.exception()):
            # A half-working agent would look healthy: better none, which the daemon starts anew.
            say("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            self._done.set()

    # ---- connections ---------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Serve for ever; where the socket is removed, as by whoever tidies up in /tmp, at another one there."""
        while True:
            self._home.make()
            server = await asyncio.start_unix_server(self._connected, sock=listen(self._home))
            made = inode(self._home.socket)
            try:
                while is_still(self._home.socket, made):  # noqa: ASYNC110 - the file system rings no bell
                    await asyncio.sleep(LOOK_EVERY_S)
            finally:
                server.close()
            say(f"agent: the socket {self._home.socket} was removed: listening there again")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._callers.came(connection)
        try:
            while True:
                message = await protocol.read(reader)
                self._chores.needed()
                if "event" in message:
                    self._heard_from_rank(connection, message)
                elif message.get("verb") in ("rank_hello", "data_hello"):
                    await self._answer(connection, message)  # at once: news may follow on its heels
                else:
                    request = asyncio.create_task(self._answer(connection, message))
                    self._requests.add(request)
                    request.add_done_callback(self._requests.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except protocol.ProtocolError as error:
            say(f"agent: a caller was cut off: {error}")
        finally:
            await self._callers.left(connection)

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
                answer = await self._asked_by_rank(*connection.rank, str(verb), message)
            elif verb == "hello":
                self._callers.check(connection, verb)
                answer = await self._hello(connection, message)
            elif verb in self._verbs:
                self._callers.check(connection, str(verb))
                answer = await self._verbs[str(verb)](message)
            else:
                raise Refused("verb", f"this agent (version {programs.version()}) knows no {verb!r}")
            reply: Message = {"ok": answer}
        except Refused as refused:
            reply = {"error": {"kind": refused.kind, "message": str(refused)}}
        except (KeyError, TypeError, ValueError) as error:
            reply = {"error": {"kind": "request", "message": f"{verb}: {type(error).__name__}: {error}"}}
            say(traceback.format_exc())
        except Exception as error:  # the agent lives on whatever one request did
            reply = {"error": {"kind": "host", "message": f"{verb}: {error}"}}
            say(traceback.format_exc())
        connection.send({"id": message.get("id"), **reply})

    def _tell_attempt(self, job: str, number: int, message: Message) -> None:
        """Send to the connected ranks of an attempt, whatever their generation."""
        for attempt in self._attempts.generations(job, number):
            self._callers.tell_ranks(attempt, message)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def _admitted(self, message: Message) -> Attempt:
        """The attempt of a rank that shows its token."""
        who = (message["job"], message["attempt"], message["generation"], int(message["rank"]))
        return self._attempts.admit(*who, str(message["token"]))

    async def _data(self, attempt: Attempt, verb: str, message: Message) -> Message:
        """A rank reads a data set of another host."""
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

    async def _asked_by_rank(self, attempt: Attempt, rank: int, verb: str, message: Message) -> Message:
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

    def _heard_from_rank(self, connection: Connection, message: Message) -> None:
        if connection.rank is None:
            return
        attempt, rank = connection.rank
        if message["event"] == "failed":  # a rank that an agent before this one started
            self._attempts.failed(attempt, rank, str(message.get("reason")), str(message.get("message")))
        elif message["event"] == "said":
            self._callers.tell_daemons(
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
        # From here on without a pause: what happens after this report reaches this connection as an event.
        self._callers.lead(connection, str(message["daemon"]), int(message["epoch"]))
        return {
            "agent": self._id,
            "version": programs.version(),
            "boot_id": processes.boot_id(),
            "machine": processes.machine(),
            "now_s": time.time(),
            "facts": found,
            "attempts": [attempt.report() for attempt in self._attempts],
            "snapshots": self._moves.copies.report(),
        }

    async def _facts(self, _message: Message) -> Message:
        return await self._hardware.facts()

    async def _shutdown(self, message: Message) -> Message:
        running = self._attempts.running
        if running and not message.get("force"):
            raise Refused("busy", f"{len(running)} attempts run here: {', '.join(sorted(running))}")
        await self._attempts.settle()
        await self._attempts.spawners.shutdown()
        # After the reply is on its way.
        asyncio.get_running_loop().call_later(0.05, self._done.set)
        return {}


def main() -> int:
    """Be the agent of this home, unless one lives here already."""
    home = default_home()
    home.make()
    lock = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _alone(lock):
        return 0
    serving: Coroutine[Any, Any, None] = _serve(home)
    asyncio.run(serving)
    return 0


def _alone(lock: int) -> bool:
    """Whether this process got the lock; an `attach` that looks whether anyone has it may hold it for a moment."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


async def _serve(home: Home) -> None:
    await Agent(home).run()
