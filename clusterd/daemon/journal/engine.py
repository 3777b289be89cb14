"""Main loop of the daemon: events in, journal, scheduler, decisions out; and the timers that decisions set.

All events that wait at the start of an iteration form one batch: one commit, one scheduling pass. Batching makes
hundreds of submits per second durable, and schedules simultaneous arrivals together.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from clusterd.core.decisions import Decision
from clusterd.core.events import ClockSet, Event, EventId, TimerFired
from clusterd.core.scheduler import Batch, Scheduler
from clusterd.core.state import State
from clusterd.core.view import Proposal
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.journal import Journal, Statement, proposal_row
from clusterd.errors import ClusterError

log = logging.getLogger(__name__)

Argument = TypeVar("Argument")
Result = TypeVar("Result")

SNAPSHOT_EVERY = 2000
"""Least number of events between two journal snapshots."""

REPLAY_S, SNAPSHOT_SHARE = 5.0, 20.0
"""Longest time that the scheduler spends on events between two snapshots; the shortest is this multiple of what one
snapshot takes: a state of 100,000 jobs is too long to be written every 2,000 events."""

BATCH_MAX = 512

GATHER_S = 0.05
"""Longest time that a batch waits for events that are about to be posted, unless the scheduler took longer for the last
one: under load, as much time goes into gathering as into passes."""

IDLE_TURNS = 4
"""Turns of the event loop without a new event, after which none is about to be posted."""

THREAD_JOBS = 1000
"""Jobs from which on a scheduling pass takes tens of milliseconds, and runs on a thread."""

SET_S = 1.0
"""Smaller clock steps are ignored."""

REPORT_AGAIN_S = 1.0
"""Interval of attempts to write to the journal while the disk is full."""


@dataclass(slots=True)
class _Posted:
    event: Event
    extra: tuple[Statement, ...]
    done: anyio.Event
    has_happened: bool = False  # a fact, which cannot be refused
    error: ClusterError | None = None


class _Clock:
    """Comparison of the wall clock with the monotonic clock."""

    def __init__(self) -> None:
        self._ahead_s = self._now_ahead_s()

    @staticmethod
    def _now_ahead_s() -> float:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # this clock also runs during sleep

    def set_by_s(self) -> float:
        """Seconds by which the wall clock was set since the last call; 0 if not more than `SET_S`."""
        ahead_s, before_s = self._now_ahead_s(), self._ahead_s
        self._ahead_s = ahead_s
        return ahead_s - before_s if abs(ahead_s - before_s) > SET_S else 0.0


class Engine:
    """Owner of journal and scheduler; everything else posts events to it."""

    def __init__(self, journal: Journal, scheduler: Scheduler) -> None:
        self.journal = journal
        self.scheduler = scheduler
        self._subscribers: list[Callable[[Sequence[Event], Sequence[Decision]], None]] = []
        # Bounded by who waits for them: the requests of clients at once, and each host's one report at a time.
        self._posted: list[_Posted] = []
        self._one_by_one = 0  # waiting events of a batch in which one raised
        self._wake = anyio.Event()
        self._last_id = 0
        self._newest = (0, "")  # what is only in the journal may still be retracted
        self._snapshot_at = 0
        self._compacted_at = 0
        self._clock = _Clock()
        self._handling_s = 0.0  # by the scheduler, of the last batch
        self._handled_s = 0.0  # the same, of all batches since the last journal snapshot
        self._encoding_s = 0.0  # of that snapshot
        self._pending_rows: list[Statement] = []  # proposals, written with the next commit
        self.scheduling_s = 0.0
        """Processor time spent in the scheduler since the start."""
        self.set_aside = journal.count_set_aside()
        """Events that the scheduler could not handle; they are stored beside the journal."""
        self.trouble = ""
        """Reason why events wait to be written; empty if none waits."""

    def subscribe(self, handler: Callable[[Sequence[Event], Sequence[Decision]], None]) -> None:
        """Call `handler` after each batch, in the order of subscription; it must not block."""
        self._subscribers.append(handler)

    @property
    def state(self) -> State:
        """State of the scheduler."""
        return self.scheduler.state

    def newest(self) -> tuple[int, str]:
        """Id and checksum of the newest event that the scheduler has handled."""
        return self._newest

    def restore(self) -> int:
        """Bring the scheduler to the end of the journal; returns the number of events replayed."""
        self.scheduler.state = State()
        snapshot = self.journal.newest_snapshot()
        after = 0
        if snapshot is not None:
            after, body = snapshot
            try:
                self.scheduler.state = codec.of_snapshot(body)
            except Exception as error:  # written by another version; the journal still has every event
                log.warning("journal snapshot at event %d has another format (%s): replaying all events", after, error)
                after = 0
        count = 0
        for batch in self.journal.replay_after(after):
            try:
                self.scheduler.replay(batch)
            except Exception:
                if batch.events[-1].id < self.journal.newest[0]:
                    raise
                # The daemon died between writing this batch and finding out that it cannot be handled.
                why = traceback.format_exc()
                self._report_bug(batch.events, why)
                self.journal.set_aside_at_start(batch.events[0].id, batch.events, why)
                return self.restore()
            count += len(batch.events)
            if batch.proposal is None:  # the daemon died before it stored the proposal: later replays must use this one
                self._keep_proposal(batch.events[0].id)
        self._last_id, checksum = self.journal.newest
        self._newest = (self._last_id, checksum.hex())
        self._snapshot_at = after
        return count

    async def post(self, event: Event, extra: Iterable[Statement] = ()) -> None:
        """Post an event and wait until it is durable and handled.

        Raises:
            ClusterError: the journal could not be written; the event did not happen.
        """
        await self._hand_over(_Posted(event, tuple(extra), anyio.Event()))

    async def report(self, event: Event, extra: Iterable[Statement] = ()) -> None:
        """Post a fact that cannot be refused: it waits, in order, until the journal can be written.

        A lost fact would never be repaired: a rank whose exit is not recorded holds its devices for ever.
        """
        await self._hand_over(_Posted(event, tuple(extra), anyio.Event(), has_happened=True))

    async def _hand_over(self, posted: _Posted) -> None:
        codec.encode(posted.event)  # an event that cannot be encoded must fail here, not with its whole batch
        self._posted.append(posted)
        self._wake.set()
        await posted.done.wait()
        if posted.error is not None:
            raise posted.error

    async def run(self) -> None:
        """Handle events until cancelled."""
        while True:
            with anyio.move_on_after(REPORT_AGAIN_S if self._posted else None):
                await self._wake.wait()
            self._wake = anyio.Event()
            self.mind_the_clock()
            is_written = True
            while self._posted and is_written:
                if not self._one_by_one:
                    await self._gather()
                most = 1 if self._one_by_one else BATCH_MAX
                self._one_by_one = max(self._one_by_one - 1, 0)
                batch, self._posted = self._posted[:most], self._posted[most:]
                is_written = await self._handle(batch)

    async def _gather(self) -> None:
        """Let requests and reports that have arrived post their events: a commit and a pass cost the same for many.

        Nothing is read during a pass, so without this the next batch would have only what arrives during its commit.
        """
        until_s, count, idle = time.monotonic() + max(GATHER_S, self._handling_s), len(self._posted), 0
        while count < BATCH_MAX and idle < IDLE_TURNS and time.monotonic() < until_s:
            await anyio.lowlevel.checkpoint()
            idle = idle + 1 if len(self._posted) == count else 0
            count = len(self._posted)

    def mind_the_clock(self) -> None:
        """Post a step of the wall clock before all waiting events; otherwise it would count as running time of jobs."""
        by_s = self._clock.set_by_s()
        if by_s:
            log.warning("the clock of this machine was set by %+.0f s", by_s)
            self._posted.insert(0, _Posted(ClockSet(at_s=time.time(), by_s=by_s), (), anyio.Event(), has_happened=True))
            self._wake.set()

    def _refuse_waiting(self, batch: list[_Posted], error: ClusterError) -> None:
        """Refuse the waiting requests; facts wait, ahead of later events."""
        waiting = [*batch, *self._posted]
        self._posted = [posted for posted in waiting if posted.has_happened]
        self.trouble = str(error) if self._posted else ""
        for posted in waiting:
            if not posted.has_happened:
                posted.error = error
                posted.done.set()

    async def _handle(self, batch: list[_Posted]) -> bool:
        """Append a batch to the journal and handle it; false if it cannot be written; then nothing is handled."""
        events = [replace(posted.event, id=EventId(self._last_id + 1 + i)) for i, posted in enumerate(batch)]
        try:
            extra = [statement for posted in batch for statement in posted.extra]
            await self.journal.append(events, [*extra, *self._pending_rows])
        except ClusterError as error:
            log.error("%s", error)
            self._refuse_waiting(batch, error)
            return False
        self.trouble = ""
        self._last_id = events[-1].id
        self._pending_rows.clear()
        begun_s = time.monotonic()
        try:
            decisions = await self._decide(events)
        except Exception:
            await self._set_aside(batch, events)
            return True
        self._handling_s = time.monotonic() - begun_s
        self._handled_s += self._handling_s
        self._keep_proposal(events[0].id)
        self._newest = (self._last_id, self.journal.newest[1].hex())
        for handler in self._subscribers:
            handler(events, decisions)
        for posted in batch:
            posted.done.set()
        if decisions and await self._keep(self.journal.record(events[-1].at_s, decisions, self._pending_rows)):
            self._pending_rows.clear()
        if self._is_snapshot_due():
            await self.snapshot()
        elif self._last_id - self._compacted_at >= SNAPSHOT_EVERY:
            await self._compact()
        return True

    async def _decide(self, events: Sequence[Event]) -> list[Decision]:
        """Let the scheduler handle a batch; a pass over many jobs runs on a thread, and requests are served meanwhile.

        Only the engine changes the state, and it waits, so that everybody reads the same state during the pass.
        """
        view = self._measured(self.scheduler.begin, Batch(events))
        proposal: Proposal | None = None
        if view is not None:
            propose = self.scheduler.policy.propose
            if len(view.queued) + len(view.running) < THREAD_JOBS:
                proposal = self._measured(propose, view)
            else:
                # Not cancelled in the middle: a state with the events and without the pass must not be stored.
                with anyio.CancelScope(shield=True):
                    proposal = await anyio.to_thread.run_sync(self._measured, propose, view)
        return self._measured(self.scheduler.finish, proposal)

    def _measured(self, function: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call a part of the scheduler, on whichever thread, and count its processor time."""
        begun_s = time.thread_time()
        try:
            return function(argument)
        finally:
            self.scheduling_s += time.thread_time() - begun_s

    async def _set_aside(self, batch: list[_Posted], events: Sequence[Event]) -> None:
        """Go on from the last good state without the event that raises in the scheduler; one event must not end all.

        Nobody was told that the batch is done; in the journal it would end every later daemon too, in its replay.

        Raises:
            ClusterError: the journal cannot be written, and the state is half changed: the next start mends both.
        """
        why, is_alone = traceback.format_exc(), len(batch) == 1
        await self.journal.execute(self._pending_rows)  # the replay below needs the newest proposals
        self._pending_rows.clear()
        await self.journal.set_aside(events[0].id, events if is_alone else (), why)
        before = self.scheduler.state
        self.restore()
        for each in fields(State):  # others hold this very object
            setattr(before, each.name, getattr(self.scheduler.state, each.name))
        self.scheduler.state = before
        if not is_alone:  # one of them raises: the others happen
            for posted in batch:
                posted.extra = ()  # the rows beside it are written already
            self._posted, self._one_by_one = [*batch, *self._posted], len(batch)
            return
        kind = self._report_bug(events, why)
        if not batch[0].has_happened:
            batch[0].error = ClusterError(f"a bug of clusterd: it cannot handle this {kind}; see the daemon's log")
        batch[0].done.set()

    def _report_bug(self, events: Sequence[Event], why: str) -> str:
        """Log events that the scheduler cannot handle, and count them; returns their kinds."""
        kinds = ", ".join(type(event).__name__ for event in events)
        log.error("a bug: the scheduler cannot handle %s, which is set aside; please report this:\n%s", kinds, why)
        self.set_aside += len(events)
        return kinds

    async def snapshot(self) -> None:
        """Write a journal snapshot, so that a restart replays only later events."""
        begun_s = time.monotonic()
        body = codec.snapshot(self.scheduler.state)
        self._encoding_s = time.monotonic() - begun_s
        if await self._keep(self.journal.write_snapshot(self._last_id, body, self._pending_rows)):
            self._pending_rows.clear()
        self._snapshot_at, self._handled_s = self._last_id, 0.0
        await self._compact()

    async def _compact(self) -> None:
        """Compress some old events; more often than snapshots are due, or it would fall behind."""
        self._compacted_at = self._last_id
        await self._keep(self.journal.compact(self._snapshot_at))

    def _is_snapshot_due(self) -> bool:
        """True if replaying the events since the last one would take long, against what a snapshot costs."""
        if self._last_id - self._snapshot_at < SNAPSHOT_EVERY:
            return False
        return self._handled_s >= min(REPLAY_S, SNAPSHOT_SHARE * self._encoding_s)

    def _keep_proposal(self, batch: int) -> None:
        if self.scheduler.proposed is not None:
            self._pending_rows.append(proposal_row(batch, self.scheduler.proposed))

    async def _keep(self, write: Awaitable[None]) -> bool:
        """Await a write that may be delayed or skipped: if the disk is full, log that and return false."""
        try:
            await write
        except ClusterError as error:
            log.error("%s", error)
            return False
        return True


LOOK_S = 10.0
"""Longest time between two checks of the wall clock for a step."""


class Timers:
    """Fires due timers. The scheduler's state holds the timers, so they survive a restart."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = anyio.Event()

    def changed(self) -> None:
        """Wake the task after a timer was set."""
        self._changed.set()

    async def run(self) -> None:
        """Fire timers until cancelled."""
        state: State = self._engine.state
        while True:
            state = self._engine.state
            due_s = min(state.timers.values(), default=None)
            wait_s = max(due_s - time.time(), 0.0) if due_s is not None else LOOK_S
            if wait_s:
                with anyio.move_on_after(min(wait_s, LOOK_S)):
                    await self._changed.wait()
            self._changed = anyio.Event()
            self._engine.mind_the_clock()
            now_s = time.time()
            for name, at_s in sorted(state.timers.items(), key=lambda item: item[1]):
                if at_s <= now_s:
                    await self._engine.report(TimerFired(at_s=now_s, timer=name))
