"""Forecasts of starts and ends of jobs, from roll-outs of the scheduler in a process beside the daemon.

The daemon only encodes the jobs that are not over, rarely, and reads the answer. A process that fails or is late is
killed, and the forecasts are not known until the next one answers.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from subprocess import PIPE

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.estimates.attained_service import executed_s
from clusterd.core.performance_table import PerformanceTable
from clusterd.core.queueing.dependencies import split
from clusterd.core.scheduler import SideEffects
from clusterd.core.state import Job, State
from clusterd.daemon.forecasts.outcomes import OutcomeStore, Widening
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.forecasting import HEADER_BYTES, Answer, Change, PastJob, Request, WhatIf, WhatIfAnswer, message
from clusterd.rows import Effect, Forecast
from clusterd.types import JobId, JobKind, JobSpec, JobState

log = logging.getLogger(__name__)

ROLLOUTS = 200

CPU_S = 30.0
"""Processor time of one forecast of all jobs; roll-outs of a large cluster are fewer."""

WHAT_IF_CPU_S = 5.0
"""The same, of a question that somebody waits for."""

LATE = 10.0
"""Multiple of its processor time after which a process counts as hung: it is niced, and the head node may be busy."""

LEAST_S = 5.0
"""Least time between two forecasts."""

LOOP_SHARE = 200.0
"""The least time is also this multiple of what it takes to encode the state, during which nobody is served."""

AGAIN_S = 600.0
"""Longest time until forecasts are made again though nothing has happened: jobs that still run will run longer."""

OLDEST_S = 1800.0
"""Age beyond which a forecast is not shown: nothing is known."""

PAST_DAYS, PAST_AGAIN_S = 29, 3600.0
"""Age of past jobs like which others may be submitted, and the time after which they are collected anew."""

FAILED_S, FAILED_MOST_S = 60.0, 3600.0
"""Pause after a process that failed, doubled for each further one in a row."""


class Forecaster:
    """Newest forecast of each job.

    Args:
        store: of forecasts and what came of them.
    """

    def __init__(self, engine: Engine, store: OutcomeStore) -> None:
        self._engine, self._store = engine, store
        self._state = engine.state
        self._found: dict[JobId, Forecast] = {}
        self._news: set[JobId] = set()  # jobs with another forecast than watchers have
        self._changed = anyio.Event()
        self._came: dict[str, dict[JobId, float]] = {"start": {}, "end": {}}
        self._cancelled: set[JobId] = set()
        self._asking = anyio.Lock()
        self._past, self._past_s = b"", -math.inf
        self._tables: dict[str, tuple[PerformanceTable, bytes]] = {}  # by model: tables never change, but are replaced

    def of(self, job: Job) -> Forecast | None:
        """Newest forecast of a job; None: it is not known."""
        found = self._found.get(job.id)
        is_over = job.state.is_final or job.held_by is not None  # a newer forecast would not have it either
        if found is None or is_over or time.time() - found.at_s > OLDEST_S:
            return None
        return found if job.state is JobState.QUEUED else msgspec.structs.replace(found, start=None, after="")

    def handled(self, events: Sequence[e.Event], decisions: Sequence[d.Decision]) -> None:
        """Note what a batch changed, and what came of earlier forecasts."""
        at_s = events[-1].at_s
        for decision in decisions:
            if isinstance(decision, d.LaunchAttempt):
                self._came["start"][decision.job] = at_s
            elif isinstance(decision, d.EndJob):
                if decision.state == JobState.CANCELLED.value:
                    self._cancelled.add(decision.job)
                else:
                    self._came["end"][decision.job] = at_s
        if not all(isinstance(event, e.AttemptProgressed) for event in events):
            self._changed.set()

    def with_news(self, side_effects: SideEffects) -> SideEffects:
        """Side effects of a batch with the jobs whose forecast is new, so that watchers get their rows."""
        if not self._news:
            return side_effects
        news, self._news = self._news, set()
        return replace(side_effects, jobs=side_effects.jobs | news)

    async def run(self) -> None:
        """Make forecasts until cancelled, whenever something has changed."""
        failed = 0
        process: _Process | None = None
        try:
            while True:
                with anyio.move_on_after(self._until_outdated_s()):
                    await self._changed.wait()
                await anyio.sleep(LEAST_S)  # what follows from the change is in the same forecast
                self._changed = anyio.Event()
                await self._learn()
                state = self._state
                if not state.queue and not state.active:
                    self._found.clear()
                    continue
                try:
                    process = process or await _Process.start()
                    request, encoding_s = await self._request(CPU_S)
                    answer = await process.ask(request)
                    failed = 0
                    await self._take(answer, request.now_s)
                    await anyio.sleep(LOOP_SHARE * encoding_s)
                except ClusterError as error:
                    self._found.clear()
                    self._news |= {*self._state.queue, *self._state.active}
                    if process is not None:
                        await process.end()
                    process, failed = None, failed + 1
                    log.error("%s; starts and ends of jobs are not known", error)
                    await anyio.sleep(min(FAILED_S * 2.0 ** (failed - 1), FAILED_MOST_S))
        finally:
            if process is not None:
                with anyio.CancelScope(shield=True):
                    await process.end()

    def _until_outdated_s(self) -> float:
        """Seconds until something has probably come that was forecast, or should be forecast anew all the same."""
        now_s = time.time()
        likely = (x.p75_s for one in self._found.values() for x in (one.start, one.end) if x is not None)
        return min([AGAIN_S, *(at_s - now_s for at_s in likely if at_s is not None and at_s > now_s)])

    async def what_if(self, wanted: Sequence[WhatIf]) -> tuple[WhatIfAnswer, ...]:
        """Forecasts of jobs, each as if it alone were submitted now.

        Raises:
            ClusterError: the process failed.
        """
        if not wanted:
            return ()
        request, _ = await self._request(WHAT_IF_CPU_S * len(wanted), tuple(wanted))
        answers = (await self._ask_apart(request)).what_ifs
        return tuple(
            msgspec.structs.replace(one, forecast=self._widened(one.forecast, request.now_s)) if one.forecast else one
            for one in answers
        )

    async def effect(self, change: Change) -> Effect:
        """Effect of a change, if it were made now.

        Raises:
            ClusterError: the process failed.
        """
        request, _ = await self._request(2 * WHAT_IF_CPU_S)
        return (await self._ask_apart(msgspec.structs.replace(request, change=change))).effect or Effect()

    async def _ask_apart(self, request: Request) -> Answer:
        """Ask a process of its own, one at a time."""
        async with self._asking:
            process = await _Process.start()
            try:
                return await process.ask(request)
            finally:
                with anyio.CancelScope(shield=True):
                    await process.end()

    async def _request(self, cpu_s: float, what_ifs: tuple[WhatIf, ...] = ()) -> tuple[Request, float]:
        """Request about the state of now, and the seconds in which the event loop waited for it."""
        past = await self._past_jobs()
        state, now_s, begun_s = self._state, time.time(), time.perf_counter()
        body = codec.encode(replace(live_part(state), performance_tables={}))
        tables = self._encoded(state.performance_tables)
        encoding_s = time.perf_counter() - begun_s
        request = Request(
            now_s=now_s, state=body, tables=tables, past=past, policy=self._engine.scheduler.policy.name,
            rollouts=ROLLOUTS, cpu_s=cpu_s, what_ifs=what_ifs,
        )  # fmt: skip
        return request, encoding_s

    def _encoded(self, tables: Mapping[str, PerformanceTable]) -> dict[str, bytes]:
        """Performance tables by model, each encoded when it is new."""
        known = self._tables
        self._tables = {
            model: known[model] if model in known and known[model][0] is table else (table, codec.encode(table))
            for model, table in tables.items()
        }
        return {model: body for model, (_, body) in self._tables.items()}

    async def _past_jobs(self) -> bytes:
        """Past jobs of the last weeks, encoded; collected once an hour, as they are told apart by the hour."""
        now_s = time.time()
        if now_s - self._past_s > PAST_AGAIN_S:
            jobs = [job for job in self._state.jobs.values() if job.submitted_s > now_s - PAST_DAYS * 86400.0]
            found = [_past_job(job, now_s) for job in jobs if job.state.is_final and job.attempts]
            self._past, self._past_s = await anyio.to_thread.run_sync(codec.encode, found), now_s
        return self._past

    async def _take(self, answer: Answer, now_s: float) -> None:
        """Make an answer the newest forecasts."""
        raw = {JobId(job): forecast for job, forecast in answer.jobs.items() if JobId(job) in self._state.jobs}
        self._news |= raw.keys() | self._found.keys()
        self._found = {job: self._widened(forecast, now_s) for job, forecast in raw.items()}
        kinds = {job: self._state.jobs[job].spec.kind.value for job in raw}
        try:
            await self._store.keep(raw, kinds)
        except sqlite3.Error as error:  # as on a full disk: forecasts are shown all the same
            log.warning("forecasts are not recorded: %s", error)

    async def _learn(self) -> None:
        """Store what came of earlier forecasts."""
        came, self._came = self._came, {"start": {}, "end": {}}
        cancelled, self._cancelled = self._cancelled, set()
        try:
            for what, at_s in came.items():
                if at_s:
                    await self._store.came(what, at_s)
            await self._store.forget(cancelled)
        except sqlite3.Error as error:
            log.warning("outcomes of forecasts are not recorded: %s", error)

    def _widened(self, raw: Forecast, now_s: float) -> Forecast:
        widening = self._store.widening
        start, end = (
            widening.get(what, Widening()).applied(times, now_s) if times is not None else None
            for what, times in (("start", raw.start), ("end", raw.end))
        )
        return msgspec.structs.replace(raw, start=start, end=end)


def what_if(spec: JobSpec, jobs: Iterable[Job]) -> WhatIf | str:
    """Question about a job, with the model of the newest job like it; of an elastic one without such a job, why not."""
    if spec.kind is not JobKind.ELASTIC:
        return WhatIf(spec=spec)
    like = [
        job
        for job in jobs
        if job.inspection.model
        and (job.spec.user, job.spec.name, job.spec.command) == (spec.user, spec.name, spec.command)
    ]
    if not like:
        return f"no job {spec.name} with this command has been inspected yet: clusterd estimate tells its speed"
    newest = max(like, key=lambda job: job.submitted_s)
    return WhatIf(spec=spec, shape=newest.inspection.shape, model=newest.inspection.model)


def _past_job(job: Job, now_s: float) -> PastJob:
    """The job as a command on what it asked for, which runs as long."""
    spec = replace(job.spec, kind=JobKind.COMMAND, command=("past",), env={}, after=(), datasets={}, snapshot=None)
    return PastJob(at_s=job.submitted_s, spec=spec, ran_s=executed_s(job, now_s))


def live_part(state: State) -> State:
    """The state without jobs that are over, but for those whose end others wait for."""
    awaited = {split(after)[0] for job in state.queue for after in state.jobs[job].spec.after}
    return replace(
        state, jobs={job.id: job for job in state.jobs.values() if not job.state.is_final or job.id in awaited}
    )


class _Process:
    """Process that plays roll-outs (`clusterd.simulate.forecaster`); it ends with its input."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process, self._input, self._errors = process, process.stdin, process.stderr
        self._output = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls) -> _Process:
        """Start a process.

        Raises:
            ClusterError: it cannot be started.
        """
        command = [sys.executable, "-m", "clusterd.simulate.forecaster"]
        try:
            return cls(await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=PIPE))
        except OSError as error:
            raise ClusterError(f"the process that plays roll-outs cannot be started: {error}") from None

    async def ask(self, request: Request) -> Answer:
        """Send a request, and wait for its answer.

        Raises:
            ClusterError: the process ended, or is late.
        """
        try:
            with anyio.fail_after(LATE * request.cpu_s):
                await self._input.send(message(request))
                size = int.from_bytes(await self._output.receive_exactly(HEADER_BYTES))
                return msgspec.msgpack.decode(await self._output.receive_exactly(size), type=Answer)
        except TimeoutError:
            raise ClusterError(f"no roll-out was done within {LATE * request.cpu_s:.0f} s") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            raise ClusterError(f"the process that plays roll-outs ended: {await self._last_words()}") from None

    async def _last_words(self) -> str:
        """Last line of its error output."""
        text = b""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError), anyio.move_on_after(1.0):
            while True:
                text += await self._errors.receive()
        return (text.decode(errors="replace").strip().splitlines() or ["without a message"])[-1]

    async def end(self) -> None:
        """Kill it, and wait for its end."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.aclose()
