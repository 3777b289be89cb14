"""Sources of the terminal UI: a daemon or a recording; and the context that all screens share."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clusterd.errors import ClusterError, DaemonAbsent
from clusterd.tui.model.columns import CellContext
from clusterd.tui.model.model import Item, Model
from clusterd.tui.model.state_styles import Look
from clusterd.tui.model.view import Link, LinkState
from clusterd.tui.source.wire import Wire

if TYPE_CHECKING:
    from clusterd.submission.job_file import Request
    from clusterd.tui.source.playback import Player


SILENCE_S = 15.0
"""The daemon sends a heartbeat every 5 s (`clusterd.daemon.api.jobs.ALIVE_EVERY_S`)."""

LAST_LOOK_S = 1.0

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Delays between attempts to reconnect; the last one repeats."""


class Source(Protocol):
    """A daemon or a recording, as the application sees it."""

    can_act: bool
    """Commands that change the cluster are possible."""

    player: Player | None
    """Player of a recording."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a ``clusterd`` subprocess reaches the same daemon."""

    def items(self) -> AsyncIterator[Item | Link]:
        """Baselines, changes and states of the connection, as they arrive; never ends."""

    def reject(self, why: str) -> None:
        """Report that the last item was invalid; the source resynchronises."""

    async def call(self, verb: str, **args: Any) -> Any:
        """Call a verb of the daemon.

        Raises:
            ClusterError: the daemon refused.
        """

    def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """Stream a verb of the daemon.

        Raises:
            ClusterError: the daemon refused.
        """

    async def submit(self, request: Request) -> dict[str, Any]:
        """Submit a job with its working directory.

        Raises:
            ClusterError: the submission was refused.
        """

    async def close(self) -> None:
        """Detach; the daemon and its jobs are not affected."""


class DaemonSource:
    """A daemon's socket, with automatic reconnection."""

    can_act = True
    player: Player | None = None

    def __init__(self, path: Path, preconnected: socket.socket | None = None) -> None:
        """`preconnected`: connection opened by `tui.source.preconnect.preconnect`."""
        self._path = path
        self._preconnected = preconnected
        self._calls: Wire | None = None
        self._dialling = asyncio.Lock()
        self._rejected = ""

    @property
    def environment(self) -> Mapping[str, str]:
        from clusterd.config import python_path  # rarely needed: only for a shell

        return {"CLUSTERD_SOCKET": str(self._path.absolute()), "PYTHONPATH": python_path()}

    async def items(self) -> AsyncIterator[Item | Link]:
        """Items of `watch`: missed changes follow after a gap, a new baseline after a restart of the daemon."""
        after: int | None = None
        served_by: Any = None
        failures = 0
        lost_s = time.time()
        while True:
            watching: Wire | None = None
            try:
                preconnected, self._preconnected = self._preconnected, None
                if preconnected is not None:
                    watching = await Wire.adopt(self._path, preconnected)
                    stream = watching.watch_preconnected()
                else:
                    watching = await Wire.open(self._path)
                    status = await self.call("status")
                    if status.get("started_s") != served_by:  # another daemon process: its change numbers are unrelated
                        after, served_by = None, status.get("started_s")
                    stream = watching.stream("watch", after=after)
                greeting = watching.greeting
                yield Link(
                    LinkState.LIVE,
                    since_s=time.time(),
                    user=str(greeting.get("user", "")),
                    is_operator=bool(greeting.get("is_operator")),
                    version=str(greeting.get("version", "")),
                )
                while True:
                    item = await _next(stream)
                    if isinstance(item, dict) and "snapshot" in item and served_by is None:
                        served_by = _start_time(item["snapshot"])
                    yield item
                    if self._rejected:
                        raise ClusterError(f"the daemon at {self._path} sent an invalid item: {self._rejected}")
                    if isinstance(item, dict) and isinstance(item.get("number"), int):
                        after = item["number"]
                    failures, lost_s = 0, time.time()
            except (StopAsyncIteration, TimeoutError):
                why, state = f"the daemon at {self._path} stopped answering", LinkState.LOST
            except DaemonAbsent as error:
                why, state = str(error), LinkState.LOST
            except ClusterError as error:
                why, state = str(error), LinkState.REFUSED
                after, self._rejected = None, ""
            finally:
                if watching is not None:
                    watching.close()
                self._hang_up()
            yield Link(state, why=why, since_s=lost_s)
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    def reject(self, why: str) -> None:
        self._rejected = why

    async def call(self, verb: str, **args: Any) -> Any:
        async with self._dialling:
            if self._calls is None:
                self._calls = await Wire.open(self._path)
        try:
            return await self._calls.call(verb, **args)
        except DaemonAbsent:
            self._hang_up()
            raise

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """As `Source.stream`; closing the iterator closes its connection."""
        wire = await Wire.open(self._path)
        try:
            async for item in wire.stream(verb, **args):
                yield item
        finally:
            wire.close()

    async def submit(self, request: Request) -> dict[str, Any]:
        """As `Source.submit`; packing reads many files and runs in a thread."""

        # Imported on use: most sessions never submit.
        from clusterd.client import Client
        from clusterd.submission.submit import send

        def work() -> dict[str, Any]:
            with Client(self._path) as cluster:
                return send(cluster, request)

        return await asyncio.to_thread(work)

    def _hang_up(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    async def close(self) -> None:
        self._hang_up()


async def _next(stream: AsyncGenerator[Any, None]) -> Any:
    """The next item.

    Raises:
        TimeoutError: nothing arrived for too long.
        StopAsyncIteration: the stream ended.
    """
    asking = asyncio.ensure_future(anext(stream))
    try:
        done, _ = await asyncio.wait({asking}, timeout=SILENCE_S)
        if not done:
            # While a pager or shell had the terminal, this process read nothing: the item may be in the socket by now.
            done, _ = await asyncio.wait({asking}, timeout=LAST_LOOK_S)
        if not done:
            raise TimeoutError
        return asking.result()
    finally:
        asking.cancel()


def _start_time(snapshot: Any) -> Any:
    """Start time of a baseline's daemon; identifies the daemon process."""
    status = snapshot.get("status") if isinstance(snapshot, dict) else None
    return status.get("started_s") if isinstance(status, dict) else None


@dataclass(slots=True)
class Context:
    """Shared state of the screens; seeking back in a recording replaces `model` as a whole."""

    source: Source
    look: Look
    clock: Callable[[], float]  # displayed time: now, or the instant of the recording
    readonly: bool = False
    model: Model = field(default_factory=Model)
    job: str | None = None  # shown by the job screen

    @property
    def cell_context(self) -> CellContext:
        """Inputs of table cells besides their rows."""
        return CellContext(self.clock(), self.look, self.model.jobs)

    @property
    def can_act(self) -> bool:
        """Commands that change the cluster are allowed."""
        return self.source.can_act and not self.readonly
