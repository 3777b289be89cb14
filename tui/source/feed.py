"""Feed from the source into the model; screens are refreshed at most ten times a second."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from clusterd.tui.model import rows
from clusterd.tui.model.model import Touched
from clusterd.tui.model.view import Link, LinkState

if TYPE_CHECKING:
    from clusterd.tui.app import Top

REFRESH_S = 0.1
"""Minimum time between two refreshes."""

FIRST_PICTURE_S = 0.25
"""Nothing is drawn for up to this long, so that the first frame shows data unless the daemon is slow."""


class Feed:
    """Applies items of the source to the model and schedules refreshes.

    Args:
        app: the application.
        link: initial state of the connection.
        history_after_s: delay before past events are requested; None: no delay, and no freeze of the garbage collector.
    """

    def __init__(self, app: Top, link: Link, history_after_s: float | None) -> None:
        self._app = app
        self.link = link
        self._history_after_s = history_after_s
        self._items: AsyncIterator[Any] | None = None
        self._dialling: asyncio.Task[list[Any]] | None = None
        self._touched = Touched()
        self._refresh_due: asyncio.TimerHandle | None = None
        self._refreshed_s = 0.0

    def dial(self) -> None:
        """Connect; the first items are buffered until `take_first`."""
        self._items = self._app.shared.source.items()
        self._dialling = asyncio.create_task(self._first(self._items), name="dial")

    async def _first(self, items: AsyncIterator[Any]) -> list[Any]:
        """The first items: up to a baseline, or to an error of the connection."""
        first = []
        async for item in items:
            first.append(item)
            if not isinstance(item, Link) or item.state is not LinkState.LIVE:
                break
        return first

    async def wait_for_first(self) -> None:
        """Wait for the first items, as long as nothing is drawn."""
        assert self._dialling is not None
        await asyncio.wait({self._dialling}, timeout=FIRST_PICTURE_S)

    def take_first(self) -> None:
        """Apply the buffered items, if they have arrived."""
        if self._dialling is None or not self._dialling.done():
            return
        first, self._dialling = self._dialling.result(), None
        for item in first:
            self._take(item)
        if self._refresh_due is not None:
            self._refresh_due.cancel()
            self._refresh()

    async def pump(self) -> None:
        """Apply all further items, until the source ends."""
        if self._dialling is not None:
            await self._dialling
            self.take_first()
        assert self._items is not None
        async for item in self._items:
            self._take(item)

    def stop(self) -> None:
        """Cancel a pending connection attempt."""
        if self._dialling is not None:
            self._dialling.cancel()

    @property
    def is_shown(self) -> bool:
        """All received changes have been drawn."""
        return self._refresh_due is None

    def note(self, touched: Touched) -> None:
        """Schedule a refresh of these rows."""
        self._touched.add(touched)
        if self._refresh_due is None and self._touched:
            wait_s = max(self._refreshed_s + REFRESH_S - time.monotonic(), 0.0)
            self._refresh_due = asyncio.get_running_loop().call_later(wait_s, self._refresh)

    def _refresh(self) -> None:
        self._refresh_due = None
        self._refreshed_s = time.monotonic()
        touched, self._touched = self._touched, Touched()
        self._app.show_touched(touched)

    def _take(self, item: Any) -> None:
        if isinstance(item, Link):
            self._linked(item)
            return
        shared = self._app.shared
        try:
            touched = shared.model.apply(item)
        except (rows.Malformed, TypeError) as error:
            shared.source.reject(str(error))
            return
        if touched.everything:
            self._app.run_worker(self._request_history(), group="history", exclusive=True, exit_on_error=False)
        self.note(touched)

    def _linked(self, link: Link) -> None:
        was, self.link = self.link, link
        if link.state is LinkState.LIVE and was.state in (LinkState.LOST, LinkState.REFUSED):
            self._app.notify("reconnected to the daemon")
        self._app.show_frame()

    async def _request_history(self) -> None:
        """Request events and decisions from before we attached; after the first frame."""
        if self._history_after_s is not None:
            await asyncio.sleep(self._history_after_s)
            _settle_memory()
        shared = self._app.shared
        try:
            answer = await shared.source.call("history")
            self.note(shared.model.add_history(answer["events"], answer["decisions"]))
        except ClusterError as refused:
            self._app.log(f"no history: {refused}")
        except (rows.Malformed, KeyError, TypeError) as error:
            self._app.notify(f"the daemon's history cannot be read: {error}", severity="warning")


def _settle_memory() -> None:
    """Freeze long-lived rows, which saves a pause in each full collection."""
    gc.collect()
    gc.freeze()
