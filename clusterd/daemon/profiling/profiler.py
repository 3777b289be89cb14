"""Learns how fast jobs run: listens to their steps, brings the performance model up to date, asks for trial runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from clusterd.core import events as e
from clusterd.core.ledger import of_ranks, shape_of
from clusterd.core.lifecycle import trials
from clusterd.core.placement.cpu_cores import cores_each
from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.profiling.loss_forecast import Ending, at_submission
from clusterd.daemon.profiling.performance_models import Learned
from clusterd.daemon.profiling.trial_selection import SLOW_TRIAL_STEPS, WARM_UP_STEPS, Trying
from clusterd.protocol.agent import Progress
from clusterd.protocol.rank import FromRank, Probed
from clusterd.types import HostId, JobId, RankEnd, Reason
from plans.plan import Plan
from profiling.knowledge import Knowledge
from profiling.model import Row, Rows
from profiling.online import Observation
from profiling.store import Measurement

log = logging.getLogger(__name__)

TRIAL_S_MOST = 4.0
"""A trial of slow steps is over after so long, with fewer of them."""

ANEW_EVERY_S = 20.0
"""Between two tables of one model, when nothing but a few more steps is new."""


@dataclass(slots=True)
class _Run:
    """Step times of one generation of an attempt, since the last measurement."""

    of: tuple[int, int, int]  # attempt, generation, and CPU cores in all
    seen: int = 0
    times_s: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0


class Profiler:
    """One task; what it is told waits in a queue, and fits are made in a thread."""

    def __init__(self, engine: Engine, learned: Learned, *, trials: bool = True) -> None:
        """`trials`: whether jobs may be asked to run under other plans; what they run under is measured anyway."""
        self._engine = engine
        self._learned = learned
        self._trying = Trying(engine, learned.of, trials=trials)
        self._runs: dict[str, _Run] = {}
        self._endings: dict[str, Ending] = {}
        self._inbox: list[Any] = []
        self._bell = anyio.Event()

    @property
    def _state(self) -> State:
        return self._engine.scheduler.state

    # --- what it is told ----------------------------------------------------------------------------------------------

    def handled(self, events: Sequence[e.Event]) -> None:
        """Events that may change what is to be learned."""
        for event in events:
            match event:
                case e.AttemptStopped() if (job := self._state.jobs.get(event.job)) and job.state.is_final:
                    self._endings.pop(event.job, None)
                    self._runs.pop(event.job, None)
                    self._trying.forget(event.job)
                case e.RankOrphaned(out_of_memory=True) | e.RankExited(end=RankEnd(reason=Reason.DEVICE_OOM)):
                    attempt = self._state.attempt(event.job, event.attempt, event.generation)
                    rank = attempt.ranks.get(event.rank) if attempt is not None else None
                    if rank is not None and rank.end is not None and rank.end.reason is Reason.CROWDED:
                        continue  # it was not its plan's fault
                    if attempt is not None and attempt.plan is not None:
                        # As it is now: the way back may be over when this is looked at.
                        shape = shape_of(of_ranks(self._state.hosts, attempt))
                        self._put(partial(self._ran_out_of_memory, attempt, attempt.plan, shape))
                case e.ModelDescribed():
                    self._put(partial(self._described, event.model))
                case e.HostConnected() | e.HostRemoved() | e.HostChanged():
                    self._put(self._devices_changed)
                case e.MigrationFinished() | e.MigrationFailed() | e.TimerFired() | e.TrialMeasured():
                    self._put(self._trying.look)
                case _:
                    pass

    def on_progress(self, _host: HostId, report: Progress) -> None:
        """Queue the steps of a running attempt."""
        self._put(partial(self._on_steps, report))

    def on_rank_message(self, _host: HostId, report: FromRank) -> None:
        """Queue what a rank measured of its device and links before its first step."""
        if isinstance(report.message, Probed):
            self._put(partial(self._on_probed, JobId(report.job), report.message))

    def forget(self) -> None:
        """What is in the store has changed."""
        self._learned.forget()
        self._put(self._devices_changed)

    def _put(self, work: Any) -> None:
        self._inbox.append(work)
        self._bell.set()

    async def run(self) -> None:
        """Serve for ever."""
        self._put(self._devices_changed)
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            while self._inbox:
                work = self._inbox.pop(0)
                try:
                    await work()
                except Exception:  # learning less must not take the daemon with it
                    log.exception("the performance model could not be brought up to date")

    async def _on_probed(self, job_id: JobId, probed: Probed) -> None:
        job = self._state.jobs.get(job_id)
        attempt = job.attempt if job is not None else None
        names = {d.name for d in trials.held(attempt, self._state.hosts)} if attempt is not None else set()
        if len(names) != 1:
            return
        await self._learned.probed(names.pop(), probed.figures)

    async def _devices_changed(self) -> None:
        await self._learned.devices_changed()
        await self._trying.look()

    async def _described(self, model: str) -> None:
        await self._learned.described(model)
        await self._trying.look()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _on_steps(self, report: Progress) -> None:
        job = self._state.jobs.get(JobId(report.job))
        attempt = job.attempt if job is not None else None
        which = (report.attempt, report.generation)
        if job is None or attempt is None or not job.model or (attempt.number, attempt.generation) != which:
            return
        await self._foresee(job, report)
        run = self._runs.get(job.id)
        now = (attempt.number, attempt.generation, sum(attempt.cores.values()))
        if run is None or run.of != now:
            run = self._runs[job.id] = _Run(now)
        for _, seconds in report.steps:
            run.seen += 1
            if run.seen > WARM_UP_STEPS and seconds > 0:
                run.times_s.append(seconds)
        run.phases = report.phases or run.phases
        run.device_bytes = max(run.device_bytes, report.device_bytes)
        run.host_bytes = max(run.host_bytes, report.host_bytes)
        if not _is_quiet(job, attempt):
            run.times_s.clear()  # ranks that come or go take processor time
            return
        known = self._learned.of(job, attempt)
        if known is None:
            return
        trial = job.trials.current
        if trial is not None and trial.from_step is not None and attempt.plan == trial.plan:
            enough = len(run.times_s) >= SLOW_TRIAL_STEPS and sum(run.times_s) >= TRIAL_S_MOST
            if len(run.times_s) >= trial.steps or enough:
                await self._measured(job, attempt, known, run)
        elif len(run.times_s) >= 20:
            await self._went_on(job, attempt, known, run)
        await self._trying.look_at(job)

    async def _foresee(self, job: Job, report: Progress) -> None:
        """Losses tell when the job will be done, and whether that can be told."""
        ending = self._endings.get(job.id)
        if ending is None:
            others = [j for j in self._state.jobs.values() if j.id != job.id and j.spec.user == job.spec.user]
            before = any(j.spec.command == job.spec.command and j.step > 0 for j in others)
            known = self._learned.has_steps_of(job.model)
            ending = self._endings[job.id] = Ending(at_submission(job, before, known))
        ending.saw(report.step, report.loss)
        if not ending.is_due:
            return
        found = await anyio.to_thread.run_sync(ending.judge, job.spec.target_loss)
        if found is not None:
            await self._engine.post(
                e.CompletionPredicted(
                    at_s=time.time(), job=job.id, predictable=found[0], steps=found[1], why=ending.why
                )
            )

    async def _measured(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """A trial has its steps."""
        assert attempt.plan is not None
        seconds, steps = median(run.times_s), len(run.times_s)
        row = self._row(attempt, known)
        before = known.online
        (predicted,) = before.fit.predict(Rows.of([row])).median_s
        known.online = await anyio.to_thread.run_sync(before.observe, Observation(row, seconds))
        await self._keep(job, known, row, seconds, steps, run)
        run.times_s.clear()
        await self._engine.post(
            e.TrialMeasured(
                at_s=time.time(),
                job=job.id,
                plan=attempt.plan,
                shape=row.allocation.counts,
                device_type=known.devices.name,
                step_time_s=seconds,
                steps=steps,
                predicted_s=float(predicted),
            )
        )
        await self._learned.tell(job.model, f"{attempt.plan} was tried: {seconds:.3g} s a step")

    def _row(self, attempt: Attempt, known: Knowledge) -> Row:
        """What the attempt runs as, with the cores that it has."""
        assert attempt.plan is not None
        devices = of_ranks(self._state.hosts, attempt)
        cores = cores_each(attempt, devices) if known.devices.cores_most else None
        return known.row(attempt.plan, shape_of(devices), cores)

    async def _ran_out_of_memory(self, attempt: Attempt, plan: Plan, shape: tuple[int, ...]) -> None:
        """That is a measurement too: nobody need try the plan there again."""
        job = self._state.jobs[attempt.job]
        known = self._learned.of(job, attempt)
        if known is None or plan in known.refused:
            return
        known.refused.add(plan)
        row = known.row(plan, shape)
        key = self._learned.key(job, known.devices.name, shape)
        await self._learned.keep(Measurement(key, row, 0.0, kind="out-of-memory", at_s=time.time()))
        await self._learned.tell(job.model, f"{plan} ran out of memory")

    async def _went_on(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """A job that just runs is measured too."""
        row = self._row(attempt, known)
        times, run.times_s = run.times_s, []
        before = known.online
        known.online = await anyio.to_thread.run_sync(before.update, row, times)
        if not any(o.row == row for o in before.observations):
            await self._keep(job, known, row, median(times), len(times), run)
        drifted = known.online.drifts > before.drifts
        stale = self._learned.age_s(job.model) > ANEW_EVERY_S
        if drifted:
            await self._learned.tell(job.model, known.online.reasons[-1])
        elif stale and known.online.fit is not before.fit:
            await self._learned.tell(job.model, "more steps were seen")

    async def _keep(self, job: Job, known: Knowledge, row: Any, seconds: float, steps: int, run: _Run) -> None:
        measurement = Measurement(
            key=self._learned.key(job, known.devices.name, row.allocation.counts),
            row=row,
            step_time_s=seconds,
            steps=steps,
            phases=tuple(run.phases.items()),
            device_peak_bytes=run.device_bytes,
            host_peak_bytes=run.host_bytes,
            at_s=time.time(),
        )
        await self._learned.keep(measurement)


def _is_quiet(job: Job, attempt: Attempt) -> bool:
    """True while no rank of the attempt starts or exits."""
    return attempt.migration is None and job.resuming is None and not attempt.retired
