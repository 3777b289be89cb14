"""Learns how fast jobs run: listens to their steps, fits the performance model, asks for trial runs, tells the core.

The core decides by tables of predicted step times. They are made here: out of what was measured on this cluster, ever,
of the same model on the same type of device, and out of beliefs about the hardware where nothing was.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from clusterd.core import events as e
from clusterd.core import trials
from clusterd.core.outlook import Estimate, Outlook
from clusterd.core.room import of_ranks, shape_of
from clusterd.core.state import Attempt, Host, Job, State
from clusterd.daemon.endings import Ending, at_submission
from clusterd.daemon.engine import Engine
from clusterd.daemon.trying import SLOW_TRIAL_STEPS, WARM_UP_STEPS, Trying
from clusterd.types import JobId, RankEnd, Reason
from plans.model_shape import ModelShape
from plans.plan import Plan
from profiling import fleet
from profiling.coefficients import INDEX
from profiling.fleet import DeviceType
from profiling.knowledge import Knowledge, Ranked, workload_of
from profiling.model import Rows
from profiling.online import Observation, OnlineFit
from profiling.store import Key, Measurement, Store

log = logging.getLogger(__name__)

TRIAL_S_MOST = 4.0
"""A trial of slow steps is over after so long, with fewer of them."""

KEPT_PER_SHAPE = 4
SHAPES_MOST = 256
ANEW_EVERY_S = 20.0
"""Between two tables of one model, when nothing but a few more steps is new."""


@dataclass(slots=True)
class _Run:
    """Step times of one generation of an attempt, since the last measurement."""

    generation: int
    seen: int = 0
    times_s: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0


class Profiler:
    """One task; what it is told waits in a queue, and fits are made in a thread."""

    def __init__(self, engine: Engine, store: Path, *, trials: bool = True) -> None:
        """`trials`: whether jobs may be asked to run under other plans; what they run under is measured anyway."""
        self._engine = engine
        self._trying = Trying(engine, self._knowledge_of, trials=trials)
        self._path = store
        self._known: dict[tuple[str, str], Knowledge] = {}
        self._runs: dict[str, _Run] = {}
        self._told_s: dict[str, float] = {}
        self._endings: dict[str, Ending] = {}
        self._probes: dict[str, dict[str, float]] = json.loads(engine.journal.fact("probes", "{}"))
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
                case e.AttemptStopped() if self._state.jobs[event.job].state.is_final:
                    self._endings.pop(event.job, None)
                    self._runs.pop(event.job, None)
                    self._trying.forget(event.job)
                case e.RankOrphaned(out_of_memory=True) | e.RankExited(end=RankEnd(reason=Reason.DEVICE_OOM)):
                    attempt = self._state.attempt(event.job, event.attempt, event.generation)
                    if attempt is not None and attempt.plan is not None:
                        self._put(partial(self._ran_out_of_memory, attempt, attempt.plan))
                case e.ModelDescribed():
                    self._put(partial(self._described, event.model))
                case e.HostConnected() | e.HostRemoved() | e.HostChanged():
                    self._put(self._fleet_changed)
                case e.MigrationFinished() | e.MigrationFailed() | e.TimerFired() | e.TrialMeasured():
                    self._put(self._trying.look)
                case _:
                    pass

    def saw(self, message: dict[str, Any]) -> None:
        """Steps of a running attempt, as an agent tells them."""
        self._put(partial(self._saw, message))

    def probed(self, message: dict[str, Any]) -> None:
        """What a rank measured of its device and links before it began to train."""
        self._put(partial(self._probed, message))

    def wants_probe(self, device_types: Iterable[str], hosts: int) -> bool:
        """Whether one of these types, or the links between so many hosts, was never measured on this cluster."""
        link = "network_rate" if hosts > 1 else "compute_rate"
        return any(link not in self._probes.get(name, {}) for name in device_types)

    def _put(self, work: Any) -> None:
        self._inbox.append(work)
        self._bell.set()

    async def run(self) -> None:
        """Serve for ever."""
        self._put(self._fleet_changed)
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            while self._inbox:
                work = self._inbox.pop(0)
                try:
                    await work()
                except Exception:  # learning less must not take the daemon with it
                    log.exception("the performance model could not be brought up to date")

    async def _probed(self, message: dict[str, Any]) -> None:
        job = self._state.jobs.get(JobId(message["job"]))
        attempt = job.attempt if job is not None else None
        names = {d.name for d in trials.held(attempt, self._state.hosts)} if attempt is not None else set()
        if len(names) != 1:
            return
        (name,) = names
        figures = {k: float(v) for k, v in message["said"]["figures"].items() if k in INDEX and v > 0}
        self._probes[name] = {**self._probes.get(name, {}), **figures}
        await self._engine.journal.keep_fact("probes", json.dumps(self._probes))
        log.info("%s does %s", name, ", ".join(f"{k} {v:.3g}" for k, v in sorted(figures.items())))
        for (model, device_type), known in list(self._known.items()):
            if device_type == name:  # new beliefs, the same measurements
                prior = fleet.prior(known.devices.kind, self._probes[name])
                kept = known.online.observations
                known.online = await anyio.to_thread.run_sync(
                    OnlineFit.start, prior, kept, fleet.beliefs(known.devices.kind)
                )
                self._put(partial(self._tell, model, f"{name} was probed"))

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _saw(self, message: dict[str, Any]) -> None:
        job = self._state.jobs.get(JobId(message["job"]))
        attempt = job.attempt if job is not None else None
        if job is None or attempt is None or not job.model or attempt.generation != message["generation"]:
            return
        await self._foresee(job, message)
        run = self._runs.get(job.id)
        if run is None or run.generation != attempt.generation:
            run = self._runs[job.id] = _Run(attempt.generation)
        for _, seconds in message.get("steps", ()):
            run.seen += 1
            if run.seen > WARM_UP_STEPS and seconds > 0:
                run.times_s.append(float(seconds))
        run.phases = message.get("phases") or run.phases
        run.device_bytes = max(run.device_bytes, int(message.get("device_bytes") or 0))
        run.host_bytes = max(run.host_bytes, int(message.get("host_bytes") or 0))
        if not _is_quiet(attempt):
            run.times_s.clear()  # ranks that come or go take processor time
            return
        known = self._knowledge_of(job, attempt)
        if known is None:
            return
        trial = job.trial
        if trial is not None and trial.from_step is not None and attempt.plan == trial.plan:
            enough = len(run.times_s) >= SLOW_TRIAL_STEPS and sum(run.times_s) >= TRIAL_S_MOST
            if len(run.times_s) >= trial.steps or enough:
                await self._measured(job, attempt, known, run)
        elif len(run.times_s) >= 20:
            await self._went_on(job, attempt, known, run)
        await self._trying.look_at(job)

    async def _foresee(self, job: Job, message: dict[str, Any]) -> None:
        """Losses tell when the job will be done, and whether that can be told."""
        ending = self._endings.get(job.id)
        if ending is None:
            others = [j for j in self._state.jobs.values() if j.id != job.id and j.spec.user == job.spec.user]
            before = any(j.spec.command == job.spec.command and j.step > 0 for j in others)
            known = any(model == job.model and k.online.observations for (model, _), k in self._known.items())
            ending = self._endings[job.id] = Ending(at_submission(job, before, known))
        ending.saw(int(message["step"]), message.get("loss"))
        if not ending.is_due:
            return
        found = await anyio.to_thread.run_sync(ending.judge, job.spec.target_loss)
        if found is not None:
            await self._engine.post(
                e.EndForeseen(at_s=time.time(), job=job.id, predictable=found[0], steps=found[1], why=ending.why)
            )

    async def _measured(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """A trial has its steps."""
        assert attempt.plan is not None
        seconds, steps = median(run.times_s), len(run.times_s)
        row = known.row(attempt.plan, shape_of(of_ranks(self._state.hosts, attempt)))
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
        await self._tell(job.model, f"{attempt.plan} was tried: {seconds:.3g} s a step")

    async def _ran_out_of_memory(self, attempt: Attempt, plan: Plan) -> None:
        """That is a measurement too: nobody need try the plan there again."""
        job = self._state.jobs[attempt.job]
        known = self._knowledge_of(job, attempt)
        if known is None or plan in known.refused:
            return
        known.refused.add(plan)
        row = known.row(plan, shape_of(of_ranks(self._state.hosts, attempt)))
        key = Key(job.model, known.devices.name)
        await self._write(Measurement(key, row, 0.0, kind="out-of-memory", at_s=time.time()))
        await self._tell(job.model, f"{plan} ran out of memory")

    async def _went_on(self, job: Job, attempt: Attempt, known: Knowledge, run: _Run) -> None:
        """A job that just runs is measured too."""
        assert attempt.plan is not None
        row = known.row(attempt.plan, shape_of(of_ranks(self._state.hosts, attempt)))
        times, run.times_s = run.times_s, []
        before = known.online
        known.online = await anyio.to_thread.run_sync(before.update, row, times)
        if not any(o.row == row for o in before.observations):
            await self._keep(job, known, row, median(times), len(times), run)
        drifted = known.online.drifts > before.drifts
        stale = time.monotonic() - self._told_s.get(job.model, 0.0) > ANEW_EVERY_S
        if drifted:
            await self._tell(job.model, known.online.reasons[-1])
        elif stale and known.online.fit is not before.fit:
            await self._tell(job.model, "more steps were seen")

    async def _keep(self, job: Job, known: Knowledge, row: Any, seconds: float, steps: int, run: _Run) -> None:
        measurement = Measurement(
            key=Key(job.model, known.devices.name),
            row=row,
            step_time_s=seconds,
            steps=steps,
            phases=tuple(run.phases.items()),
            device_peak_bytes=run.device_bytes,
            host_peak_bytes=run.host_bytes,
            at_s=time.time(),
        )
        await self._write(measurement)

    async def _write(self, measurement: Measurement) -> None:
        def write() -> None:
            with Store(self._path) as store:
                store.add(measurement)

        await anyio.to_thread.run_sync(write)

    # --- tables -------------------------------------------------------------------------------------------------------

    async def _fleet_changed(self) -> None:
        """Other devices: other shapes for every model that may still run."""
        self._known = {
            key: known for key, known in self._known.items() if _types(self._state).get(key[1]) == known.devices
        }
        models = {job.model for job in self._state.jobs.values() if job.model and not job.state.is_final}
        for model in sorted(models):
            await self._refresh(model, "the cluster's devices changed")

    async def _described(self, model: str) -> None:
        """Of the thousandth job of a model nothing new has to be computed, unless it wishes for a plan of its own."""
        outlook = self._state.outlooks.get(model)
        jobs = [j for j in self._state.jobs.values() if j.model == model and not j.state.is_final]
        wishes = {j.spec.resources.plan for j in jobs if j.spec.resources.plan is not None}
        if outlook is None or model not in self._told_s or not wishes <= {x.plan for x in outlook.estimates}:
            await self._tell(model, "its model is known")
        await self._trying.look()

    async def _refresh(self, model: str, why: str) -> None:
        await self._tell(model, why)
        await self._trying.look()

    async def _tell(self, model: str, why: str) -> None:
        """A new table of the model for the core."""
        jobs = [j for j in self._state.jobs.values() if j.model == model and j.shape is not None]
        if not jobs:
            return
        shape = ModelShape.from_dict(jobs[-1].shape or {})
        always = {a.plan for j in jobs for a in j.attempts[-1:] if a.plan is not None}
        always |= {j.spec.resources.plan for j in jobs if j.spec.resources.plan is not None}
        estimates: list[Estimate] = []
        measured = 0
        for devices in _types(self._state).values():
            known = await self._learned(model, shape, devices)
            measured += len({o.row.plan for o in known.online.observations})
            shapes = fleet.shapes(devices)[:SHAPES_MOST]
            found = await anyio.to_thread.run_sync(partial(known.ranked, shapes, KEPT_PER_SHAPE, always))
            estimates += [_estimate(devices, one) for one in found]
        self._told_s[model] = time.monotonic()
        outlook = Outlook(tuple(estimates), shape.global_batch, measured)
        await self._engine.post(e.SpeedLearned(at_s=time.time(), model=model, outlook=outlook, why=why))

    async def _learned(self, model: str, shape: ModelShape, devices: DeviceType) -> Knowledge:
        key = (model, devices.name)
        if key not in self._known:
            known = await anyio.to_thread.run_sync(self._remembered, model, shape, devices)
            self._known[key] = known
        return self._known[key]

    def _remembered(self, model: str, shape: ModelShape, devices: DeviceType) -> Knowledge:
        """With what was measured of the model before, whichever job it was."""
        with Store(self._path) as store:
            found = store.find(Key(model, devices.name))
        observations = [Observation(m.row, m.step_time_s) for m in found if m.kind == "measured"]
        online = OnlineFit.start(
            fleet.prior(devices.kind, self._probes.get(devices.name)), observations, fleet.beliefs(devices.kind)
        )
        refused = {m.row.plan for m in found if m.kind == "out-of-memory"}
        return Knowledge(shape, workload_of(shape), devices, online, refused)

    def _knowledge_of(self, job: Job, attempt: Attempt) -> Knowledge | None:
        names = {d.name for d in trials.held(attempt, self._state.hosts)}
        return self._known.get((job.model, names.pop())) if len(names) == 1 else None

    def forget(self) -> None:
        """What is in the store has changed: it is read again."""
        self._known.clear()
        self._put(self._fleet_changed)

    # --- questions ----------------------------------------------------------------------------------------------------

    async def knowledge(self, model: str, shape: ModelShape) -> list[Knowledge]:
        """What is known of a model on each type of device, the best-measured first."""
        found = [await self._learned(model, shape, devices) for devices in _types(self._state).values()]
        return sorted(found, key=lambda k: (-len(k.online.observations), k.devices.kind != "cuda", k.devices.name))


def _is_quiet(attempt: Attempt) -> bool:
    """No rank of it comes or goes."""
    return attempt.migration is None and not attempt.resuming and not attempt.retired


def _types(state: State) -> dict[str, DeviceType]:
    """The cluster's devices by name."""
    hosts: dict[str, list[Host]] = {}
    for host in state.hosts.values():
        for name in {d.name for d in host.devices}:
            hosts.setdefault(name, []).append(host)
    found: dict[str, DeviceType] = {}
    for name, some in sorted(hosts.items()):
        mine = [[d for d in host.devices if d.name == name] for host in some]
        cores = min(host.facts.cpu_cores // max(len(host.devices), 1) for host in some if host.facts is not None)
        found[name] = DeviceType(
            name=name,
            kind=mine[0][0].kind,
            per_host=tuple(sorted((len(devices) for devices in mine), reverse=True)),
            memory_bytes=min(d.memory_bytes for devices in mine for d in devices),
            cores_per_device=cores,
        )
    return found


def _estimate(devices: DeviceType, one: Ranked) -> Estimate:
    return Estimate(
        plan=one.plan,
        device_type=devices.name,
        shape=one.shape,
        step_time_s=one.step_time_s,
        lower_s=one.lower_s,
        upper_s=one.upper_s,
        device_bytes=one.memory.device_bytes,
        host_bytes=one.memory.host_bytes,
    )
