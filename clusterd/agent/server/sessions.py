"""Who is connected to the agent: the daemons that lead here, and the ranks of its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.log import say
from clusterd.agent.server.connection import Connection, Message


class Callers:
    """All of them, and what is told to which.

    Of each cluster's daemons only the newest leads, which the epoch tells: one that was started again takes over from
    one that hangs somewhere.

    Args:
        file: keeps the epochs over the agent's own end.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._epochs: dict[str, int] = dict((read_json(file) or {}).items())
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    def came(self, connection: Connection) -> None:
        """The current task serves this one from now on."""
        self._connections.add(connection)
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def left(self, connection: Connection) -> None:
        """It is told nothing more, but what is on its way."""
        self._connections.discard(connection)
        await connection.close()

    async def close(self) -> None:
        """Hang up on everybody."""
        for connection in list(self._connections):
            await connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # ---- daemons -------------------------------------------------------------------------------------------------

    @property
    def any_daemon(self) -> bool:
        """Whether one has said hello, and is there."""
        return any(connection.daemon for connection in self._connections)

    def lead(self, connection: Connection, name: str, epoch: int) -> None:
        """Let the daemon of a cluster lead.

        Raises:
            Refused: ``stale`` (a newer one does).
        """
        known = int(self._epochs.get(name, 0))
        if epoch < known:
            said = f"a newer daemon (epoch {known}) leads this host; epoch {epoch} is over"
            raise Refused("stale", f"{said}; one with a restored state: clusterd start --restored")
        if epoch > known:
            self._epochs[name] = epoch
            try:
                write_json(self._file, self._epochs)
            except OSError as error:  # a job that filled the disk is best looked after by who leads this host
                say(f"agent: cannot write which daemon leads it: {error}")
        connection.daemon = (name, epoch)

    def check(self, connection: Connection, verb: str) -> None:
        """Whether this caller may ask for that.

        Raises:
            Refused: ``hello`` (it has not said that), ``stale``.
        """
        if connection.daemon is None:
            if verb not in ("hello", "shutdown"):
                raise Refused("hello", f"{verb} came before hello")
            return
        name, epoch = connection.daemon
        if epoch < self._epochs.get(name, 0):
            raise Refused(
                "stale", f"a newer daemon (epoch {self._epochs[name]}) leads this host; epoch {epoch} is over"
            )

    def tell_daemons(self, event: Message) -> bool:
        """Every daemon that leads this host; false: none is there."""
        there = False
        for connection in self._connections:
            if connection.daemon is not None and connection.daemon[1] >= self._epochs.get(connection.daemon[0], 0):
                connection.send(event)
                there = True
        return there

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def ask_ranks(self, attempt: Attempt, reason: str, grace_s: float, wishes: Mapping[str, bool]) -> set[int]:
        """Ask the connected ranks of one generation to stop; the pids of those that were asked."""
        asked = set()
        for connection in self._connections:
            if connection.rank is not None and connection.rank[0] is attempt:
                connection.send({"event": "stop", "reason": reason, "deadline_s": grace_s, **wishes})
                # As forked: through a shell in between, the one that listens has another pid.
                asked.add(attempt.ranks[connection.rank[1]].pid)
        return asked

    def tell_ranks(self, attempt: Attempt, message: Message) -> int:
        """The connected ranks of one generation; how many."""
        told = [c for c in self._connections if c.rank is not None and c.rank[0] is attempt]
        for connection in told:
            connection.send(message)
        return len(told)
