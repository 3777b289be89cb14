"""An event loop whose time is virtual: it jumps to the next timer when nothing is ready, and waits for nothing."""

from __future__ import annotations

import asyncio
import itertools
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
from anyio._backends._asyncio import AsyncIOBackend, CancelScope

BEGIN_S = 1.7e9
"""Wall clock at the start of every simulation."""


RESOLUTION_S = 1e-6


class Stuck(Exception):
    """Nothing is ready and no timer is set: what still waits would wait for ever."""


class Clock:
    """Virtual time: `monotonic_s` passes evenly, the wall clock may be set."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self._ahead_s = BEGIN_S - self.monotonic_s

    def wall_s(self) -> float:
        """The wall clock."""
        return self.monotonic_s + self._ahead_s

    def set_wall(self, by_s: float) -> None:
        """Set the wall clock by so many seconds."""
        self._ahead_s += by_s

    def advance(self, by_s: float) -> None:
        """Let time pass: at least as much as the wall clock shows, or a wait until its next instant would not end."""
        self.monotonic_s += max(by_s, RESOLUTION_S)


class _Selector(selectors.BaseSelector):
    """Selector without files: a wait for a timer is a jump of the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._keys.setdefault(fd, selectors.SelectorKey(fileobj, fd, events, data))

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Any:
        return self._keys

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class _Task(asyncio.Task[Any]):
    """Task whose hash is its number: sets of tasks, as anyio has them, are iterated in the same order in every run."""

    _numbers = itertools.count(1)

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop of one simulation; work for threads is done at once, in the thread of the loop."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self._virtual = clock
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, loop=loop, **options))

    def time(self) -> float:
        return self._virtual.monotonic_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """No other thread has to wake this loop."""


class InlineExecutor:
    """Stands in for a thread pool: work is done when it is submitted."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do the work now."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_args: Any, **_options: Any) -> None:
        """There is nothing to end."""


async def _run_inline(func: Callable[..., Any], args: tuple[Any, ...], *_rest: Any, **_options: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    return func(*args)


@contextmanager
def virtual_time() -> Iterator[tuple[VirtualLoop, Clock]]:
    """Run a simulation inside: its loop and clock; the functions of `time` show the virtual clock meanwhile."""
    clock = Clock()
    _Task._numbers = itertools.count(1)
    count = itertools.count(1)
    scopes: dict[int, int] = {}  # number by id: for sets of scopes as `_Task` is for sets of tasks
    made = CancelScope.__init__

    def numbered(scope: Any, *args: Any, **options: Any) -> None:
        scopes[id(scope)] = next(count)
        made(scope, *args, **options)

    loop = VirtualLoop(clock)
    with ExitStack() as stack:
        stack.callback(loop.close)
        for target, name, double in (
            (time, "time", clock.wall_s),
            (time, "monotonic", lambda: clock.monotonic_s),
            (time, "perf_counter", lambda: clock.monotonic_s),
            (time, "clock_gettime", lambda _which: clock.monotonic_s),
            (AsyncIOBackend, "run_sync_in_worker_thread", _run_inline),
            (CancelScope, "__init__", numbered),
            (CancelScope, "__hash__", lambda scope: scopes[id(scope)]),
        ):
            stack.enter_context(mock.patch.object(target, name, double))
        asyncio.set_event_loop(loop)
        stack.callback(asyncio.set_event_loop, None)
        yield loop, clock
