"""Open connections of the agent: daemons with their epochs, and ranks of attempts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import StopFlags
from clusterd.agent.server.connection import Connection, Message
from clusterd.protocol import ProtocolError
from clusterd.protocol.agent import FactsChanged, RankReport, Superseded
from clusterd.protocol.control import Stop
from clusterd.protocol.messages import Event

EPOCH_STEP_MAX = 24 * 3600
"""An epoch counts starts of a daemon, or is its wall clock in seconds after `start --restored`. One that is further
ahead of both than this many starts, or seconds of clock skew, would lock out every later daemon and is refused."""

_SAVED = ("launch", "stop", "resume", "drop")
"""Requests that change what runs; the event that they name is on disk before they are carried out."""

UNADMITTED_MAX = 128
"""Connections of peers that did not show yet who they are; of more, the oldest is closed."""


class Sessions:
    """Registry of connections, and the routing of events to them.

    The daemon of a cluster with the highest epoch leads: a restarted daemon takes over from one that hangs.

    Of each cluster the agent also keeps the newest event that a daemon named, with its checksum: a daemon that does not
    find it in its journal runs on an older copy.

    Args:
        file: stores the epochs across restarts of the agent.
        events_file: stores the newest events.
    """

    def __init__(self, file: Path, events_file: Path) -> None:
        self._file, self._events_file = file, events_file
        self._events: dict[str, list[Any]] = dict(read_json(events_file) or {})
        self._unsaved = False
        stored = {name: int(epoch) for name, epoch in (read_json(file) or {}).items()}
        self._epochs = {name: epoch for name, epoch in stored.items() if epoch <= _newest_plausible(0)}
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[object]] = set()
        self._requests: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, connection: Connection, peer: str) -> AsyncIterator[None]:
        """Register a connection while the current task serves it; its end, or a frame that is none, ends the block."""
        self._opened(connection)
        try:
            yield
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ProtocolError as error:
            log_line(f"agent: {peer} was cut off: {error}")
        finally:
            self._connections.pop(connection, None)
            await connection.close()  # after its queued frames

    def start(self, request: Coroutine[Any, Any, None]) -> None:
        """Serve a request beside the next ones of its connection."""
        task = asyncio.create_task(request)
        self._requests.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._requests.discard)

    def _opened(self, connection: Connection) -> None:
        unadmitted = [known for known in self._connections if not known.is_admitted]
        if len(unadmitted) >= UNADMITTED_MAX:
            unadmitted[0].cut()
        self._connections[connection] = None
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections):
            await connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # ---- daemons -------------------------------------------------------------------------------------------------

    @property
    def any_daemon(self) -> bool:
        """True if a daemon that sent hello is connected."""
        return any(connection.daemon for connection in self._connections)

    def seen(self, name: str) -> Message:
        """Epoch of the newest daemon of this cluster, and the newest event that it named; empty if there was none."""
        event = self._events.get(name)
        return {"epoch": self._epochs.get(name, 0), "event": event[0], "checksum": event[1]} if event else {}

    def see(self, name: str, event: list[Any] | None) -> None:
        """Keep an event that the leading daemon names; it is on disk after the next `save`."""
        if event is not None and event != self._events.get(name):
            self._events[name] = event
            self._unsaved = True

    def save(self) -> None:
        """Write the newest events to disk."""
        if not self._unsaved:
            return
        try:
            write_json(self._events_file, self._events)
            self._unsaved = False
        except OSError as error:  # as for the epoch
            log_line(f"agent: cannot write the newest event of its daemon: {error}")

    def lead(self, connection: Connection, name: str, epoch: int) -> None:
        """Make a connection's daemon the leader of its cluster, and this its only connection.

        An earlier connection of the same daemon is one that it gave up. What it still brings, as TCP does after a
        partition, must not be carried out after the hello: the daemon may have started the job elsewhere meanwhile, and
        given the devices to another one.

        Raises:
            Refused: ``stale`` (a newer daemon leads), ``epoch`` (implausible).
        """
        known = self._epochs.get(name, 0)
        if epoch < known:
            message = f"a newer daemon (epoch {known}) leads this host; epoch {epoch} is over"
            raise Refused("stale", f"{message}; one with a restored state: clusterd start --restored")
        if epoch > _newest_plausible(known):
            clock = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
            message = f"epoch {epoch} is implausible: the newest here is {known}, and this host's clock says {clock}"
            raise Refused("epoch", message)
        if epoch > known:
            self._epochs[name] = epoch
            for other in self._connections:
                if other.daemon is not None and other.daemon[0] == name:
                    other.send(Superseded(epoch).to_message())
            try:
                write_json(self._file, self._epochs)
            except OSError as error:  # the leader must still be able to stop the job that filled the disk
                log_line(f"agent: cannot write the epoch of its daemon: {error}")
        for other in self._connections:
            if other is not connection and other.daemon == (name, epoch):
                other.daemon = None  # for requests that are read already
                other.cut()
        connection.daemon = (name, epoch)

    def check(self, connection: Connection, verb: str, message: Message) -> None:
        """Check that a connection may send `verb`, and keep the event that the message names.

        Raises:
            Refused: ``hello`` (no hello was sent before), ``stale``.
        """
        if connection.daemon is None:
            # A daemon of another protocol gets no further than to show itself, and ends the agent to replace it.
            if verb != "shutdown" or not connection.proven:
                raise Refused("hello", f"{verb} came before hello")
            return
        name, epoch = connection.daemon
        if epoch < self._epochs.get(name, 0):
            raise Refused(
                "stale", f"a newer daemon (epoch {self._epochs[name]}) leads this host; epoch {epoch} is over"
            )
        self.see(name, message.get("newest"))
        if verb in _SAVED:  # not for every look at a log: a write waits for the disk
            self.save()

    def send_to_daemons(self, event: Event) -> bool:
        """Send to every daemon that leads this host; false if none is connected, or none reads."""
        took = [connection.send(event.to_message()) for connection in self._leading()]
        return any(took)

    def send_facts(self, event: FactsChanged, reportable: object) -> None:
        """Send facts to every daemon that leads this host and was last sent others, at its hello or since."""
        for connection in self._leading():
            if connection.facts != reportable and connection.send(event.to_message()):
                connection.facts = reportable

    async def wait_daemons_writable(self) -> None:
        """Wait until every leading daemon took most of the events for it."""
        for connection in self._leading():
            await connection.wait_writable()

    def _leading(self) -> list[Connection]:
        return [
            connection
            for connection in self._connections
            if connection.daemon is not None and connection.daemon[1] >= self._epochs.get(connection.daemon[0], 0)
        ]

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def request_stop(self, attempt: Attempt, reason: str, grace_s: float, flags: StopFlags) -> set[int]:
        """Ask the connected ranks of one generation to stop; return the pids of those asked."""
        asked = set()
        for connection in self._connections:
            if connection.rank is not None and connection.rank[0] is attempt:
                connection.send(Stop(reason, grace_s, **flags).to_message())
                # The pid of the forked process: behind a shell, the process that listens has another one.
                asked.add(attempt.ranks[connection.rank[1]].pid)
        return asked

    def orphaned(self) -> tuple[RankReport, ...]:
        """Reports of connected ranks that lost their peers and wait."""
        return tuple(c.orphaned for c in self._connections if c.rank is not None and c.orphaned is not None)

    def send_to_ranks(self, attempt: Attempt, event: Event) -> int:
        """Send to the connected ranks of one generation; return their number."""
        receivers = [c for c in self._connections if c.rank is not None and c.rank[0] is attempt]
        for connection in receivers:
            connection.send(event.to_message())
        return len(receivers)


def _newest_plausible(known: int) -> int:
    return max(known, int(time.time())) + EPOCH_STEP_MAX
