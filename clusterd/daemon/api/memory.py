"""Bounds on the memory that clients cost the daemon: requests being received, answers that nobody reads.

A connection has soft limits: beyond them its requests are not read, or are read and not begun. Each user, and all
together, have hard ones: beyond them the connection with the most unread bytes is closed.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable

import anyio

from clusterd.protocol.budget import ByteBudget

UNREAD_BYTES_MAX = 1 << 20
"""Of one connection; beyond it no request is begun. Requests are still read: clients send some hundred of them
before they read the first answer."""
USER_UNREAD_BYTES_MAX, ALL_UNREAD_BYTES_MAX = 64 << 20, 256 << 20
RECEIVED_BYTES_MAX = 4 << 20
"""Requests of one connection that are not answered yet."""
USER_RECEIVED_BYTES_MAX, ALL_RECEIVED_BYTES_MAX = 16 << 20, 128 << 20
CONNECTIONS_PER_USER = 4096
LOST_BYTES_MAX = 8 << 20
"""Frames that clients did not take before their connections ended; beyond it the collector runs. Cancelled tasks hold
them in cycles, and their size alone does not start it."""
COLLECT_AFTER_S = 1.0
"""Until then the tasks of the connections are over, too."""
BULKY_BYTES = 64 << 10
"""Answers from this size on are made one after the other, as far as the soft limit goes."""


class ClientMemory:
    """Memory of one connection: its requests and its unread answers."""

    def __init__(self, shared: SharedMemory, user: str, cut: Callable[[], None]) -> None:
        self.user = user
        self.cut = cut
        self.unread_bytes = 0
        self._is_cut = False
        self._shared = shared
        self._received_bytes = 0
        self._expected_bytes = 0  # bulky answers that are being made
        self._changed = anyio.Event()

    async def receive(self, count: int) -> None:
        """Wait until a request of this size fits; `finish` gives its bytes back."""
        while self._received_bytes > RECEIVED_BYTES_MAX:
            await self._changed.wait()
        await self._shared.received.reserve(self.user, count)
        self._received_bytes += count

    def finish(self, count: int) -> None:
        """Give back the bytes of a request."""
        self._received_bytes -= count
        self._shared.received.release(self.user, count)
        self._notify()

    async def begin_answer(self, verb: str) -> int:
        """Wait until the client has read most of its answers; returns bytes for `end_answer`.

        An answer's size is known when it is made; expected is that of the last one to this verb.
        """
        while not self._may_begin(size := self._shared.answer_bytes.get(verb, 0)):
            await self._changed.wait()
        expected = size if size >= BULKY_BYTES else 0
        self._expected_bytes += expected
        return expected

    def _may_begin(self, size: int) -> bool:
        if self.unread_bytes > UNREAD_BYTES_MAX:
            return False
        return size < BULKY_BYTES or not self._expected_bytes or self._expected_bytes + size <= UNREAD_BYTES_MAX

    def end_answer(self, expected: int) -> None:
        """End what `begin_answer` began."""
        self._expected_bytes -= expected
        self._notify()

    def add_unread(self, count: int) -> None:
        """Count a frame that is about to be sent; may cut this connection, or another one of the user."""
        if not self._is_cut:
            self.unread_bytes += count
            self._shared.add(self, count)

    def lose(self, count: int) -> None:
        """Count a frame that the client did not take."""
        self._shared.lost_bytes += count
        self.read(count)

    def read(self, count: int) -> None:
        """Count a frame that the client took."""
        if not self._is_cut:
            self.unread_bytes -= count
            self._shared.subtract(self, count)
            self._notify()

    def release_received(self) -> None:
        """Give back the bytes of requests that were never finished: cut short, or cancelled before they began."""
        self._shared.received.release(self.user, self._received_bytes)
        self._received_bytes = 0

    def end(self) -> None:
        """Count no unread bytes any more: the connection is closed, or about to be."""
        if not self._is_cut:
            self._is_cut = True
            self._shared.subtract(self, self.unread_bytes)
            self.unread_bytes = 0

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class SharedMemory:
    """Memory of all connections.

    Attributes:
        received: budget of requests.
        answer_bytes: size of the last answer, by verb.
        lost_bytes: frames that their clients did not take, since the collector ran for them.
    """

    def __init__(self) -> None:
        self.received = ByteBudget(USER_RECEIVED_BYTES_MAX, ALL_RECEIVED_BYTES_MAX)
        self.answer_bytes: dict[str, int] = {}
        self._clients: dict[ClientMemory, None] = {}
        self._connections: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self.lost_bytes = 0

    def open(self, user: str, cut: Callable[[], None]) -> ClientMemory | None:
        """Memory of a new connection; None: the user has too many."""
        if self._connections[user] >= CONNECTIONS_PER_USER:
            return None
        client = ClientMemory(self, user, cut)
        self._clients[client] = None
        self._connections[user] += 1
        return client

    def close(self, client: ClientMemory) -> None:
        """Forget a connection that is over."""
        if self.lost_bytes > LOST_BYTES_MAX:
            self.lost_bytes = 0
            asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)
        client.end()
        client.release_received()
        del self._clients[client]
        self._connections[client.user] -= 1

    def add(self, client: ClientMemory, count: int) -> None:
        """Count unread bytes; cut the connection with the most of them where that is too much."""
        self._unread[client.user] += count
        if self._unread[client.user] > USER_UNREAD_BYTES_MAX:
            self._cut([known for known in self._clients if known.user == client.user])
        elif self._unread.total() > ALL_UNREAD_BYTES_MAX:
            self._cut(list(self._clients))

    def subtract(self, client: ClientMemory, count: int) -> None:
        """Count bytes that were read, or are lost with their connection."""
        self._unread[client.user] -= count

    @staticmethod
    def _cut(clients: list[ClientMemory]) -> None:
        most = max(clients, key=lambda known: known.unread_bytes)
        most.end()
        most.cut()
