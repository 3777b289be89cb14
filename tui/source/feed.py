"""What a source tells goes into the model; the screens look at it at most ten times a second."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from textual.notifications import SeverityLevel

from clusterd.errors import ClusterError
from tui.model import rows
from tui.model.model import Touched
from tui.model.view import Link, LinkState
from tui.source.context import Context

REFRESH_S = 0.1
"""Between two refreshes at least, however fast changes come."""

FIRST_PICTURE_S = 0.25
"""So long nothing is drawn, so that the first picture is a full one; a daemon that is slower is waited for in sight."""


class FeedObserver(Protocol):
    """The application as the feed sees it; `tui.app.Top` implements it."""

    @property
    def shared(self) -> Context:
        """Context with the source and the model."""

    @property
    def log(self) -> Callable[..., None]:
        """Textual's development log."""

    def show_touched(self, touched: Touched) -> None:
        """Redraw what changed since the last refresh."""

    def show_frame(self) -> None:
        """Redraw header, banner and footer."""

    def notify(self, message: str, *, severity: SeverityLevel = "information") -> None:
        """Show a short notice in the corner."""

    def run_worker(self, work: Awaitable[None], *, group: str, exclusive: bool, exit_on_error: bool) -> object:
        """Run a coroutine in the background."""


class Feed:
    """Between the source and the model.

    Args:
        history_after_s: when to ask what was before; None: at once, and long-lived memory is left as it is.
    """

    def __init__(self, app: FeedObserver, link: Link, history_after_s: float | None) -> None:
        self._app = app
        self.link = link
        self._history_after_s = history_after_s
        self._items: AsyncIterator[Any] | None = None
        self._dialling: asyncio.Task[list[Any]] | None = None
        self._touched = Touched()
        self._refresh_due: asyncio.TimerHandle | None = None
        self._refreshed_s = 0.0

    def dial(self) -> None:
        """Attach; what comes first is kept until it is taken."""
        self._items = self._app.shared.source.items()
        self._dialling = asyncio.create_task(self._first(self._items), name="dial")

    async def _first(self, items: AsyncIterator[Any]) -> list[Any]:
        """The first items: up to a snapshot, or to what is in its way."""
        first = []
        async for item in items:
            first.append(item)
            if not isinstance(item, Link) or item.state is not LinkState.LIVE:
                break
        return first

    async def wait_for_first(self) -> None:
        """For the first items, as long as nothing is drawn."""
        assert self._dialling is not None
        await asyncio.wait({self._dialling}, timeout=FIRST_PICTURE_S)

    def take_first(self) -> None:
        """What was told while the screen was being made, if it has come."""
        if self._dialling is None or not self._dialling.done():
            return
        first, self._dialling = self._dialling.result(), None
        for item in first:
            self._take(item)
        if self._refresh_due is not None:
            self._refresh_due.cancel()
            self._refresh()

    async def pump(self) -> None:
        """Everything else, until the source ends."""
        if self._dialling is not None:
            await self._dialling
            self.take_first()
        assert self._items is not None
        async for item in self._items:
            self._take(item)

    def stop(self) -> None:
        """Wait for nothing any more."""
        if self._dialling is not None:
            self._dialling.cancel()

    @property
    def is_shown(self) -> bool:
        """Whether the screens have seen everything that was told."""
        return self._refresh_due is None

    def note(self, touched: Touched) -> None:
        """These are shown soon."""
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
            self._app.run_worker(self._ask_history(), group="history", exclusive=True, exit_on_error=False)
        self.note(touched)

    def _linked(self, link: Link) -> None:
        was, self.link = self.link, link
        if link.state is LinkState.LIVE and was.state in (LinkState.LOST, LinkState.REFUSED):
            self._app.notify("attached to the daemon again")
        self._app.show_frame()

    async def _ask_history(self) -> None:
        """What was decided and what happened before we attached; the first picture goes first."""
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
    """Thousands of rows live long: taking them out of the collector's rounds saves a pause of each full one."""
    gc.collect()
    gc.freeze()
