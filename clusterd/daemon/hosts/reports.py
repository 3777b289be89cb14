"""Typed subscriptions to reports of hosts."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from clusterd.protocol.agent import HelloReply
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
