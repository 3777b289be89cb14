"""Launch requests to agents, also those of a migration's target ranks, and the workdirs sent ahead of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import anyio

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.booked import NOTHING, Booked
from clusterd.core.data_locality import CHECKPOINT, split_step
from clusterd.daemon.execution.datasets import DataSets
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.profiling.performance_models import PerformanceModels
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import AgentLost, ClusterError, NotStarted, without_host
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.process_attributes import SEED_VARIABLE
from clusterd.protocol.launch import (
    FORK_SERVER_START_TIMEOUT_S,
    STEPS_VARIABLE,
    DatasetSpec,
    DeviceSpec,
    LaunchRequest,
    MigrationRequest,
    RankSpec,
)
from clusterd.protocol.requests import BuildEnvironment, HasWorkdir, LeasePort, PutWorkdir
from clusterd.types import TEMPLATE_NAMES, AttemptState, Device, HostId, JobId, JobKind, JobSpec, RankPlace

CHUNK_BYTES = 1 << 20
LAUNCH_TIMEOUT_S = FORK_SERVER_START_TIMEOUT_S + 60.0
"""Longer than an agent waits for an environment to start, so that the agent's error arrives."""

SNAPSHOT_EVERY = 20
"""Steps between state snapshots where the job does not say."""

SNAPSHOT_EVERY_S = 2.0
"""Least seconds between state snapshots, for jobs with short steps."""

SNAPSHOT_MEMORY_SHARE = 0.25
"""Share of a host's memory that automatic state snapshots may take."""


class InputTaken(ClusterError):
    """The input that a job was submitted with is gone."""

    is_permanent = is_of_job = True


class LaunchRequests:
    """Makes and sends launch requests, and workdirs ahead of them."""

    def __init__(
        self,
        engine: Engine,
        hosts: HostRegistry,
        archive: Archive,
        datasets: DataSets,
        models: PerformanceModels,
    ) -> None:
        self._engine, self._hosts, self._archive = engine, hosts, archive
        self._state = engine.state
        self._datasets, self._models = datasets, models
        self._versions: dict[str, dict[HostId, dict[str, str]]] = {}  # of the newest launches of a job on each host
        self._sending: WeakValueDictionary[tuple[str, str, str], anyio.Lock] = WeakValueDictionary()

    async def requests(
        self, decision: d.LaunchAttempt, spec: JobSpec, secrets: dict[str, str], pythons: Mapping[HostId, str | None]
    ) -> dict[HostId, LaunchRequest]:
        """Launch request for the agent of each host.

        Args:
            pythons: interpreter on each host, from `prepare`.
        Raises:
            NotStarted: a host does not have a device any more that its ranks were given.
            InputTaken: an earlier attempt read its input.
            ClusterError: a host is silent or refuses, or data is not where it was said to be.
        """
        state = self._state
        if spec.reads_input:
            for former in state.jobs[decision.job].attempts[:-1]:
                if any(was == AttemptState.RUNNING for was, _ in former.history):
                    raise InputTaken(f"its input went to attempt {former.number}, and is not there a second time")
        address, interface, port = "", "", 0
        first = decision.hosts[0]
        tasks = spec.resources.tasks
        if spec.kind is not JobKind.COMMAND or len(decision.hosts) > 1 or tasks > 1:
            wanted = LeasePort(decision.job, decision.attempt, decision.generation)
            port = (await self._hosts.request(first, wanted)).port
            if len(decision.hosts) == 1:
                address, interface = "127.0.0.1", "lo"
            else:
                known = state.hosts[first].facts
                address = known.address if known else "127.0.0.1"
        requests: dict[HostId, LaunchRequest] = {}
        restored = decision.restore if decision.generation == 1 else None  # later ones get the state from ranks
        names = {d.name for host in decision.hosts for d in state.hosts[host].devices}
        probe = spec.kind is JobKind.ELASTIC and self._models.wants_probe(names, len(decision.hosts))
        snapshot_every = self._snapshot_every(decision.job, spec, decision.plan)
        datasets = await self._datasets.where(decision.job, spec, decision.hosts)
        booked = self._booked(decision)
        base = self.request_base(decision.job, decision.attempt, decision.generation, spec, secrets)
        token = self._datasets.token(f"{decision.job}/{decision.attempt}/{decision.generation}/group")
        base = replace(base, record=await self._hosts.records.make(decision.job), group_token=token)
        for node, host in enumerate(decision.hosts):
            here = [place for place in decision.ranks if place.host == host]
            host_facts = state.hosts[host].facts
            near = interface or (host_facts.interface if host_facts else "")
            devices = {device.id: device for device in state.hosts[host].devices}
            ranks = [
                RankSpec(
                    rank=place.rank,
                    world_size=len(decision.ranks),
                    local_rank=index,
                    local_world_size=len(here),
                    master_addr=address,
                    master_port=port,
                    interface=near,
                    plan=decision.plan.to_dict() if decision.plan else None,
                    device=_device(place, devices, booked.cores.get(host, 0) // len(here)),
                    hosts=len(decision.hosts),
                )
                for index, place in enumerate(here)
            ]
            if spec.kind is JobKind.COMMAND:
                ranks = [_one_process(ranks, node, len(decision.hosts))]
            requests[host] = replace(
                base,
                argv=tuple(filled_in(spec.command, spec.continues or decision.job, decision.plan, len(decision.hosts))),
                ranks=tuple(ranks),
                python=pythons[host],
                restore=_checkpoint_path(restored, datasets[host]),
                snapshot_every=snapshot_every,
                probe=probe,
                proven=self._models.proven(decision.job, spec) if spec.kind is JobKind.ELASTIC else (),
                note=decision.reason if decision.plan and len(decision.ranks) < spec.resources.devices else "",
                datasets=datasets[host],
                cores=booked.cores.get(host, 0),
                memory_bytes=booked.memory_bytes.get(host, 0) if spec.resources.memory_bytes else 0,
                output=output_path(spec, decision.job, host, node),
                reads_input=spec.reads_input and node == 0,
                all_tasks=tasks,
            )
        return requests

    def _snapshot_every(self, job: str, spec: JobSpec, plan: Plan | None) -> int:
        """Steps between state snapshots: as requested, or where they take little of the hosts' memory.

        On one host too: ranks die more often than hosts.
        """
        if spec.kind is not JobKind.ELASTIC or spec.snapshot_every is not None:
            return spec.snapshot_every or 0
        state = self._state
        up = [h.facts.memory_bytes for h in state.hosts.values() if h.unusable is None and h.facts is not None]
        shape = state.jobs[JobId(job)].inspection.shape if JobId(job) in state.jobs else None
        if not up or shape is None:
            return 0
        copies = 2 if len(up) == 1 else 4  # two take turns, and so do those that a second host has
        if copies * ModelShape.from_dict(shape).state_bytes > SNAPSHOT_MEMORY_SHARE * min(up):
            return 0
        known = state.jobs[JobId(job)]
        table = state.performance_tables.get(known.inspection.model)
        predicted = [x.step_time_s for x in table.estimates if x.plan == plan] if table is not None else []
        step_s = known.progress.step_time_s or min(predicted, default=SNAPSHOT_EVERY_S / SNAPSHOT_EVERY)
        return max(SNAPSHOT_EVERY, round(SNAPSHOT_EVERY_S / max(step_s, 1e-4)))

    def _booked(self, decision: d.LaunchAttempt) -> Booked:
        """CPU cores and host memory booked for these ranks on each host."""
        attempt = self._state.jobs[decision.job].attempt
        if attempt is None:
            return NOTHING
        coming = attempt.migration
        of = coming if coming is not None and coming.generation == decision.generation else attempt
        return of.booked

    def request_base(
        self, job: str, attempt: int, generation: int, spec: JobSpec, secrets: dict[str, str]
    ) -> LaunchRequest:
        """Launch request with what all launches of the job have in common, without ranks."""
        known = self._state.jobs.get(JobId(job))
        return LaunchRequest(
            job=job,
            born_s=known.created_s if known is not None else 0.0,
            attempt=attempt,
            generation=generation,
            kind=spec.kind.value,
            argv=tuple(spec.command),
            ranks=(),
            env=job_variables(spec),
            secrets=secrets,
            snapshot=spec.snapshot,
            workdir=None if spec.snapshot else spec.workdir,
            python=spec.python,
            container=spec.container,
            mounts=spec.mounts,
            clean_env=spec.clean_env,
            is_attached=spec.is_attached,
            grace_s=spec.grace_s,
            final=spec.checkpoint_path(job, "final") if spec.checkpoint_directory is not None else None,
        )

    async def prepare(
        self, host: HostId, spec: JobSpec, key: tuple[str, int, int], secrets: dict[str, str]
    ) -> str | None:
        """Send the job's workdir to a host, and have it build the job's environment, where it lacks them.

        Args:
            key: job, number of the attempt, generation.
        Returns:
            The interpreter on that host, as `LaunchRequest.python` takes it.
        Raises:
            ClusterError: the host is silent or refuses, or the environment cannot be built.
        """
        await self._send_snapshot(host, spec)
        if not spec.is_built:
            return spec.python
        job, attempt, generation = key
        wanted = BuildEnvironment(
            job,
            attempt,
            generation,
            uv=spec.uv,
            requirements=spec.requirements,
            python=spec.python,
            snapshot=spec.snapshot,
            workdir=None if spec.snapshot else spec.workdir,
            env=dict(spec.env),
            secrets=secrets,
        )
        look = replace(wanted, only_look=True)
        if found := (await self._hosts.request(host, look, timeout_s=None, account=spec.account)).python:
            return found
        is_known = job in self._state.jobs  # else it is estimated before its submission
        named: dict[str, Any] = {"job": JobId(job), "attempt": attempt, "generation": generation, "host": host}
        if is_known:
            await self._engine.report(e.EnvironmentBuildStarted(at_s=time.time(), **named))
        built = await self._hosts.request(host, wanted, timeout_s=None, account=spec.account)
        if is_known:
            await self._engine.report(e.EnvironmentBuilt(at_s=time.time(), seconds=built.seconds, **named))
        return built.python

    async def send(self, host: HostId, request: LaunchRequest) -> None:
        """Have a host's agent start its ranks.

        Raises:
            ClusterError: it is silent or refuses.
        """
        launched = await self._hosts.request(host, request, timeout_s=LAUNCH_TIMEOUT_S)
        self._versions.setdefault(request.job, {})[host] = launched.versions

    def versions_on(self, decision: d.LaunchAttempt) -> dict[HostId, dict[str, str]]:
        """Versions of the software under the ranks of a launch, by host."""
        known = self._versions.get(decision.job, {})
        return {host: known[host] for host in decision.hosts if known.get(host)}

    def job_is_over(self, job: str) -> None:
        """Forget what is known of a job that is over."""
        self._versions.pop(job, None)

    async def prepare_hosts(self, decision: d.StartMigration) -> dict[HostId, str | None]:
        """Bring workdir and environment to the hosts of target ranks; returns the interpreter on each."""
        spec = self._state.jobs[decision.job].spec
        secrets = await self._archive.secrets(decision.job)
        key = (decision.job, decision.attempt, decision.new_generation)
        pythons: dict[HostId, str | None] = {}

        async def on(host: HostId) -> None:
            with _not_started(host):
                pythons[host] = await self.prepare(host, spec, key, secrets)

        async with anyio.create_task_group() as group:
            for host in dict.fromkeys(place.host for place in decision.new_ranks):
                group.start_soon(on, host)
        return pythons

    async def start_standby(self, decision: d.StartMigration, move: MigrationRequest) -> None:
        """Start the target ranks of a migration; they wait for the switch."""
        spec = self._state.jobs[decision.job].spec
        target = d.LaunchAttempt(
            cause=decision.cause,
            reason=decision.reason,
            job=decision.job,
            attempt=decision.attempt,
            generation=decision.new_generation,
            plan=decision.new_plan,
            ranks=decision.new_ranks,
        )
        pythons = await self.prepare_hosts(decision)
        requests = await self.requests(target, spec, await self._archive.secrets(decision.job), pythons)

        async def on(host: HostId, request: LaunchRequest) -> None:
            with _not_started(host):
                await self.send(host, replace(request, standby=True, move=replace(move, host=host)))

        async with anyio.create_task_group() as group:
            for host, request in requests.items():
                group.start_soon(on, host, request)

    async def _send_snapshot(self, host: HostId, spec: JobSpec) -> None:
        """Send the job's workdir to a host that lacks it."""
        digest = spec.snapshot
        if digest is None:
            return
        # Two launches at a time on one host must not send the same content twice.
        lock = self._sending.setdefault((host, spec.account, digest), anyio.Lock())
        async with lock:
            if (await self._hosts.request(host, HasWorkdir(digest), account=spec.account)).have:
                return
            offset = 0
            async for data, last in self._archive.snapshot_chunks(digest, CHUNK_BYTES):
                put = PutWorkdir(digest, offset, data, last)
                await self._hosts.request(host, put, timeout_s=120.0, account=spec.account)
                offset += len(data)


@contextmanager
def _not_started(host: HostId) -> Iterator[None]:
    """Name the host where target ranks could not start, unless its agent was lost."""
    try:
        yield
    except AgentLost:
        raise
    except ClusterError as error:
        raise NotStarted(host, without_host(host, error)) from error


def job_variables(spec: JobSpec) -> dict[str, str]:
    """Variables that are the same for all processes of a job: its own, its name, and its place in an array."""
    variables = {"CLUSTERD_JOB_NAME": spec.name}
    if spec.array is not None:
        variables["CLUSTERD_ARRAY_JOB_ID"] = spec.array.id
        variables["CLUSTERD_ARRAY_TASK_ID"] = str(spec.array.index)
    if spec.steps is not None:
        variables[STEPS_VARIABLE] = str(spec.steps)
    if spec.continues is not None:
        variables[SEED_VARIABLE] = spec.continues
    return {**variables, **spec.env}


def _checkpoint_path(restored: str | None, datasets: Mapping[str, DatasetSpec]) -> str | None:
    """Path of the checkpoint for the ranks of a host: a folder, or a name by which the host that has it serves it."""
    if restored is None or restored.startswith("/"):
        return restored
    path = datasets[CHECKPOINT].path if CHECKPOINT in datasets else None
    return f"{path or f'clusterd://{CHECKPOINT}'}{split_step(restored)[1]}"


def filled_in(command: Iterable[str], job: str, plan: Plan | None, hosts: int) -> list[str]:
    """Fill a command template: ``--tp {tp} --save /shared/{job}``; other braces stay as they are."""
    if plan is None:
        return list(command)
    sizes = (job, plan.dp, plan.tp, plan.pp, plan.zero, plan.accumulation, plan.ranks, hosts)
    values = dict(zip(TEMPLATE_NAMES, sizes, strict=True))
    names = "|".join(values)
    return [re.sub(rf"\{{({names})\}}", lambda found: str(values[found[1]]), argument) for argument in command]


def output_path(spec: JobSpec, job: str, host: str, node: int) -> str:
    """Path of the file for the output of one host's process; empty: it has none, or only that of another host."""
    array = spec.array
    values = {
        "x": spec.name, "j": job, "J": job, "A": (array.id or job) if array else job, "a": array.index if array else 0,
        "u": spec.user, "N": host, "n": node, "t": node, "s": 0, "%": "%",
    }  # fmt: skip
    if node and not re.search(r"%\d*[Nnt]", spec.output.replace("%%", "")):
        return ""
    return re.sub(r"%(\d*)([A-Za-z%])", lambda found: str(values[found[2]]).zfill(int(found[1] or 0)), spec.output)


def _device(place: RankPlace, devices: dict[Any, Device], cores: int) -> DeviceSpec:
    threads = max(cores, 1)
    if place.device is None:
        return DeviceSpec("cpu", threads=threads)
    device = devices.get(place.device)
    if device is None:
        raise NotStarted(place.host, f"it has no {place.device} any more")
    if device.kind == "cpu":  # its cores are its own
        threads = max(len(device.cores), 1)
    return DeviceSpec(device.kind, device.uuid, tuple(device.cores), threads)


def _one_process(ranks: Sequence[RankSpec], node: int, nodes: int) -> RankSpec:
    """A command is one process on each of its hosts, whatever devices it holds there."""
    devices = [rank.device for rank in ranks]
    merged = DeviceSpec(
        devices[0].kind,
        ",".join(device.uuid for device in devices if device.kind == "cuda"),
        tuple(sorted({core for device in devices for core in device.cores})),
        sum(device.threads for device in devices),
    )
    if nodes == 1:
        return replace(ranks[0], world_size=1, local_world_size=1, device=merged)
    return replace(ranks[0], local_rank=0, local_world_size=len(ranks), device=merged, node=node)
