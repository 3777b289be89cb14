"""Inspection of a job's model before its first launch: its script runs without devices up to `train.run`."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import anyio

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.request_grant import INSPECTION_S
from clusterd.core.queueing.admission import hosts_without_login
from clusterd.daemon.execution.datasets import DataSets
from clusterd.daemon.execution.launching import CHUNK_BYTES, LAUNCH_TIMEOUT_S, LaunchRequests
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.facts import DESCRIPTION
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.process import in_a_line
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import AgentLost, ClusterError, TryLater
from clusterd.plans.model_shape import ModelShape
from clusterd.protocol.agent import RankExited
from clusterd.protocol.launch import DeviceSpec, RankSpec
from clusterd.protocol.requests import ForgetAttempt, ReadLog, ReadModel, StopRanks
from clusterd.types import HostId, JobId, JobSpec, Reason
from clusterd.units import duration

log = logging.getLogger(__name__)

TIDY_TIMEOUT_S = 30.0


class ModelInspector:
    """Inspects models on hosts."""

    def __init__(
        self, engine: Engine, hosts: HostRegistry, archive: Archive, datasets: DataSets, launches: LaunchRequests
    ) -> None:
        self._engine, self._hosts, self._archive = engine, hosts, archive
        self._state = engine.state
        self._datasets, self._launches = datasets, launches
        self._inspections: dict[JobId, anyio.CancelScope] = {}
        self._locks: WeakValueDictionary[tuple[HostId, str], anyio.Lock] = WeakValueDictionary()

    async def describe(self, decision: d.DescribeModel) -> None:
        """Inspect the model of a queued job; the outcome becomes an event."""
        event: e.Event | None = None
        with anyio.CancelScope() as scope:
            self._inspections[decision.job] = scope
            try:
                event = await self._inspect(decision, self._state.jobs[decision.job].spec)
            except AgentLost:
                pass  # HostDisconnected puts the question to another host
            except ClusterError as error:
                event = e.ModelNotDescribed(
                    at_s=time.time(),
                    job=decision.job,
                    why=str(error),
                    is_infrastructure=not error.is_of_job,
                    is_permanent=error.is_permanent,
                    is_full_disk=error.is_full_disk,
                )
            except Exception as error:
                # Nobody would ask again: its model would be learned for ever.
                log.exception("learning the model of %s failed by a bug", decision.job)
                why = in_a_line(error)
                event = e.ModelNotDescribed(at_s=time.time(), job=decision.job, why=why, is_infrastructure=True)
            finally:
                if self._inspections.get(decision.job) is scope:  # it may have been put to another host already
                    del self._inspections[decision.job]
        if event is not None:
            await self._engine.report(event)

    def job_is_over(self, job: JobId) -> None:
        """Cancel the inspection of a job that is over."""
        if job in self._inspections:
            self._inspections[job].cancel()

    async def end_abandoned(self, host: HostId, report: HostUp) -> None:
        """End inspections on a host whose result nobody awaits: the daemon restarted, or lost the host meanwhile."""
        rows = (row for row in report.hello.attempts if row.attempt == DESCRIPTION)
        for job in {row.job for row in rows if (host, row.job, DESCRIPTION) not in self._hosts.exits}:
            async with self._lock(host, job):
                await self._clean_up(host, report.account, job)

    def _lock(self, host: HostId, job: str) -> anyio.Lock:
        """Lock of one inspection: the clean-up of one must not hit the next on that host."""
        return self._locks.setdefault((host, job), anyio.Lock())

    async def describe_unsubmitted(self, spec: JobSpec, name: str) -> dict[str, Any]:
        """Inspect the model of an unsubmitted job on the least busy host.

        Raises:
            ClusterError: no host is up, or the script did not tell its model; its words.
        """
        wanted = spec.resources.hosts
        hosts = [h for h in self._state.hosts.values() if h.unusable is None]
        left_out = hosts_without_login(self._state, spec.account)
        usable = [h for h in hosts if h.id not in left_out and (not wanted or h.id in wanted)]
        if not usable and left_out:
            await self._hosts.log_in(spec.account)
            host, why = next(iter(left_out.items()))
            raise TryLater(f"no host lets the cluster in as {spec.account} ({host}: {why}): clusterd login")
        if not usable:
            raise ClusterError("no host that it may use is up (clusterd host ls)")
        host = min(usable, key=lambda h: (h.cores_used, h.id)).id
        decision = d.DescribeModel(cause=e.EventId(0), reason="estimate", job=JobId(name), host=host)
        event = await self._inspect(decision, spec)
        if isinstance(event, e.ModelDescribed):
            return event.shape
        raise ClusterError(event.why if isinstance(event, e.ModelNotDescribed) else f"{host} said nothing")

    async def _inspect(self, decision: d.DescribeModel, spec: JobSpec) -> e.Event:
        async with self._lock(decision.host, decision.job):
            return await self._inspect_locked(decision, spec)

    async def _inspect_locked(self, decision: d.DescribeModel, spec: JobSpec) -> e.Event:
        secrets = await self._archive.secrets(decision.job)
        try:
            python = await self._launches.prepare(decision.host, spec, (decision.job, DESCRIPTION, 1), secrets)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._clean_up(decision.host, spec.account, decision.job)  # a build goes on there
            raise
        base = self._launches.request_base(decision.job, DESCRIPTION, 1, spec, secrets)
        request = replace(
            base,
            python=python,
            env={**base.env, "CLUSTERD_DESCRIBE": "1"},
            datasets=(await self._datasets.where(decision.job, spec, [decision.host]))[decision.host],
            ranks=(RankSpec(rank=0, plan={}, device=DeviceSpec("cpu", threads=1)),),
        )
        try:
            with self._hosts.exits.expect((decision.host, decision.job, DESCRIPTION)) as ended:
                await self._hosts.request(decision.host, request, timeout_s=LAUNCH_TIMEOUT_S, account=spec.account)
                with anyio.move_on_after(INSPECTION_S) as waiting:
                    report = await ended
                if waiting.cancelled_caught:
                    why = f"its script did not reach clusterd.train.run within {duration(INSPECTION_S)}"
                    return e.ModelNotDescribed(at_s=time.time(), job=decision.job, why=why)
                if report is None:
                    raise AgentLost(f"{decision.host} was lost while it told the model of {decision.job}")
                wanted = ReadModel(decision.job, DESCRIPTION)
                answer = await self._hosts.request(decision.host, wanted, account=spec.account)
                if answer.model is None:
                    return await self._not_described(decision, spec.account, report)
                model = ModelShape.from_dict(answer.model).signature
                return e.ModelDescribed(at_s=time.time(), job=decision.job, shape=answer.model, model=model)
        finally:
            with anyio.CancelScope(shield=True):
                await self._clean_up(decision.host, spec.account, decision.job)

    async def _not_described(self, decision: d.DescribeModel, account: str, report: RankExited) -> e.Event:
        end = facts.rank_end(report)
        wanted = ReadLog(job=decision.job, attempt=DESCRIPTION, rank=0, offset=0, limit=CHUNK_BYTES)
        log_chunk = await self._hosts.request(decision.host, wanted, account=account)
        await self._archive.write_log(decision.job, DESCRIPTION, 0, log_chunk.data)
        lines = log_chunk.data.decode(errors="replace").strip().splitlines()
        tail = lines[-1] if lines else "it said nothing"
        if end.is_success:
            tail = 'its script ended without calling clusterd.train.run: call it, or submit with kind = "command"'
        return e.ModelNotDescribed(
            at_s=time.time(),
            job=decision.job,
            why=f"its model could not be built on {decision.host} ({end}): {tail}",
            is_infrastructure=end.reason.is_infrastructure or end.reason is Reason.NO_TORCH,
            is_permanent=end.reason is Reason.NO_TORCH,
        )

    async def _clean_up(self, host: HostId, account: str, job: str) -> None:
        stop = StopRanks(job, DESCRIPTION, 1, reason="described")
        try:
            with anyio.move_on_after(TIDY_TIMEOUT_S):
                await self._hosts.request(host, stop, timeout_s=None, account=account)
                await self._hosts.request(host, ForgetAttempt(job, DESCRIPTION), timeout_s=None, account=account)
        except ClusterError as error:
            log.info("%s keeps the description of %s for now: %s", host, job, error)
