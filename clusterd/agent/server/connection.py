"""Connections to the sockets of the agent, with bounded memory in both directions, and the list of the open ones.

A peer that does not take its frames is not read from, and is cut off if it takes none for long. Large frames are
received within a budget that all connections share. Of daemons the newest epoch leads; each rank is of one attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from clusterd import protocol
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.host.home import read_json, write_json
from clusterd.agent.log import log_line
from clusterd.agent.ranks.attempts import StopFlags
from clusterd.protocol import ProtocolError
from clusterd.protocol.agent import FactsChanged, RankReport, Superseded
from clusterd.protocol.budget import FREE_BYTES, ByteBudget
from clusterd.protocol.calls import Failure, Ok, reply
from clusterd.protocol.control import Stop
from clusterd.protocol.messages import Event, to_map
from clusterd.protocol.proof import CHALLENGE_BYTES_MAX

QUEUE_BYTES_MAX = 4 << 20
"""Of frames that the peer has not taken; beyond it nothing more is read from the peer."""
QUEUE_BYTES_LIMIT = 4 * QUEUE_BYTES_MAX
"""A peer that lets even more events accumulate is cut off: it reconnects and asks for what it missed."""
WORK_BYTES_MAX = 16 << 20
"""Of requests of one connection that are being answered, with the bytes that they ask for."""
REQUEST_BYTES = 16 << 10
"""Least cost of a request: about a thousand small ones are answered side by side."""
RANK_FRAME_BYTES_MAX = 8 << 20
"""Longest frame of a rank; the metadata that it publishes with a segment grows with its script's own state."""

STALLED_S = 120.0
ADMISSION_S = 30.0
RECEIVE_S = 60.0
_PIECE_BYTES = 1 << 16

Message = dict[str, Any]


class Connection:
    """Connection from a daemon or a rank. One task sends the queued frames in order.

    Args:
        budget: for large frames of all connections, by daemon or attempt.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: ByteBudget) -> None:
        self.daemon: tuple[str, int] | None = None  # its name and epoch, after hello
        self.facts: object = None  # what was last sent of the facts whose change is reported
        self.nonce = ""  # of the challenge that the next hello answers
        self.proven = False  # the daemon knows the cluster's key
        self.rank: tuple[Attempt, int] | None = None  # after rank_hello
        self.orphaned: RankReport | None = None  # what the rank said when it lost its peers
        self.reads_for: Attempt | None = None  # after data_hello
        self.received_bytes = 0  # of the last message
        self._reader, self._writer, self._budget = reader, writer, budget
        self._outgoing: deque[bytes] = deque()
        self._queued_bytes = 0
        self._work_bytes = 0
        self._is_open = True
        self._changed = asyncio.Event()
        self.pump = asyncio.create_task(self._pump())
        self._expiry = asyncio.get_running_loop().call_later(ADMISSION_S, self._expire)

    @property
    def is_admitted(self) -> bool:
        """True once the peer showed who it is."""
        return self.proven or self.rank is not None or self.reads_for is not None

    # ---- out -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> bool:
        """Queue an event; false if it was not. Progress and facts are dropped if the peer does not read."""
        if message.get("event") in ("progress", "facts") and self._queued_bytes > QUEUE_BYTES_MAX:
            return False
        if self._queued_bytes > QUEUE_BYTES_LIMIT:
            log_line(f"agent: a peer that left {self._queued_bytes} bytes unread was cut off")
            self.cut()
            return False
        try:
            self._queue(protocol.encode(message))
        except protocol.ProtocolError as error:
            log_line(f"agent: {message.get('event')} was not sent: {error}")
            return False
        return True

    async def reply(self, number: object, outcome: Ok | Failure) -> None:
        """Queue the reply to a request once the peer took most of the earlier frames."""
        try:
            frame = protocol.encode(reply(number, outcome))
        except protocol.ProtocolError as error:
            frame = protocol.encode(reply(number, Failure(str(error), "size")))
        await self.wait_writable()
        self._queue(frame)

    async def wait_writable(self) -> None:
        """Wait until the peer took most of its frames, or is gone."""
        await self._until(lambda: self._queued_bytes <= QUEUE_BYTES_MAX)

    async def wait_flushed(self) -> None:
        """Wait until the peer took all of its frames, or is gone."""
        await self._until(lambda: not self._queued_bytes)

    def _queue(self, frame: bytes) -> None:
        if self._is_open:
            self._outgoing.append(frame)
            self._queued_bytes += len(frame)
            self._notify()

    async def _pump(self) -> None:
        try:
            while True:
                while not self._outgoing:
                    await self._changed.wait()
                frame = memoryview(self._outgoing.popleft())
                for start in range(0, len(frame), _PIECE_BYTES):
                    self._writer.write(frame[start : start + _PIECE_BYTES])
                    await asyncio.wait_for(self._writer.drain(), STALLED_S)
                    if not self._is_open:
                        return
                self._queued_bytes -= len(frame)
                self._notify()
        except (OSError, asyncio.TimeoutError) as error:
            log_line(f"agent: a connection broke: {error or f'its peer took nothing for {STALLED_S:.0f} s'}")
            self.cut()

    # ---- in ------------------------------------------------------------------------------------------------------

    async def receive(self) -> tuple[Message, Callable[[], None]]:
        """The next message once there is room for it and its reply; the function is called once it is answered.

        Raises:
            ProtocolError: no frame, or one that is longer than this peer's may be.
            OSError, asyncio.IncompleteReadError: the connection ended.
        """
        await self._until(lambda: self._queued_bytes <= QUEUE_BYTES_MAX and self._work_bytes <= WORK_BYTES_MAX)
        if not self._is_open:
            raise ConnectionError("the connection was closed")
        length = await protocol.read_length(self._reader, self._frame_bytes_max)
        if length <= FREE_BYTES or self.proven:
            message, release = protocol.decode(await self._reader.readexactly(length)), None
        else:
            message, release = await self._receive_within_budget(length)
        self.received_bytes = length
        cost = max(length, REQUEST_BYTES) + _requested_bytes(message)
        self._work_bytes += cost

        def finish() -> None:
            self._work_bytes -= cost
            self._notify()
            if release is not None:
                release()

        return message, finish

    async def _receive_within_budget(self, length: int) -> tuple[Message, Callable[[], None]]:
        attempt = self.rank[0] if self.rank is not None else self.reads_for
        owner = attempt.name if attempt is not None else ""
        await self._budget.reserve(owner, length)
        try:
            message = protocol.decode(await asyncio.wait_for(self._reader.readexactly(length), RECEIVE_S))
        except BaseException as error:
            self._budget.release(owner, length)
            if isinstance(error, asyncio.TimeoutError):
                raise protocol.ProtocolError(f"{length} bytes did not come within {RECEIVE_S:.0f} s") from None
            raise
        return message, lambda: self._budget.release(owner, length)

    @property
    def _frame_bytes_max(self) -> int:
        if self.proven:
            return protocol.FRAME_BYTES_MAX
        return RANK_FRAME_BYTES_MAX if self.is_admitted else CHALLENGE_BYTES_MAX

    # ---- end -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Close at once; the queued frames are lost."""
        self._is_open = False
        self._outgoing.clear()
        self._queued_bytes = 0
        self._notify()
        self._expiry.cancel()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close after sending the queued frames, waiting at most one second for the peer to read them."""
        try:
            await asyncio.wait_for(self.wait_flushed(), 1.0)
        except asyncio.TimeoutError:
            pass
        self.pump.cancel()
        self._is_open = False
        self._expiry.cancel()
        self._notify()
        self._writer.close()

    def _expire(self) -> None:
        if not self.is_admitted:
            self.cut()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._is_open and not condition():
            await self._changed.wait()


def _requested_bytes(message: Message) -> int:
    """Bytes that a request wants in its reply."""
    limit = message.get("limit")
    return min(limit, protocol.FRAME_BYTES_MAX) if isinstance(limit, int) and limit > 0 else 0


async def outcome(verb: object, work: Awaitable[object]) -> Ok | Failure:
    """Reply to a request: the result of `work`, a message or its map, or its failure."""
    try:
        result = await work
        return Ok(result if isinstance(result, dict) else to_map(result))
    except Refused as refused:
        return Failure(str(refused), refused.kind)
    except protocol.ProtocolError as error:
        return Failure(f"{verb}: {error}", "request")
    except (KeyError, TypeError, ValueError) as error:
        log_line(traceback.format_exc())
        return Failure(f"{verb}: {type(error).__name__}: {error}", "request")
    except Exception as error:  # one failed request must not end the agent
        log_line(traceback.format_exc())
        return Failure(f"{verb}: {error}", "host")


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
