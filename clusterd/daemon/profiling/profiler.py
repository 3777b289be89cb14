"""Profiler of running jobs: feeds their step times to the performance models and proposes trials."""

from __future__ import annotations

import logging
import math
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
from clusterd.core.state import Attempt, Job
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.profiling.performance_models import PerformanceModels
from clusterd.daemon.profiling.submission_classifier import SubmissionClassifier
from clusterd.daemon.profiling.trial_selection import SLOW_TRIAL_STEPS, WARM_UP_STEPS, TrialSelection
from clusterd.errors import ClusterError
from clusterd.plans.plan import Plan
from clusterd.profiling.knowledge import Knowledge
from clusterd.profiling.model import Row, Rows
from clusterd.profiling.online import Observation
from clusterd.profiling.progress import LossCurve, Predictability, fit_loss, held_out_error
from clusterd.profiling.store import Measurement
from clusterd.protocol.agent import Progress
from clusterd.protocol.rank import FromRank, Probed, Proved
from clusterd.types import HostId, JobId, RankEnd, Reason

log = logging.getLogger(__name__)

FAMILY_LENGTH_MAX = 100

INBOX_MAX = 10_000
"""Waiting pieces of work beyond which reports of steps are ignored."""

TRIAL_S_MOST = 4.0
"""Time after which a trial of slow steps ends with fewer of them."""

REFRESH_S = 20.0
"""Least time between two tables of one model that differ by a few more steps only."""


@dataclass(slots=True)
class _Run:
    """Step times of one generation of an attempt, since the last measurement."""

    of: tuple[int, int, int]  # attempt, generation, and total CPU cores
    step: int  # newest that was counted: an agent that restarts reports its last steps again
    seen: int = 0
    times_s: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0


class Profiler:
    """One task that works through a queue of reports; fits run in a thread."""

    def __init__(
        self, engine: Engine, models: PerformanceModels, classifier: SubmissionClassifier, *, trials: bool = True
    ) -> None:
        """`trials`: allow trials of other plans; running plans are measured in any case."""
        self._engine, self._classifier, self._models = engine, classifier, models
        self._state = engine.state
        self._trial_selection = TrialSelection(engine, models.of, trials=trials)
        self._runs: dict[str, _Run] = {}
        self._forecasts: dict[str, LossForecast] = {}
        self._inbox: dict[Any, None] = {}  # work in order; the same work waits once
        self._wake = anyio.Event()

    # --- inputs -------------------------------------------------------------------------------------------------------

    def handled(self, events: Sequence[e.Event]) -> None:
        """Queue the work that handled events require."""
        for event in events:
            match event:
                case e.AttemptStopped() if (job := self._state.jobs.get(event.job)) and job.state.is_final:
                    self._forecasts.pop(event.job, None)
                    self._runs.pop(event.job, None)
                    self._trial_selection.forget(event.job)
                case e.RankOrphaned(out_of_memory=True) | e.RankExited(end=RankEnd(reason=Reason.DEVICE_OOM)):
                    attempt = self._state.attempt(event.job, event.attempt, event.generation)
                    rank = attempt.ranks.get(event.rank) if attempt is not None else None
                    if rank is not None and rank.end is not None and rank.end.reason is Reason.CROWDED:
                        continue  # not caused by its plan
                    if attempt is not None and attempt.plan is not None:
                        # Read now: a rollback may change it before the queue is processed.
                        shape = shape_of(of_ranks(self._state.hosts, attempt))
                        self._put(partial(self._ran_out_of_memory, attempt, attempt.plan, shape))
                case e.ModelDescribed():
                    self._put(partial(self._described, event.model))
                case e.HostConnected() | e.HostRemoved() | e.HostChanged():
                    self._put(self._devices_changed)
                case e.JobsArchived():
                    self._put(self._forget_models)
                case e.MigrationFinished() | e.MigrationFailed() | e.TimerFired() | e.TrialMeasured():
                    self._put(self._trial_selection.look)
                case _:
                    pass

    def on_progress(self, _host: HostId, report: Progress) -> None:
        """Queue the steps of a running attempt; a few are ignored where fits take longer than reports to come."""
        if len(self._inbox) < INBOX_MAX:
            self._put(partial(self._on_steps, report))

    def on_rank_message(self, _host: HostId, report: FromRank) -> None:
        """Queue what a rank measured of its device and links before its first step."""
        if isinstance(report.message, Probed):
            self._put(partial(self._on_probed, JobId(report.job), report.message))
        elif isinstance(report.message, Proved):
            self._put(partial(self._on_proved, JobId(report.job), report.message.family[:FAMILY_LENGTH_MAX]))

    def forget(self) -> None:
        """Rebuild the models after a change of the store."""
        self._models.forget()
        self._put(self._devices_changed)

    async def _forget_models(self) -> None:
        self._models.forget_others({job.inspection.model for job in self._state.jobs.values()})

    def _put(self, work: Any) -> None:
        self._inbox[work] = None
        self._wake.set()

    async def run(self) -> None:
        """Process the queue forever."""
        self._put(self._devices_changed)
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._inbox:
                work = next(iter(self._inbox))
                del self._inbox[work]
                try:
                    await work()
                except ClusterError as error:  # the disk is full: a trial is proposed again
                    log.error("%s", error)
                except Exception:  # a failed fit must not stop the daemon
                    log.exception("the performance model could not be updated")

    async def _on_probed(self, job_id: JobId, probed: Probed) -> None:
        job = self._state.jobs.get(job_id)
        attempt = job.attempt if job is not None else None
        names = {d.name for d in trials.held(attempt, self._state.hosts)} if attempt is not None else set()
        if len(names) != 1:
            return
        await self._models.probed(names.pop(), probed.figures)

    async def _on_proved(self, job_id: JobId, family: str) -> None:
        if (job := self._state.jobs.get(job_id)) is not None:
            await self._models.proved(job_id, job.spec, family)

    async def _devices_changed(self) -> None:
        await self._models.devices_changed()
        await self._trial_selection.look()

    async def _described(self, model: str) -> None:
        await self._models.described(model)
        await self._trial_selection.look()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _on_steps(self, report: Progress) -> None:
        job = self._state.jobs.get(JobId(report.job))
        attempt = job.attempt if job is not None else None
        which = (report.attempt, report.generation)
        if job is None or attempt is None or not job.inspection.model or (attempt.number, attempt.generation) != which:
            return
        await self._forecast(job, report)
        run = self._runs.get(job.id)
        now = (attempt.number, attempt.generation, sum(attempt.booked.cores.values()))
        if run is None or run.of != now:
            run = self._runs[job.id] = _Run(now, run.step if run is not None and run.of[0] == now[0] else 0)
        for step, seconds in report.steps:
            if step <= run.step:
                continue
            run.step, run.seen = step, run.seen + 1
            if run.seen > WARM_UP_STEPS and seconds > 0:
                run.times_s.append(seconds)
        run.phases = report.phases or run.phases
        run.device_bytes = max(run.device_bytes, report.device_bytes)
        run.host_bytes = max(run.host_bytes, report.host_bytes)
        if report.overhead_bytes and attempt.plan is not None and (known := self._models.of(job, attempt)) is not None:
            await self._models.measured_overhead(known.devices.name, attempt.plan, report.overhead_bytes)
        if attempt.migration is not None or job.resuming is not None or attempt.retired:  # ranks start or exit
            run.times_s.clear()  # starting and exiting ranks take processor time
            return
        known = self._models.of(job, attempt)
        if known is None:
            return
        trial = job.trials.current
        if trial is not None and trial.from_step is not None and attempt.plan == trial.plan:
            enough = len(run.times_s) >= SLOW_TRIAL_STEPS and sum(run.times_s) >= TRIAL_S_MOST
            if len(run.times_s) >= trial.steps or enough:
                await self._measured(job, attempt, known, run)
        elif len(run.times_s) >= 20:
            await self._observed(job, attempt, known, run)
        await self._trial_selection.look_at(job)

    async def _forecast(self, job: Job, report: Progress) -> None:
        """Update the forecast of the job's last step from its losses."""
        forecast = self._forecasts.get(job.id)
        if forecast is None:
            known = self._models.has_steps_of(job.inspection.model)
            forecast = self._forecasts[job.id] = LossForecast(await self._classifier.at_submission(job, known))
        forecast.add(report.step, report.loss)
        if not forecast.is_due:
            return
        found = await anyio.to_thread.run_sync(forecast.judge, job.spec.target_loss)
        if found is not None:
            await self._engine.report(
                e.CompletionPredicted(
                    at_s=time.time(), job=job.id, predictable=found[0], steps=found[1], why=forecast.why
                )
            )

    async def _measured(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """Record a trial that has all its steps."""
        assert attempt.plan is not None
        seconds, steps = median(run.times_s), len(run.times_s)
        row = self._row(attempt, known)
        before = known.online
        (predicted,) = before.fit.predict(Rows.of([row])).median_s
        known.online = await anyio.to_thread.run_sync(before.observe, Observation(row, seconds))
        await self._keep(job, known, row, seconds, steps, run)
        run.times_s.clear()
        await self._engine.report(
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
        await self._models.publish(job.inspection.model, f"{attempt.plan} was tried: {seconds:.3g} s a step")

    def _row(self, attempt: Attempt, known: Knowledge) -> Row:
        """Row of the attempt's plan and allocation, with its cores."""
        assert attempt.plan is not None
        devices = of_ranks(self._state.hosts, attempt)
        cores = cores_each(attempt, devices) if known.devices.cores_most else None
        return known.row(attempt.plan, shape_of(devices), cores)

    async def _ran_out_of_memory(self, attempt: Attempt, plan: Plan, shape: tuple[int, ...]) -> None:
        """Record that a plan ran out of memory, so that it is not tried again."""
        job = self._state.jobs[attempt.job]
        known = self._models.of(job, attempt)
        if known is None or plan in known.refused:
            return
        known.refused.add(plan)
        row = known.row(plan, shape)
        key = self._models.key(job, known.devices.name, shape)
        await self._models.keep(Measurement(key, row, 0.0, kind="out-of-memory", at_s=time.time()))
        await self._models.publish(job.inspection.model, f"{plan} ran out of memory")

    async def _observed(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """Record steps of a job outside of trials."""
        row = self._row(attempt, known)
        times, run.times_s = run.times_s, []
        before = known.online
        known.online = await anyio.to_thread.run_sync(before.update, row, times)
        if not any(o.row == row for o in before.observations):
            await self._keep(job, known, row, median(times), len(times), run)
        drifted = known.online.drifts > before.drifts
        stale = self._models.age_s(job.inspection.model) > REFRESH_S
        if drifted:
            await self._models.publish(job.inspection.model, known.online.reasons[-1])
        elif stale and known.online.fit is not before.fit:
            await self._models.publish(job.inspection.model, "more steps were measured")

    async def _keep(self, job: Job, known: Knowledge, row: Any, seconds: float, steps: int, run: _Run) -> None:
        measurement = Measurement(
            key=self._models.key(job, known.devices.name, row.allocation.counts),
            row=row,
            step_time_s=seconds,
            steps=steps,
            phases=tuple(run.phases.items()),
            device_peak_bytes=run.device_bytes,
            host_peak_bytes=run.host_bytes,
            at_s=time.time(),
        )
        await self._models.keep(measurement)


POINTS_MOST = 400
JUDGED_EVERY = 1.5
"""Growth of the number of points between two forecasts."""

STEPS_MOST = 1e12
"""Forecasts beyond this count as never: the curve has become flat."""

REPORTED_CHANGE = 0.1
"""Relative change of the forecast that is worth reporting."""


@dataclass(slots=True)
class LossForecast:
    """Losses of one job, and the forecast of its last step."""

    predictability: Predictability
    points: list[tuple[int, float]] = field(default_factory=list)
    judged_at: int = 0  # number of points
    seen: int = 0
    reported: tuple[bool, int | None] | None = None
    why: str = ""

    def add(self, step: int, loss: float | None) -> None:
        """Add a loss; a long run is thinned to every second one, then every fourth, and so on."""
        if loss is None or not math.isfinite(loss) or (self.points and step <= self.points[-1][0]):
            return
        self.seen += 1
        self.points.append((step, loss))
        if len(self.points) > POINTS_MOST:
            self.points = self.points[::2]

    @property
    def is_due(self) -> bool:
        """True if there are enough new points since the last forecast."""
        return self.seen >= 12 and self.seen >= JUDGED_EVERY * self.judged_at

    def judge(self, target: float | None) -> tuple[bool, int | None] | None:
        """Predictability and total steps to the target; None if both are as last reported."""
        self.judged_at = self.seen
        steps = [float(step) for step, _ in self.points]
        losses = [loss for _, loss in self.points]
        self.predictability = self.predictability.observe(held_out_error(steps, losses))
        curve: LossCurve | None = fit_loss(steps, losses) if target is not None else None
        at = curve.step_of(target) if curve is not None and target is not None else None
        found = (self.predictability.predictable, math.ceil(at) if at is not None and at <= STEPS_MOST else None)
        self.why = self.predictability.reason
        if found[1] is not None:
            self.why += f"; the loss curve reaches {target:g} at step {found[1]}"
        if self.reported is not None and self.reported[0] == found[0] and _alike(self.reported[1], found[1]):
            return None
        self.reported = found
        return found


def _alike(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= REPORTED_CHANGE * max(one, other)
