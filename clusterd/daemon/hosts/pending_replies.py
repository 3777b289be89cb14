"""Reports of agents that somebody waits for, by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import anyio

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


class PendingReply(Generic[R]):
    """One awaited report."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._event = anyio.Event()
        self._reply: R | None = None
        self.close = close
        """Stop waiting; to be called in any case."""

    def resolve(self, reply: R | None) -> None:
        """Deliver the report; None: it will not come."""
        self._reply = reply
        self._event.set()

    async def wait(self) -> R | None:
        """Wait for the report."""
        await self._event.wait()
        return self._reply


class PendingReplies(Generic[K, R]):
    """Awaited reports of one kind."""

    def __init__(self) -> None:
        self._pending: dict[K, PendingReply[R]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._pending

    def expect(self, key: K) -> PendingReply[R]:
        """Begin to wait for the report of this key."""

        def close() -> None:
            if self._pending.get(key) is reply:
                del self._pending[key]

        reply: PendingReply[R] = PendingReply(close)
        self._pending[key] = reply
        return reply

    def resolve(self, key: K, reply: R | None) -> None:
        """Deliver a report to whoever waits for it, if anybody does."""
        if (pending := self._pending.get(key)) is not None:
            pending.resolve(reply)

    def fail(self, matches: Callable[[K], bool]) -> None:
        """Give up all reports whose key matches: they will not come."""
        for key, pending in list(self._pending.items()):
            if matches(key):
                pending.resolve(None)
