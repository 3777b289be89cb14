"""Where the screens' truth comes from: a daemon, or a recording. Both give the items that `watch` gives."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clusterd.errors import ClusterError, DaemonAbsent
from tui.model.model import Item
from tui.model.view import Link, LinkState
from tui.source.wire import Wire

if TYPE_CHECKING:
    from clusterd.submission.job_file import Request
    from tui.source.playback import Player

SILENCE_S = 15.0
"""The daemon says at least every 5 s that it lives (`clusterd.daemon.api.jobs.ALIVE_EVERY_S`)."""

LAST_LOOK_S = 1.0

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Between attempts to reach a daemon that went away; the last one for ever."""


class Source(Protocol):
    """What the application is attached to."""

    can_act: bool
    """Verbs mean something here."""

    player: Player | None
    """What drives it, of a recording."""

    @property
    def environment(self) -> Mapping[str, str]:
        """In which a command of ours reaches the same daemon."""

    def items(self) -> AsyncIterator[Item | Link]:
        """Snapshots and changes as they come, and what became of the connection; never ends."""

    def reject(self, why: str) -> None:
        """The last item made no sense: begin again."""

    async def call(self, verb: str, **args: Any) -> Any:
        """A verb of the daemon.

        Raises:
            ClusterError: it refused.
        """

    def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """A stream of the daemon.

        Raises:
            ClusterError: it refused.
        """

    async def submit(self, request: Request) -> dict[str, Any]:
        """Hand over a job with its working directory.

        Raises:
            ClusterError: it was refused.
        """

    async def close(self) -> None:
        """Let go of it; nothing is stopped by that."""


class DaemonSource:
    """A daemon's socket; found again by itself when the daemon was away."""

    can_act = True
    player: Player | None = None

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, preconnected: socket.socket | None = None
    ) -> None:
        """`preconnected`: a connection that was made ahead, by `tui.source.preconnect.preconnect`."""
        self._path = path
        self._preconnected = preconnected
        self._clock = clock
        self._calls: Wire | None = None
        self._dialling = asyncio.Lock()
        self._rejected = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """As `Source.environment`."""
        from clusterd.config import python_path  # most who look never open a shell

        return {"CLUSTERD_SOCKET": str(self._path.absolute()), "PYTHONPATH": python_path()}

    async def items(self) -> AsyncIterator[Item | Link]:
        """As `Source.items`: after a gap, what was missed follows; after a restart, a new snapshot."""
        after: int | None = None
        served_by: Any = None
        failures = 0
        lost_s = self._clock()
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
                    if status.get("started_s") != served_by:  # another daemon: its numbers may not go on from ours
                        after, served_by = None, status.get("started_s")
                    stream = watching.stream("watch", after=after)
                greeting = watching.greeting
                yield Link(
                    LinkState.LIVE,
                    since_s=self._clock(),
                    user=str(greeting.get("user", "")),
                    is_operator=bool(greeting.get("is_operator")),
                    version=str(greeting.get("version", "")),
                )
                while True:
                    item = await _next(stream)
                    if isinstance(item, dict) and "snapshot" in item and served_by is None:
                        served_by = _started(item["snapshot"])
                    yield item
                    if self._rejected:
                        raise ClusterError(f"the daemon at {self._path} sent what cannot be read: {self._rejected}")
                    if isinstance(item, dict) and isinstance(item.get("number"), int):
                        after = item["number"]
                    failures, lost_s = 0, self._clock()
            except (StopAsyncIteration, TimeoutError):
                why, state = f"the daemon at {self._path} does not answer any more", LinkState.LOST
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
        """As `Source.reject`."""
        self._rejected = why

    async def call(self, verb: str, **args: Any) -> Any:
        """As `Source.call`."""
        async with self._dialling:
            if self._calls is None:
                self._calls = await Wire.open(self._path)
        try:
            return await self._calls.call(verb, **args)
        except DaemonAbsent:
            self._hang_up()
            raise

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """As `Source.stream`, over a connection of its own, which closing the iterator closes."""
        wire = await Wire.open(self._path)
        try:
            async for item in wire.stream(verb, **args):
                yield item
        finally:
            wire.close()

    async def submit(self, request: Request) -> dict[str, Any]:
        """As `Source.submit`: packing reads many files, so a thread does it."""

        # Most who look never submit: packing directories is not imported before it is needed.
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
        """As `Source.close`."""
        self._hang_up()


async def _next(stream: AsyncGenerator[Any, None]) -> Any:
    """The next item.

    Raises:
        TimeoutError: nothing came for too long.
        StopAsyncIteration: there is none.
    """
    asking = asyncio.ensure_future(anext(stream))
    try:
        done, _ = await asyncio.wait({asking}, timeout=SILENCE_S)
        if not done:
            # Where the terminal was a pager's or a shell's, we have heard nothing ourselves: it is here by now.
            done, _ = await asyncio.wait({asking}, timeout=LAST_LOOK_S)
        if not done:
            raise TimeoutError
        return asking.result()
    finally:
        asking.cancel()


def _started(snapshot: Any) -> Any:
    """When the daemon of a snapshot was started: what tells it from the next one."""
    status = snapshot.get("status") if isinstance(snapshot, dict) else None
    return status.get("started_s") if isinstance(status, dict) else None
