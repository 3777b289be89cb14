"""Carries decisions out. Chooses nothing: every outcome, failure included, goes back to the scheduler as an event."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
import anyio.abc

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon import facts
from clusterd.daemon.archive import Archive
from clusterd.daemon.datasets import DataSets
from clusterd.daemon.engine import Engine
from clusterd.daemon.hosts import Hosts
from clusterd.daemon.keeper import Keeper
from clusterd.daemon.mover import Mover
from clusterd.daemon.timers import Timers
from clusterd.errors import AgentLost, ClusterError
from clusterd.types import Device, HostId, JobId, JobKind, JobSpec, RankPlace
from plans.model_shape import ModelShape
from plans.plan import Plan

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
DESCRIBE_TIMEOUT_S = 300.0
SNAPSHOT_EVERY = 20
"""Steps between snapshots in memory, where the job does not say."""

SNAPSHOT_MEMORY_SHARE = 0.25
"""Of a host's memory that snapshots may take for that."""

DESCRIPTION = 0
"""The number of the attempt that only tells a job's model."""


class Executor:
    """One coroutine per decision, in the daemon's task group."""

    def __init__(
        self,
        engine: Engine,
        hosts: Hosts,
        archive: Archive,
        timers: Timers,
        tasks: anyio.abc.TaskGroup,
        datasets: DataSets,
        keeper: Keeper,
    ) -> None:
        self._engine = engine
        self._hosts = hosts
        self._archive = archive
        self._datasets = datasets
        self._keeper = keeper
        self._timers = timers
        self._tasks = tasks
        self._launching: dict[tuple[str, int], tuple[anyio.CancelScope, anyio.Event]] = {}
        self._mover = Mover(engine, hosts, self._launch_standby)
        self._sending: dict[tuple[str, str], anyio.Lock] = {}

    def carry_out(self, decisions: Iterable[d.Decision]) -> None:
        """Begin; returns at once."""
        for decision in decisions:
            match decision:
                case d.LaunchAttempt():
                    self._begin(self._launch, decision)
                case d.StopAttempt():
                    self._begin(self._stop, decision)
                case d.DescribeModel():
                    self._begin(self._describe, decision)
                case d.StartMigration():
                    self._begin(self._mover.run, decision)
                case d.AbortMigration():
                    self._begin(self._mover.abort, decision)
                case d.ResumeAttempt():
                    self._begin(self._mover.resume, decision)
                case d.TakeCheckpoint():
                    self._begin(self._checkpoint, decision)
                case d.SetTimer():
                    self._timers.changed()
                case d.EndJob():
                    self._begin(self._forget, decision)
                case _:
                    pass  # said, not done: HoldJob and RequeueJob are for people

    def _begin(self, work: Callable[[Any], Awaitable[None]], decision: d.Decision) -> None:
        self._tasks.start_soon(self._guarded, work, decision)

    async def _guarded(self, work: Callable[[Any], Awaitable[None]], decision: d.Decision) -> None:
        """A bug in carrying out one decision must not take the daemon, and all other jobs, with it."""
        try:
            await work(decision)
        except Exception:
            log.exception("%s was not carried out: %s", type(decision).__name__, decision.reason)

    async def _forget(self, decision: d.EndJob) -> None:
        await self._keeper.forget(decision.job)
        await self._archive.forget_secrets(decision.job)

    # --- launch -------------------------------------------------------------------------------------------------------

    async def _launch(self, decision: d.LaunchAttempt) -> None:
        key = (decision.job, decision.attempt)
        if key in self._launching:  # a reconnect asked again while the first is under way
            return
        done = anyio.Event()
        event: e.Event | None = None
        with anyio.CancelScope() as scope:
            self._launching[key] = (scope, done)
            try:
                event = await self._launched(decision)
            except AgentLost as lost:
                # The reconnect tells what became of it, and the scheduler asks again.
                log.info("launching %s.%d: %s", decision.job, decision.attempt, lost)
            finally:
                del self._launching[key]
                done.set()
        if event is not None and not scope.cancelled_caught:
            await self._engine.post(event)

    async def _launched(self, decision: d.LaunchAttempt) -> e.Event:
        spec = self._engine.scheduler.state.jobs[decision.job].spec
        secrets = await self._archive.secrets(decision.job)
        failures: list[e.LaunchFailed] = []
        try:
            restored = await self._restored(decision)
        except AgentLost:
            raise
        except ClusterError as error:
            return e.LaunchFailed(
                at_s=time.time(),
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                host=decision.hosts[0],
                why=f"the snapshot in memory could not be used: {error}",
            )
        if restored is not None:
            return e.AttemptLaunched(
                at_s=time.time(),
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                restored_step=restored,
            )

        def failed(host: HostId, why: str, is_infrastructure: bool) -> None:
            failures.append(
                e.LaunchFailed(
                    at_s=time.time(),
                    job=decision.job,
                    attempt=decision.attempt,
                    generation=decision.generation,
                    host=host,
                    why=why,
                    is_infrastructure=is_infrastructure,
                )
            )

        async def on(host: HostId, request: dict[str, Any]) -> None:
            try:
                await self._hosts.request(host, "launch", timeout_s=180.0, **request)
            except AgentLost:
                raise
            except ClusterError as error:
                failed(host, str(error), is_infrastructure="no-torch" not in str(error))

        async def prepare(host: HostId) -> None:
            try:
                await self._send_snapshot(host, spec)
            except AgentLost:
                raise
            except ClusterError as error:
                failed(host, str(error), is_infrastructure=True)

        try:
            async with anyio.create_task_group() as group:
                for host in decision.hosts:
                    group.start_soon(prepare, host)
            requests: dict[HostId, dict[str, Any]] = {}
            if not failures:
                try:
                    requests = await self._requests(decision, spec, secrets)
                except AgentLost:
                    raise
                except ClusterError as error:  # data that is not where it was said to be
                    failed(decision.hosts[0], str(error), is_infrastructure=False)
            if not failures:
                async with anyio.create_task_group() as group:
                    for host, request in requests.items():
                        group.start_soon(on, host, request)
        except* AgentLost as lost:
            raise lost.exceptions[0] from None
        if failures:
            return failures[0]
        return e.AttemptLaunched(
            at_s=time.time(), job=decision.job, attempt=decision.attempt, generation=decision.generation
        )

    async def _restored(self, decision: d.LaunchAttempt) -> int | None:
        """The step of the snapshot in memory that the new ranks were filled from; None: there is none, or it failed."""
        job = self._engine.scheduler.state.jobs[decision.job]
        if job.spec.kind is not JobKind.ELASTIC or decision.attempt == 1 or decision.generation != 1:
            return None
        whole = self._keeper.newest(job)
        if whole is None or whole.step <= job.checkpoint_step:
            return None
        try:
            return await self._mover.restore(decision, whole, await self._keeper.admit(whole))
        except ClusterError as error:
            log.warning("%s cannot go on from the snapshot of step %d: %s", decision.job, whole.step, error)
            await self._keeper.forget(decision.job)
            which: dict[str, Any] = {
                "job": decision.job, "attempt": decision.attempt, "generation": decision.generation,
            }  # fmt: skip
            for host in decision.hosts:
                await self._hosts.request(host, "stop", grace_s=0.0, reason="the snapshot was not whole", **which)
            raise

    async def _launch_standby(self, decision: d.StartMigration, move: dict[str, Any]) -> None:
        """Start the new ranks of a migration; they wait to be told that the state is theirs."""
        spec = self._engine.scheduler.state.jobs[decision.job].spec
        target = d.LaunchAttempt(
            cause=decision.cause,
            reason=decision.reason,
            job=decision.job,
            attempt=decision.attempt,
            generation=decision.new_generation,
            plan=decision.new_plan,
            ranks=decision.new_ranks,
        )
        async with anyio.create_task_group() as group:
            for host in target.hosts:
                group.start_soon(self._send_snapshot, host, spec)
        requests = await self._requests(target, spec, await self._archive.secrets(decision.job))

        async def on(host: HostId, request: dict[str, Any]) -> None:
            here = {**move, "host": host}
            await self._hosts.request(host, "launch", timeout_s=180.0, **request, standby=True, move=here)

        async with anyio.create_task_group() as group:
            for host, request in requests.items():
                group.start_soon(on, host, request)

    async def _requests(
        self, decision: d.LaunchAttempt, spec: JobSpec, secrets: dict[str, str]
    ) -> dict[HostId, dict[str, Any]]:
        """What to ask of each host's agent."""
        state = self._engine.scheduler.state
        address, interface, port = "", "", 0
        first = decision.hosts[0]
        if spec.kind is not JobKind.COMMAND:
            who: dict[str, Any] = {
                "job": decision.job, "attempt": decision.attempt, "generation": decision.generation,
            }  # fmt: skip
            port = (await self._hosts.request(first, "port", **who))["port"]
            if len(decision.hosts) == 1:
                address, interface = "127.0.0.1", "lo"
            else:
                known = state.hosts[first].facts
                address = known.address if known else "127.0.0.1"
        requests: dict[HostId, dict[str, Any]] = {}
        restore = decision.restore if decision.generation == 1 else None  # later ones get the state from ranks
        for host in decision.hosts:
            here = [place for place in decision.ranks if place.host == host]
            host_facts = state.hosts[host].facts
            near = interface or (host_facts.interface if host_facts else "")
            devices = {device.id: device for device in state.hosts[host].devices}
            requests[host] = {
                "restore": restore,
                "snapshot_every": self._snapshot_every(decision.job, spec),
                "datasets": await self._datasets.where(decision.job, spec, host),
                **self._request_base(decision.job, decision.attempt, decision.generation, spec, secrets),
                "argv": sized(spec.command, decision.plan, len(decision.hosts)),
                "ranks": [
                    {
                        "rank": place.rank,
                        "world_size": len(decision.ranks),
                        "local_rank": index,
                        "local_world_size": len(here),
                        "master_addr": address,
                        "master_port": port,
                        "interface": near,
                        "plan": decision.plan.to_dict() if decision.plan else None,
                        "device": _device(place, devices, self._cores_of(spec)),
                        "hosts": len(decision.hosts),
                    }
                    for index, place in enumerate(here)
                ],
            }
            if spec.kind is JobKind.COMMAND:
                requests[host]["ranks"] = [_one_process(requests[host]["ranks"])]
        return requests

    def _snapshot_every(self, job: str, spec: JobSpec) -> int:
        """Steps between snapshots in memory: as asked, or where two copies of two take little of the hosts' memory."""
        if spec.kind is not JobKind.ELASTIC or spec.snapshot_every is not None:
            return spec.snapshot_every or 0
        state = self._engine.scheduler.state
        up = [h.facts.memory_bytes for h in state.hosts.values() if h.unusable is None and h.facts is not None]
        told = state.jobs[JobId(job)].shape if JobId(job) in state.jobs else None
        if len(up) < 2 or told is None:
            return 0
        shape = ModelShape.from_dict(told)
        state_bytes = shape.parameter_bytes * (1.0 + shape.optimizer_state_ratio)
        return SNAPSHOT_EVERY if 4 * state_bytes <= SNAPSHOT_MEMORY_SHARE * min(up) else 0

    def _cores_of(self, spec: JobSpec) -> int:
        return max(spec.resources.cpus // max(spec.resources.devices, 1), 1)

    def _request_base(
        self, job: str, attempt: int, generation: int, spec: JobSpec, secrets: dict[str, str]
    ) -> dict[str, Any]:
        return {
            "job": job,
            "attempt": attempt,
            "generation": generation,
            "kind": spec.kind.value,
            "argv": list(spec.command),
            "env": {"CLUSTERD_JOB_NAME": spec.name, **spec.env},
            "secrets": secrets,
            "snapshot": spec.snapshot,
            "workdir": None if spec.snapshot else spec.workdir,
            "python": spec.python,
            "grace_s": spec.grace_s,
        }

    async def _send_snapshot(self, host: HostId, spec: JobSpec) -> None:
        """The job's workdir to the host, once per content."""
        digest = spec.snapshot
        if digest is None:
            return
        # Two launches at a time on one host must not send the same content twice.
        async with self._sending.setdefault((host, digest), anyio.Lock()):
            if (await self._hosts.request(host, "snapshot_has", digest=digest))["have"]:
                return
            offset = 0
            async for data, last in self._archive.snapshot_chunks(digest, CHUNK_BYTES):
                await self._hosts.request(
                    host, "snapshot_put", timeout_s=120.0, digest=digest, offset=offset, data=data, last=last
                )
                offset += len(data)

    async def _checkpoint(self, decision: d.TakeCheckpoint) -> None:
        message = {"event": "checkpoint", "path": decision.path}
        which: dict[str, Any] = {"job": decision.job, "attempt": decision.attempt, "generation": decision.generation}
        for host in decision.hosts:
            await self._hosts.request(host, "tell", message=message, **which)

    # --- stop ---------------------------------------------------------------------------------------------------------

    async def _stop(self, decision: d.StopAttempt) -> None:
        launching = self._launching.get((decision.job, decision.attempt))
        if launching is not None:  # a launch still on its way must not arrive after the stop
            scope, done = launching
            scope.cancel()
            await done.wait()
        try:
            answer = await self._hosts.request(
                decision.host,
                "stop",
                timeout_s=decision.grace_s + 60.0,
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                grace_s=decision.grace_s,
                reason=decision.reason,
            )
        except AgentLost:
            return  # asked again when the host is back
        except ClusterError as error:
            log.error("%s could not stop attempt %s.%d: %s", decision.host, decision.job, decision.attempt, error)
            return
        if answer.get("swept"):
            log.info("%s: swept %d stragglers of %s", decision.host, len(answer["swept"]), decision.job)
        which = (decision.job, decision.attempt, decision.generation)
        await self._archive.fetch_attempt(self._hosts, decision.host, *which, answer["ranks"])
        last = await self._archive.last_step(*which) if _has_first(answer["ranks"]) else None
        if last is not None:
            await self._engine.post(
                e.AttemptProgressed(
                    at_s=time.time(),
                    job=decision.job,
                    attempt=decision.attempt,
                    step=last["step"],
                    loss=last["loss"],
                    step_time_s=last["time_s"],
                    first_loss=last["first_loss"],
                )
            )
        await self._engine.post(
            e.AttemptStopped(
                at_s=time.time(),
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                host=decision.host,
                ranks=tuple(facts.rank_report(r) for r in answer["ranks"]),
            )
        )

    # --- describe -----------------------------------------------------------------------------------------------------

    async def _describe(self, decision: d.DescribeModel) -> None:
        try:
            event = await self._described(decision)
        except AgentLost:
            return  # HostDisconnected puts the question to another host
        except ClusterError as error:
            event = e.ModelNotDescribed(at_s=time.time(), job=decision.job, why=str(error), is_infrastructure=True)
        await self._engine.post(event)

    async def _described(self, decision: d.DescribeModel) -> e.Event:
        spec = self._engine.scheduler.state.jobs[decision.job].spec
        return await self._told(decision, spec)

    async def describe_unsubmitted(self, spec: JobSpec, name: str) -> dict[str, Any]:
        """The model of a job that is not submitted, told by the least busy host.

        Raises:
            ClusterError: no host is up, or the script did not tell its model; its words.
        """
        wanted = spec.resources.hosts
        hosts = [h for h in self._engine.scheduler.state.hosts.values() if h.unusable is None]
        usable = [h for h in hosts if not wanted or h.id in wanted]
        if not usable:
            raise ClusterError("no host that it may use is up (clusterd host ls)")
        host = min(usable, key=lambda h: (h.cores_used, h.id)).id
        decision = d.DescribeModel(cause=e.EventId(0), reason="estimate", job=JobId(name), host=host)
        event = await self._told(decision, spec)
        if isinstance(event, e.ModelDescribed):
            return event.shape
        raise ClusterError(event.why if isinstance(event, e.ModelNotDescribed) else f"{host} said nothing")

    async def _told(self, decision: d.DescribeModel, spec: JobSpec) -> e.Event:
        secrets = await self._archive.secrets(decision.job)
        await self._send_snapshot(decision.host, spec)
        base = self._request_base(decision.job, DESCRIPTION, 1, spec, secrets)
        who: dict[str, Any] = {"job": decision.job, "attempt": DESCRIPTION, "generation": 1}
        base["env"] = {**base["env"], "CLUSTERD_DESCRIBE": "1"}
        base["datasets"] = await self._datasets.where(decision.job, spec, decision.host)
        rank = {
            "rank": 0,
            "world_size": 1,
            "local_rank": 0,
            "local_world_size": 1,
            "master_addr": "",
            "master_port": 0,
            "interface": "",
            "plan": {},
            "device": {"kind": "cpu", "uuid": "", "cores": [], "threads": 1},
            "hosts": 1,
        }
        ended = self._hosts.expect_exit(decision.host, decision.job, DESCRIPTION)
        try:
            await self._hosts.request(decision.host, "launch", timeout_s=180.0, **base, ranks=[rank])
            with anyio.move_on_after(DESCRIBE_TIMEOUT_S) as waiting:
                report = await ended.wait()
            if waiting.cancelled_caught:
                why = f"its script did not reach clusterd.train.run within {DESCRIBE_TIMEOUT_S:.0f} s"
                return e.ModelNotDescribed(at_s=time.time(), job=decision.job, why=why)
            if report is None:
                raise AgentLost(f"{decision.host} was lost while it told the model of {decision.job}")
            told = await self._hosts.request(decision.host, "model", job=decision.job, attempt=DESCRIPTION)
            if told["model"] is None:
                return await self._not_described(decision, report)
            model = ModelShape.from_dict(told["model"]).signature
            return e.ModelDescribed(at_s=time.time(), job=decision.job, shape=told["model"], model=model)
        finally:
            ended.close()
            with anyio.CancelScope(shield=True), anyio.move_on_after(30.0):
                await self._tidy_description(decision.host, who)

    async def _not_described(self, decision: d.DescribeModel, report: dict[str, Any]) -> e.Event:
        end = facts.rank_end(report)
        said = await self._hosts.request(
            decision.host, "logs", job=decision.job, attempt=DESCRIPTION, rank=0, offset=0, limit=CHUNK_BYTES
        )
        await self._archive.write_log(decision.job, DESCRIPTION, 0, said["data"])
        lines = said["data"].decode(errors="replace").strip().splitlines()
        tail = lines[-1] if lines else "it said nothing"
        if end.is_success:
            tail = 'its script ended without calling clusterd.train.run: call it, or submit with kind = "command"'
        return e.ModelNotDescribed(
            at_s=time.time(),
            job=decision.job,
            why=f"its model could not be built on {decision.host} ({end}): {tail}",
            is_infrastructure=end.reason.is_infrastructure,
        )

    async def _tidy_description(self, host: HostId, who: dict[str, Any]) -> None:
        try:
            await self._hosts.request(host, "stop", grace_s=0.0, reason="described", **who)
            await self._hosts.request(host, "forget", job=who["job"], attempt=DESCRIPTION)
        except ClusterError as error:
            log.info("%s keeps the description of %s for now: %s", host, who["job"], error)


def sized(command: Iterable[str], plan: Plan | None, hosts: int) -> list[str]:
    """The argv with a plan's sizes filled in: ``--tp {tp}``; braces around anything else stay as they are."""
    if plan is None:
        return list(command)
    values = {
        "dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "zero": plan.zero, "accumulation": plan.accumulation,
        "devices": plan.ranks, "hosts": hosts,
    }  # fmt: skip
    names = "|".join(values)
    return [re.sub(rf"\{{({names})\}}", lambda found: str(values[found[1]]), word) for word in command]


def _has_first(ranks: list[dict[str, Any]]) -> bool:
    """Rank 0, which writes the steps, was on this host."""
    return any(report["rank"] == 0 for report in ranks)


def _device(place: RankPlace, devices: dict[Any, Device], cores: int) -> dict[str, Any]:
    if place.device is None:
        return {"kind": "cpu", "uuid": "", "cores": [], "threads": cores}
    device = devices[place.device]
    threads = max(len(device.cores), 1) if device.kind == "cpu" else cores
    return {"kind": device.kind, "uuid": device.uuid, "cores": list(device.cores), "threads": threads}


def _one_process(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A command is one process, whatever devices it holds."""
    devices = [r["device"] for r in ranks]
    cores = sorted({core for device in devices for core in device["cores"]})
    uuids = [device["uuid"] for device in devices if device["kind"] == "cuda"]
    merged = {"kind": devices[0]["kind"], "uuid": ",".join(uuids), "cores": cores}
    merged["threads"] = sum(device["threads"] for device in devices)
    return {**ranks[0], "world_size": 1, "local_world_size": 1, "device": merged}
