"""Reports of hosts: typed subscriptions, and those that somebody waits for, by key."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio

from clusterd.protocol import ProtocolError
from clusterd.protocol.agent import HelloReply, from_rank
from clusterd.types import HostId

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class HostUp:
    """An agent of the host answered."""

    hello: HelloReply
    account: str = ""  # whose agent; "": the daemon's own


@dataclass(frozen=True, slots=True)
class HostDown:
    """The link to an agent of the host broke."""

    why: str
    account: str = ""


class Reports:
    """Distributes reports by type: those of `clusterd.protocol.agent`, and the link's own `HostUp` and `HostDown`."""

    def __init__(self) -> None:
        self._subscribers: dict[type, list[Callable[[HostId, Any], Awaitable[None] | None]]] = defaultdict(list)

    def subscribe(self, kind: type[R], handler: Callable[[HostId, R], Awaitable[None] | None]) -> None:
        """Call `handler` with the host and each report of this type.

        The next report of that host waits for a coroutine; a handler that takes long starts a task.
        """
        self._subscribers[kind].append(handler)

    async def publish(self, host: HostId, report: object) -> None:
        """Call the subscribers of a report, in the order of their subscription."""
        for handler in self._subscribers[type(report)]:
            if inspect.isawaitable(result := handler(host, report)):
                await result

    async def publish_orphaned(self, host: HostId, hello: HelloReply, is_own: Callable[[str], bool]) -> None:
        """Publish again what ranks said that lost their peers: the daemon that heard it may have ended since.

        Args:
            is_own: whether a job is one of this agent's.
        """
        for sent in hello.orphaned:
            with suppress(ProtocolError):  # ranks run code of users
                if is_own(sent.job):
                    await self.publish(host, from_rank(sent))


K = TypeVar("K", bound=Hashable)


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
