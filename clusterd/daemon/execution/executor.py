"""Execution of decisions. Chooses nothing: every outcome, failure included, becomes an event for the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
import anyio.abc

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution.launching import LaunchRequests
from clusterd.daemon.execution.migration import Migrations
from clusterd.daemon.execution.model_description import ModelInspector
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine, Timers
from clusterd.daemon.process import in_a_line
from clusterd.daemon.storage.archive import Archive
from clusterd.daemon.storage.snapshot_replicas import SnapshotReplicas
from clusterd.errors import AgentLost, ClusterError, NotStarted, TryLater, without_host
from clusterd.protocol.control import PeersLost, TakeCheckpoint, UseCores
from clusterd.protocol.launch import LaunchRequest
from clusterd.protocol.requests import SendToRanks, SignalRanks, Stopped, StopRanks
from clusterd.types import AttemptState, HostId, JobKind

log = logging.getLogger(__name__)


class Executor:
    """One coroutine per decision, in the daemon's task group."""

    def __init__(
        self,
        engine: Engine,
        hosts: HostRegistry,
        archive: Archive,
        timers: Timers,
        tasks: anyio.abc.TaskGroup,
        launches: LaunchRequests,
        migrations: Migrations,
        inspector: ModelInspector,
        replicas: SnapshotReplicas,
    ) -> None:
        self._engine, self._hosts, self._archive, self._timers, self._tasks = engine, hosts, archive, timers, tasks
        self._state = engine.state
        self._launches, self._migrations, self._inspector, self._replicas = launches, migrations, inspector, replicas
        self._launching: dict[tuple[str, int], tuple[anyio.CancelScope, anyio.Event]] = {}
        self._asked_again: dict[tuple[str, int], d.LaunchAttempt] = {}
        self._stops = Stops(engine, hosts, archive)
        self._work: dict[type[d.Decision], Callable[[Any], Awaitable[None]]] = {
            d.LaunchAttempt: self._launch,
            d.StopAttempt: self._stop,
            d.DescribeModel: inspector.describe,
            d.StartMigration: migrations.run,
            d.AbortMigration: migrations.abort,
            d.ResumeAttempt: migrations.resume,
            d.AbortCollectives: self._cut_off,
            d.UseCores: self._use_cores,
            d.SignalRanks: self._signal,
            d.TakeCheckpoint: self._checkpoint,
            d.EndJob: self._forget,
        }

    def carry_out(self, decisions: Iterable[d.Decision]) -> None:
        """Start carrying out decisions; returns at once. Those without work, as `HoldJob`, are for people."""
        for decision in decisions:
            if (work := self._work.get(type(decision))) is not None:
                self._tasks.start_soon(self._guarded, work, decision)
            elif isinstance(decision, d.SetTimer):
                self._timers.changed()

    async def _guarded(self, work: Callable[[Any], Awaitable[None]], decision: d.Decision) -> None:
        """Carry out one decision; a bug there is logged and does not end the daemon."""
        try:
            await work(decision)
        except Exception:
            log.exception("%s was not carried out: %s", type(decision).__name__, decision.reason)

    async def _forget(self, decision: d.EndJob) -> None:
        self._inspector.job_is_over(decision.job)
        self._launches.job_is_over(decision.job)
        try:
            await self._archive.forget_secrets(decision.job)  # first: hosts that are silent take their time
        finally:
            await self._replicas.forget(decision.job)

    # --- launch -------------------------------------------------------------------------------------------------------

    async def _launch(self, decision: d.LaunchAttempt) -> None:
        key = (decision.job, decision.attempt)
        if key in self._launching:  # a reconnect asked again while the first is under way
            self._asked_again[key] = decision
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
            except Exception as error:
                # Said as an event, or nobody would end it: its job would be starting, and hold its devices, for ever.
                log.exception("launching %s.%d failed by a bug", decision.job, decision.attempt)
                event = _launch_failed(decision, decision.hosts[0], in_a_line(error))
            finally:
                del self._launching[key]
                done.set()
        again = self._asked_again.pop(key, None)
        if scope.cancelled_caught:
            return
        if event is not None:
            await self._engine.report(event)
        elif again is not None and not scope.cancel_called:  # the host that was lost is back already
            await self._launch(again)

    async def _launched(self, decision: d.LaunchAttempt) -> e.Event:
        spec = self._state.jobs[decision.job].spec
        secrets = await self._archive.secrets(decision.job)
        failures: list[e.LaunchFailed] = []
        try:
            restored = await self._restored(decision)
        except AgentLost:
            raise
        except NotStarted as error:
            return _launch_failed(decision, HostId(error.host), str(error))
        except ClusterError as error:
            return _launch_failed(decision, decision.hosts[0], f"the snapshot in memory could not be used: {error}")
        if restored is not None:
            return self._attempt_launched(decision, restored)

        def failed(host: HostId, error: ClusterError, is_infrastructure: bool = True) -> None:
            is_infrastructure = is_infrastructure and not error.is_of_job
            why = without_host(host, error)
            failures.append(_launch_failed(decision, host, why, is_infrastructure, error))

        async def on(host: HostId, request: LaunchRequest) -> None:
            attempt = self._state.attempt(decision.job, decision.attempt, decision.generation)
            if attempt is None or attempt.state is not AttemptState.LAUNCHING:
                # The host went and came back meanwhile, and its devices may be somebody else's by now.
                raise AgentLost(f"{decision.job}.{decision.attempt} is not wanted any more")
            try:
                await self._launches.send(host, request)
            except AgentLost:
                raise
            except ClusterError as error:
                failed(host, error)

        pythons: dict[HostId, str | None] = {}

        async def prepare(host: HostId) -> None:
            key = (decision.job, decision.attempt, decision.generation)
            try:
                pythons[host] = await self._launches.prepare(host, spec, key, secrets)
            except AgentLost:
                raise
            except ClusterError as error:
                failed(host, error)

        try:
            async with anyio.create_task_group() as group:
                for host in decision.hosts:
                    group.start_soon(prepare, host)
            requests: dict[HostId, LaunchRequest] = {}
            if not failures:
                try:
                    requests = await self._launches.requests(decision, spec, secrets, pythons)
                except AgentLost:
                    raise
                except NotStarted as error:
                    failed(HostId(error.host), error)
                except ClusterError as error:  # data that is not where it was said to be
                    failed(decision.hosts[0], error, is_infrastructure=isinstance(error, TryLater))
            if not failures:
                async with anyio.create_task_group() as group:
                    for host, request in requests.items():
                        group.start_soon(on, host, request)
        except* AgentLost as lost:
            raise lost.exceptions[0] from None
        return failures[0] if failures else self._attempt_launched(decision)

    def _attempt_launched(self, decision: d.LaunchAttempt, restored_step: int | None = None) -> e.AttemptLaunched:
        return e.AttemptLaunched(
            at_s=time.time(),
            job=decision.job,
            attempt=decision.attempt,
            generation=decision.generation,
            restored_step=restored_step,
            versions=self._launches.versions_on(decision),
        )

    async def _restored(self, decision: d.LaunchAttempt) -> int | None:
        """Restore ranks from a state snapshot in memory; returns its step, or None without one or after a failure."""
        job = self._state.jobs[decision.job]
        if job.spec.kind is not JobKind.ELASTIC or decision.attempt == 1 or decision.generation != 1:
            return None
        whole = self._replicas.newest(job)
        if whole is None or whole.step < job.checkpoint.step:
            return None
        try:
            return await self._migrations.restore(decision, whole, await self._replicas.admit(whole))
        except ClusterError as error:
            log.warning("%s cannot go on from the snapshot of step %d: %s", decision.job, whole.step, error)
            if not isinstance(error, AgentLost | NotStarted):  # then it is not the snapshot that is at fault
                await self._replicas.forget(decision.job)
            named, why = (decision.job, decision.attempt, decision.generation), "the snapshot was not whole"
            for host in decision.hosts:
                await self._hosts.request(host, StopRanks(*named, reason=why), timeout_s=None)
            raise

    async def _checkpoint(self, decision: d.TakeCheckpoint) -> None:
        await self._hosts.everywhere(decision, SendToRanks, message=TakeCheckpoint(decision.path).to_message())

    async def _signal(self, decision: d.SignalRanks) -> None:
        await self._hosts.everywhere(decision, SignalRanks, number=decision.number, first_only=decision.first_only)

    async def _use_cores(self, decision: d.UseCores) -> None:
        await self._hosts.everywhere(decision, SendToRanks, message=UseCores(decision.each).to_message())

    async def _cut_off(self, decision: d.AbortCollectives) -> None:
        await self._hosts.everywhere(decision, SendToRanks, message=PeersLost(decision.reason).to_message())

    # --- stop ---------------------------------------------------------------------------------------------------------

    async def _stop(self, decision: d.StopAttempt) -> None:
        launching = self._launching.get((decision.job, decision.attempt))
        if launching is not None:  # a launch still on its way must not arrive after the stop
            scope, done = launching
            scope.cancel()
            await done.wait()
        await self._stops.stop(decision)


def _launch_failed(
    decision: d.LaunchAttempt,
    host: HostId,
    why: str,
    is_infrastructure: bool = True,
    error: ClusterError | None = None,
) -> e.LaunchFailed:
    return e.LaunchFailed(
        at_s=time.time(),
        job=decision.job,
        attempt=decision.attempt,
        generation=decision.generation,
        host=host,
        why=why,
        is_infrastructure=is_infrastructure,
        is_permanent=error is not None and error.is_permanent,
        is_full_disk=error is not None and error.is_full_disk,
    )


AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Back-off between two tries to stop an attempt, as with a full disk; doubled each time."""

LATE_S = 60.0
"""Time after the grace period until a late stop is logged."""


class Stops:
    """Stops attempts on hosts and reports each stopped one as an event."""

    def __init__(self, engine: Engine, hosts: HostRegistry, archive: Archive) -> None:
        self._engine, self._hosts, self._archive = engine, hosts, archive
        self._state = engine.state

    async def stop(self, decision: d.StopAttempt) -> None:
        """Stop an attempt on one host; returns once nothing is left there, or the host is away."""
        answer = await self._stopped(decision)
        if answer is None:
            return
        if answer.swept:
            log.info("%s: swept %d stragglers of %s", decision.host, len(answer.swept), decision.job)
        try:
            await self._collect(decision, [row.rank for row in answer.ranks])
        except Exception:
            # Its devices are free all the same: nothing of it is left there but files.
            log.exception("logs and steps of attempt %s.%d stay on %s", decision.job, decision.attempt, decision.host)
        await self._engine.report(
            e.AttemptStopped(
                at_s=time.time(),
                job=decision.job,
                attempt=decision.attempt,
                generation=decision.generation,
                host=decision.host,
                ranks=tuple(facts.rank_report(row) for row in answer.ranks),
            )
        )

    async def _stopped(self, decision: d.StopAttempt) -> Stopped | None:
        """Reply of the host that nothing is left; None: it is no longer awaited here."""
        pause_s = AGAIN_S
        while True:
            late_timer = asyncio.get_running_loop().call_later(decision.grace_s + LATE_S, _log_late_stop, decision)
            try:
                request = StopRanks(
                    decision.job,
                    decision.attempt,
                    decision.generation,
                    decision.grace_s,
                    decision.reason,
                    decision.keep,
                    decision.done,
                    decision.save,
                )
                # No time-out: what does not end, as in a read from a dead file server, holds its devices.
                return await self._hosts.request(decision.host, request, timeout_s=None)
            except AgentLost:
                return None  # asked again when the host is back
            except ClusterError as error:
                which = f"attempt {decision.job}.{decision.attempt}"
                log.error(
                    "%s could not stop %s, and is asked again in %.0f s: %s", decision.host, which, pause_s, error
                )
            finally:
                late_timer.cancel()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)
            if not self._is_pending(decision):
                return None

    def _is_pending(self, decision: d.StopAttempt) -> bool:
        """True while the host is up and its reply is still awaited."""
        host = self._state.hosts.get(decision.host)
        if host is None or not host.reaches(self._state.account_of(decision.job)):
            return False
        attempt = self._state.attempt(decision.job, decision.attempt)
        pending: set[HostId] = set()
        if attempt is not None and attempt.generation == decision.generation:
            pending = attempt.stop.pending
        elif attempt is not None and decision.generation in attempt.retired:
            pending = attempt.retired[decision.generation].pending
        return decision.host in pending or (decision.job, decision.attempt, decision.generation) in host.orphans

    async def _collect(self, decision: d.StopAttempt, ranks: list[int]) -> None:
        """Fetch logs and steps of the attempt, and report the newest step."""
        which = (decision.job, decision.attempt, decision.generation)
        job = self._state.jobs.get(decision.job)
        streams = job is not None and (job.spec.is_attached or job.spec.resources.tasks > 1)
        await self._archive.fetch_attempt(self._hosts, decision.host, *which, ranks, streams=streams)
        last = await self._archive.last_step(*which) if 0 in ranks else None
        if last is not None:
            await self._engine.report(
                e.AttemptProgressed(
                    at_s=time.time(),
                    job=decision.job,
                    attempt=decision.attempt,
                    step=last["step"],
                    loss=last.get("loss"),
                    is_nan="loss" in last and last["loss"] is None,
                    step_time_s=last["time_s"],
                    first_loss=last["first_loss"],
                )
            )


def _log_late_stop(decision: d.StopAttempt) -> None:
    which = f"attempt {decision.job}.{decision.attempt}"
    log.warning("%s has not ended %s yet: until it does, its devices are not free", decision.host, which)
