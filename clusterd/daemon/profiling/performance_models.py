"""Performance models by model and device type, and the tables that the core reads.

Based on all stored measurements of the same model on the same type of device, and on hardware priors without any.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.core.lifecycle import trials
from clusterd.core.performance_table import Estimate, PerformanceTable, evenly
from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.journal.engine import Engine
from clusterd.plans.memory import Overhead, communicators, learn_overhead
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan, replicas
from clusterd.profiling import fleet
from clusterd.profiling.coefficients import INDEX, Prior
from clusterd.profiling.fit import FitOptions, from_other_type, share_cards, share_hardware
from clusterd.profiling.fleet import DeviceType, speed_up
from clusterd.profiling.knowledge import Knowledge, Ranked, workload_of
from clusterd.profiling.model import Row
from clusterd.profiling.online import Observation, OnlineFit
from clusterd.profiling.store import Key, Measurement, Store
from clusterd.types import JobId, JobSpec

log = logging.getLogger(__name__)

PLANS_PER_SHAPE = 4
OVERHEAD_NOISE_BYTES = 32 << 20
SHAPES_MOST = 256

PROOFS_MAX, FAMILIES_MAX = 1000, 50
"""Scripts whose proofs are remembered, and families of plans of each."""

LINK_EFFICIENCY = 0.8
"""Share of a link's peak rate that collectives of large messages reach, as NCCL's own tests do."""

ENOUGH_CORES = 1.01
"""Limit of a guaranteed job's step time, relative to that with a fair share of the host's cores."""


class PerformanceModels:
    """Knowledge by model and type of device; fits run in a thread."""

    def __init__(self, engine: Engine, store: Path) -> None:
        self._engine = engine
        self._state = engine.state
        self._path = store
        self._known: dict[tuple[str, str, str], Knowledge] = {}  # by model, type of device, and software
        self._software: dict[str, str] = {}  # of the newest job of each model
        self._published_s: dict[str, float] = {}  # time of each model's last table
        self._forgot = 0  # number of resets: data read before one is outdated
        self._stale: set[str] = set()  # models with a table from before the last reset
        self._probes: dict[str, dict[str, float]] = json.loads(engine.journal.fact("probes", "{}"))
        # Families of plans that a script was shown to train alike under, newest script last.
        self._proofs: dict[str, list[str]] = json.loads(engine.journal.fact("proofs", "{}"))
        # Largest measured overhead in bytes, by type of device and number of communicators.
        self._overheads: dict[str, dict[int, int]] = {
            name: {int(count): found for count, found in known.items()}
            for name, known in json.loads(engine.journal.fact("overheads", "{}")).items()
        }

    def of(self, job: Job, attempt: Attempt) -> Knowledge | None:
        """Knowledge of the job's model on its devices; None if there is none yet or the device types differ."""
        names = {d.name for d in trials.held(attempt, self._state.hosts)}
        if len(names) != 1:
            return None
        return self._known.get((job.inspection.model, names.pop(), self._environment(job.inspection.model)))

    def has_steps_of(self, model: str) -> bool:
        """True if steps of this model were ever measured."""
        return any(name == model and known.online.observations for (name, _, _), known in self._known.items())

    def key(self, job: Job, device_type: str, counts: Sequence[int]) -> Key:
        """Key for measurements of this job with the given number of devices on each host."""
        link = self._link(device_type) if len(counts) > 1 else ""
        return Key(job.inspection.model, device_type, _environment(job), link)

    async def on_each(self, model: str, shape: ModelShape) -> list[Knowledge]:
        """Knowledge of a model on each type of device, most measurements first."""
        found = [await self._on(model, shape, devices) for devices in types_of(self._state).values()]
        return sorted(found, key=lambda k: (-len(k.online.observations), k.devices.kind != "cuda", k.devices.name))

    async def keep(self, measurement: Measurement) -> None:
        """Store a measurement for later jobs of the same model."""

        def write() -> None:
            with Store(self._path) as store:
                store.add(measurement)

        await anyio.to_thread.run_sync(write)

    async def phases(self, model: str, device_type: str) -> dict[Row, tuple[tuple[str, float], ...]]:
        """Newest measured phases of a step, by plan and allocation."""
        key = Key(model, device_type, self._environment(model), self._link(device_type))
        found = await anyio.to_thread.run_sync(self._stored, key)
        return {m.row: m.phases for m in found if m.phases}

    # --- proofs -------------------------------------------------------------------------------------------------------

    def proven(self, job: JobId, spec: JobSpec) -> tuple[str, ...]:
        """Families of plans under which the job's script was shown to train what one process trains."""
        return tuple(self._proofs.get(_script(job, spec), ()))

    async def proved(self, job: JobId, spec: JobSpec, family: str) -> None:
        """Remember that a script needs no further proof of a family of plans."""
        script = _script(job, spec)
        known = self._proofs.pop(script, [])
        self._proofs[script] = [*known, family][-FAMILIES_MAX:] if family not in known else known
        for oldest in list(self._proofs)[:-PROOFS_MAX]:
            del self._proofs[oldest]
        await self._engine.journal.keep_fact("proofs", json.dumps(self._proofs))

    # --- probes -------------------------------------------------------------------------------------------------------

    def wants_probe(self, device_types: Iterable[str], hosts: int) -> bool:
        """True if a probe of one of these types, or of the links between the hosts, is missing."""
        link = "network_rate" if hosts > 1 else "compute_rate"
        return any(link not in self._probes.get(name, {}) for name in device_types)

    async def probed(self, device_type: str, figures: dict[str, Any]) -> None:
        """Update the prior of a type of device from a probe; measurements stay."""
        usable = {k: float(v) for k, v in figures.items() if k in INDEX and v > 0}
        self._probes[device_type] = {**self._probes.get(device_type, {}), **usable}
        await self._engine.journal.keep_fact("probes", json.dumps(self._probes))
        log.info("%s does %s", device_type, ", ".join(f"{k} {v:.3g}" for k, v in sorted(usable.items())))
        for (model, name, _), known in list(self._known.items()):
            if name == device_type:
                prior, options = self._beliefs(model, known.devices)
                observations = known.online.observations
                known.online = await anyio.to_thread.run_sync(OnlineFit.start, prior, observations, options)
                await self.publish(model, f"{name} was probed")

    async def measured_overhead(self, device_type: str, plan: Plan, measured_bytes: int) -> None:
        """Learn the device memory of a rank that no tensor uses; only a larger value than before counts."""
        count = communicators(plan)
        before = self._overheads.get(device_type, {})
        if measured_bytes <= before.get(count, 0) + OVERHEAD_NOISE_BYTES:
            return
        self._overheads[device_type] = {**before, count: measured_bytes}
        await self._engine.journal.keep_fact("overheads", json.dumps(self._overheads))
        overhead = self._overhead(device_type)
        log.info("a rank on %s takes %s beside its tensors", device_type, overhead)
        for (model, name, _), known in list(self._known.items()):
            if name == device_type:
                known.set_overhead(overhead)
                await self.publish(model, f"the memory that ranks on {name} take beside their tensors was measured")

    def _overhead(self, device_type: str) -> Overhead:
        return learn_overhead(self._overheads.get(device_type, {}))

    # --- tables for the core ------------------------------------------------------------------------------------------

    def age_s(self, model: str) -> float:
        """Seconds since the core last received a table of the model; infinite if never."""
        return time.monotonic() - self._published_s.get(model, float("-inf"))

    async def devices_changed(self) -> None:
        """Publish new tables for the shapes of the changed cluster, and those that a reset made stale."""
        now = types_of(self._state)
        self._known = {key: known for key, known in self._known.items() if now.get(key[1]) == known.devices}
        models = {
            job.inspection.model for job in self._state.jobs.values() if job.inspection.model and not job.state.is_final
        }
        stale, self._stale = self._stale, set()
        for model in sorted(models | stale):
            why = "what was measured changed" if model in stale else "the cluster's devices changed"
            await self.publish(model, why)

    async def described(self, model: str) -> None:
        """Publish a table for a new model, or if a job requests a plan that the table lacks."""
        self._software.pop(model, None)
        table = self._state.performance_tables.get(model)
        requested = {job.spec.resources.plan for job in self._alive(model)} - {None}
        if table is None or model not in self._published_s or not requested <= {x.plan for x in table.estimates}:
            await self.publish(model, "its model is known")

    async def publish(self, model: str, why: str) -> None:
        """Post a new table of the model to the core."""
        jobs = [j for j in self._state.jobs.values() if j.inspection.model == model and j.inspection.shape is not None]
        if not jobs:
            return
        shape = ModelShape.from_dict(jobs[-1].inspection.shape or {})
        always = {evenly(a.plan) for j in jobs for a in j.attempts[-1:] if a.plan is not None}
        always |= {j.spec.resources.plan for j in jobs if j.spec.resources.plan is not None}
        forgot = self._forgot
        estimates: list[Estimate] = []
        beyond: list[Estimate] = []
        measured = 0
        types = types_of(self._state)
        # Types on which the model ran come first: the others' priors follow from them.
        for known in await self.on_each(model, shape):
            devices = known.devices
            if not known.online.observations:
                prior, options = self._beliefs(model, devices)
                known.online = OnlineFit.start(prior, (), options)
            measured += len({o.row.plan for o in known.online.observations})
            shapes = fleet.shapes(devices)[:SHAPES_MOST]
            found = await anyio.to_thread.run_sync(partial(known.ranked, shapes, PLANS_PER_SHAPE, always))
            found = await anyio.to_thread.run_sync(known.with_cores, found)
            estimates += [_estimate(devices, one) for one in found]
            if more := shapes_together(devices, types.values()):
                # On devices of unequal speed a batch need not be one that plain replicas can cut evenly.
                plain = {replicas(count, shape.global_batch) for count in {sum(s) for s in more}}
                uneven = {plan for plan in plain if plan.shares}
                found = await anyio.to_thread.run_sync(partial(known.ranked, more, PLANS_PER_SHAPE, always | uneven))
                listed = {(x.plan, x.shape) for x in estimates if x.device_type == devices.name}
                beyond += [
                    _estimate(devices, one) for one in found if one.plan.pp == 1 and (one.plan, one.shape) not in listed
                ]
        if forgot == self._forgot:
            self._published_s[model] = time.monotonic()
        table = PerformanceTable(tuple(estimates), shape.global_batch, measured, tuple(beyond))
        await self._engine.report(e.SpeedLearned(at_s=time.time(), model=model, table=table, why=why))

    def forget(self) -> None:
        """Drop all fits and tables after a change of the store; they are rebuilt from it."""
        self._stale |= self._published_s.keys()
        self._known.clear()
        self._published_s.clear()
        self._forgot += 1

    def forget_others(self, models: Container[str]) -> None:
        """Drop fits of all models but these; their measurements stay in the store."""
        self._known = {key: known for key, known in self._known.items() if key[0] in models}
        self._software = {model: found for model, found in self._software.items() if model in models}
        self._published_s = {model: at_s for model, at_s in self._published_s.items() if model in models}
        self._stale = {model for model in self._stale if model in models}

    def _alive(self, model: str) -> Iterator[Job]:
        return (job for job in self._state.jobs.values() if job.inspection.model == model and not job.state.is_final)

    async def _on(self, model: str, shape: ModelShape, devices: DeviceType) -> Knowledge:
        key = (model, devices.name, self._environment(model))
        while key not in self._known:
            forgot = self._forgot
            wanted = Key(*key, self._link(devices.name))
            known = await anyio.to_thread.run_sync(self._load, wanted, shape, devices, *self._beliefs(model, devices))
            if forgot == self._forgot:
                self._known[key] = known
        return self._known[key]

    def _beliefs(self, model: str, devices: DeviceType) -> tuple[Prior, FitOptions]:
        """Prior of a model on such devices, from probes, from other models, and from this model on other types.

        Other models are ignored on CPUs: their ranks disturb each other, which one fit attributes to a slow link and
        another to slow caches.
        """
        known = self._link_rates(devices) | self._probes.get(devices.name, {})
        prior = fleet.prior(devices.kind, known)
        options = fleet.beliefs(devices.kind)
        others = {
            other: known.online.fit
            for (other, name, _), known in self._known.items()
            if other != model and name == devices.name and known.online.observations
        }
        if devices.kind == "cpu":
            return prior, options
        if others:
            prior, options = share_hardware(prior, others), share_cards(options, others)
        elsewhere = {
            name: known.online.fit
            for (other, name, _), known in self._known.items()
            if other == model and name != devices.name and known.online.observations
        }
        if told := speed_up(devices.name, elsewhere):
            nearest, by, uncertainty = told
            prior = from_other_type(prior, elsewhere[nearest], by, uncertainty)
        return prior, options

    def _environment(self, model: str) -> str:
        """Software of the newest job of a model; the next job likely uses it too."""
        if model not in self._software:  # cached: needed for every reported step
            newest = (
                j
                for j in reversed(self._state.jobs.values())
                if j.inspection.model == model and j.inspection.shape is not None
            )
            self._software[model] = next((_environment(job) for job in newest), "")
        return self._software[model]

    def _link(self, device_type: str) -> str:
        """Slowest link between hosts with such devices; empty if one is unknown."""
        hosts = [h for h in self._state.hosts.values() if any(d.name == device_type for d in h.devices)]
        slowest = min((h.facts.link_mbit for h in hosts if h.facts is not None), default=0)
        return f"{slowest} Mbit/s" if slowest else ""

    def _link_rates(self, devices: DeviceType) -> dict[str, float]:
        """Rates of links of hosts with such GPUs by their hardware, until a probe measures them."""
        if devices.kind != "cuda":
            return {}
        hosts = [h.facts for h in self._state.hosts.values() if any(d.name == devices.name for d in h.devices)]
        facts = [known for known in hosts if known is not None]
        local = [known.gpu_link_bytes_per_s for known in facts if len(known.devices) > 1]
        network = [max(known.rdma_mbit, known.link_mbit) * 1e6 / 8 for known in facts]
        rates = {"local_rate": min(local, default=0.0), "network_rate": min(network, default=0.0)}
        return {name: LINK_EFFICIENCY * rate for name, rate in rates.items() if rate}

    def _load(self, key: Key, shape: ModelShape, devices: DeviceType, prior: Prior, options: FitOptions) -> Knowledge:
        """Knowledge from stored measurements of the model, of any job."""
        found = self._stored(key)
        observations = [Observation(m.row, m.step_time_s) for m in found if m.kind == "measured"]
        online = OnlineFit.start(prior, observations, options)
        refused = {m.row.plan for m in found if m.kind == "out-of-memory"}
        return Knowledge(shape, workload_of(shape), devices, online, refused, self._overhead(devices.name))

    def _stored(self, key: Key) -> list[Measurement]:
        """Measurements under this key, else under any software and link."""
        with Store(self._path) as store:
            return store.find(key) or store.find(key, any_environment=True)


def _environment(job: Job) -> str:
    return str((job.inspection.shape or {}).get("environment", ""))


def types_of(state: State) -> dict[str, DeviceType]:
    """Device types of the cluster by name."""
    hosts: dict[str, list[Host]] = {}
    for host in state.hosts.values():
        for name in {d.name for d in host.devices}:
            hosts.setdefault(name, []).append(host)
    found: dict[str, DeviceType] = {}
    for name, some in sorted(hosts.items()):
        mine = [[d for d in host.devices if d.name == name] for host in some]
        cores = min(host.facts.cpu_cores // max(len(host.devices), 1) for host in some if host.facts is not None)
        most = min(host.facts.cpu_cores for host in some if host.facts is not None)
        found[name] = DeviceType(
            name=name,
            kind=mine[0][0].kind,
            per_host=tuple(sorted((len(devices) for devices in mine), reverse=True)),
            memory_bytes=min(d.memory_bytes for devices in mine for d in devices),
            cores_per_device=cores,
            cores_most=0 if mine[0][0].kind == "cpu" else most,
        )
    return found


def shapes_together(devices: DeviceType, all_types: Iterable[DeviceType]) -> list[tuple[int, ...]]:
    """Shapes over several hosts that combine a type with other types of its kind; empty without others."""
    alike = [one for one in all_types if one.kind == devices.kind]
    if len(alike) < 2:
        return []
    together = replace(devices, per_host=tuple(sorted((n for one in alike for n in one.per_host), reverse=True)))
    return [shape for shape in fleet.shapes(together)[:SHAPES_MOST] if len(shape) > 1]


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
        cores_per_device=_enough_cores(devices, one),
        core_times=one.core_times,
    )


def _enough_cores(devices: DeviceType, one: Ranked) -> int:
    """Fewest cores per device that are as fast as a fair share; 0 if any number is."""
    if not one.core_times:
        return 0
    fair = devices.cores_per_device
    return min(
        (n for n, step_s in one.core_times if step_s <= ENOUGH_CORES * one.step_time_s and n < fair), default=fair
    )


def _script(job: JobId, spec: JobSpec) -> str:
    """Digest of what decides the code that a job runs; one in a folder of the host is known by its id alone."""
    parts = [spec.snapshot or job, spec.command, sorted(spec.env.items()), spec.python, spec.uv, spec.requirements]
    return hashlib.sha256(json.dumps([*parts, spec.container]).encode()).hexdigest()[:16]
