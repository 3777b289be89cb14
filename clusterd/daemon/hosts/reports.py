"""Reports of hosts: typed subscriptions, those that somebody waits for, and progress as events, throttled."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc
import msgspec

from clusterd.core import events as e
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.protocol import ProtocolError, agent
from clusterd.protocol.agent import HelloReply, from_rank
from clusterd.protocol.requests import Chunk, ReadSteps
from clusterd.types import HostId, JobId

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


class PendingReplies(Generic[K, R]):
    """Awaited reports of one kind; None: a report will not come."""

    def __init__(self) -> None:
        self._pending: dict[K, asyncio.Future[R | None]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._pending

    @contextmanager
    def expect(self, key: K) -> Iterator[asyncio.Future[R | None]]:
        """Wait for the report of this key within the block."""
        self._pending[key] = reply = asyncio.get_running_loop().create_future()
        try:
            yield reply
        finally:
            if self._pending.get(key) is reply:
                del self._pending[key]

    def resolve(self, key: K, reply: R | None) -> None:
        """Deliver a report to whoever waits for it, if anybody does."""
        if (pending := self._pending.get(key)) is not None and not pending.done():
            pending.set_result(reply)

    def fail(self, matches: Callable[[K], bool]) -> None:
        """Give up all reports whose key matches: they will not come."""
        for key in filter(matches, list(self._pending)):
            self.resolve(key, None)


log = logging.getLogger(__name__)

EVERY_S, EVERY_MOST_S = 2.0, 10.0
"""Least and greatest interval between two progress events of one attempt; every step is recorded on its host."""

SHARE = 1 / 360
"""Interval as a share of the attempt's age: after an hour of training two seconds are no news."""

FIRST_STEP_BYTES = 2048
"""Enough for one line of steps.jsonl."""

ReadRequest = Callable[[HostId, ReadSteps], Awaitable[Chunk]]

ENDED_MAX = 1000
"""Attempts that are over and of which the time of the last report is known."""


class Progress:
    """Progress of all attempts.

    Args:
        request: sends a request to the agent of a host.
    """

    def __init__(self, engine: Engine, tasks: anyio.abc.TaskGroup, request: ReadRequest) -> None:
        self._engine = engine
        self._state = engine.state
        self._tasks = tasks
        self._request = request
        self._posted_at: dict[tuple[str, int], float] = {}
        self._held_back: dict[tuple[str, int], agent.Progress] = {}

    async def on_progress(self, host: HostId, report: agent.Progress) -> None:
        """Post the newest step of an attempt now, or when its interval is over; not one that is known already."""
        key = (report.job, report.attempt)
        attempt = self._state.attempt(JobId(report.job), report.attempt)
        if attempt is not None and attempt.step == report.step > 0:
            return  # an agent that restarts reports its last step again
        first = _FirstStep() if key in self._posted_at else await self._first_step(host, *key)
        now_s = time.monotonic()
        wait_s = self._posted_at.get(key, float("-inf")) + self._every_s(*key) - now_s
        if wait_s > 0 and not report.last:
            # Posted later all the same: a job whose next step takes an hour must not look a step behind.
            if key not in self._held_back:
                self._tasks.start_soon(self._post_later, host, key, wait_s)
            self._held_back[key] = report
            return
        self._posted_at[key] = now_s
        self._held_back.pop(key, None)
        self._forget_ended()
        await self._engine.report(
            e.AttemptProgressed(
                at_s=time.time(),
                job=JobId(report.job),
                attempt=report.attempt,
                step=report.step,
                loss=report.loss,
                is_nan=report.is_nan,
                step_time_s=report.step_time_s,
                first_loss=first.loss,
                start=tuple(first.start.items()),
                input_share=_input_share(report.phases),
            )
        )

    def _forget_ended(self) -> None:
        """Drop the times of attempts that are over, once they are most of what is known."""
        state = self._state
        if len(self._posted_at) > 2 * len(state.active) + ENDED_MAX:
            there = (key for key in self._posted_at if state.attempt(JobId(key[0]), key[1]) is not None)
            self._posted_at = {key: self._posted_at[key] for key in there}

    def _every_s(self, job: str, number: int) -> float:
        attempt = self._state.attempt(JobId(job), number)
        age_s = time.time() - attempt.started_s if attempt is not None else 0.0
        return min(max(age_s * SHARE, EVERY_S), EVERY_MOST_S)

    async def _post_later(self, host: HostId, key: tuple[str, int], wait_s: float) -> None:
        await anyio.sleep(wait_s)
        report = self._held_back.pop(key, None)
        if report is not None:
            self._posted_at[key] = float("-inf")
            await self.on_progress(host, report)

    async def _first_step(self, host: HostId, job: str, attempt: int) -> _FirstStep:
        """Loss of step 1 and phases of the start, read from the host: progress reports carry the newest step alone."""
        try:
            answer = await self._request(host, ReadSteps(job=job, attempt=attempt, offset=0, limit=FIRST_STEP_BYTES))
            return msgspec.json.decode(answer.data.partition(b"\n")[0], type=_FirstStep)
        except (ClusterError, msgspec.MsgspecError) as error:
            log.info("the first step of %s is not known: %s", job, error)
            return _FirstStep()


def _input_share(phases: dict[str, float]) -> float | None:
    """Share of a timed step that passed in waiting for its input; None: none was timed."""
    whole_s = sum(phases.values())
    return round(phases.get("input", 0.0) / whole_s, 3) if whole_s > 0.0 else None


class _FirstStep(msgspec.Struct):
    """Fields of a step's row; a loss that is not finite is absent."""

    loss: float | None = None
    start: dict[str, float] = {}
