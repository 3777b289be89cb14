"""One migration as a saga of six phases, each with its measured time and an undo.

====================  =================================================================================================
prepare               new ranks start, build the model without storage, meet, and allocate, while the old ones train
quiesce               the old ranks end the same step
transfer              they put what others need of them into the hosts' stores; hosts fetch what they lack; new ranks
                      read their boxes
verify                step, checksums and boxes are right on every new rank
switch                one journaled event: from here on the new ranks are the job
resume                they train
====================  =================================================================================================

Any failure before the switch is `MigrationFailed`: the scheduler lets the old ranks go on and ends the new ones.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.abc

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution.launching import LaunchRequests
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostDown
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.snapshot_replicas import CompleteSnapshot
from clusterd.errors import ClusterError, NotStarted, first_of
from clusterd.protocol.agent import RankExited
from clusterd.protocol.launch import Address, MigrationRequest, SideRequest, SnapshotSegments
from clusterd.protocol.rank import Failed, FromRank, Loaded, Prepared, Quiesced, RankMessage, Trains
from clusterd.protocol.requests import AbortRanks, DropMigration, MoveRanks, QuiesceRanks, ResumeRanks, ServeSegments
from clusterd.types import HostId, JobId, RankPlace
from clusterd.units import counted, size

log = logging.getLogger(__name__)

M = TypeVar("M", bound=RankMessage)

PREPARE_TIMEOUT_S = 180.0
PREPARE_STEPS = 60
"""Steps added to it: proofs make some twenty of the new plan, which may be slower, beside ranks that train."""

PROOF_S = 60.0
"""Time for source ranks to copy a state beside training, and for target ranks to wait for it, besides some steps."""
QUIESCE_TIMEOUT_S = 120.0
STEPS_AWAITED = 4
"""Steps added to time-outs: a request takes effect two steps later, and target ranks rehearse one."""

TRANSFER_TIMEOUT_S = 600.0


class MoveFailed(ClusterError):
    """A phase failed; the source ranks go on."""


class MigrationSaga:
    """Saga of one migration; its starter cancels `scope` to end it."""

    def __init__(
        self,
        decision: d.StartMigration,
        engine: Engine,
        hosts: HostRegistry,
        launches: LaunchRequests,
    ) -> None:
        self.decision = decision
        self.id = move_id(decision.job, decision.attempt, decision.new_generation)
        self.scope = anyio.CancelScope()
        self.verified = False
        self.quiesced_at_s = 0.0
        self.resume_asked_s = 0.0
        self._engine, self._hosts, self._launches = engine, hosts, launches
        self._state = engine.state
        self._reports: dict[type[RankMessage], dict[tuple[int, int], Any]] = {}
        self._changed = anyio.Event()
        self._failure: str | None = None
        self._out_of_memory = False
        self._refused = ""
        self._phase = "prepare"
        self._measured: list[e.MigrationAdvanced] = []
        self._step = -1
        self._began_s = time.perf_counter()

    @property
    def old_ranks(self) -> tuple[RankPlace, ...]:
        """Source ranks that are alive."""
        return tuple(place for place in self.decision.ranks if place.rank not in self.decision.lost)

    @property
    def old_hosts(self) -> tuple[HostId, ...]:
        return _distinct(self.old_ranks)

    @property
    def new_hosts(self) -> tuple[HostId, ...]:
        return _distinct(self.decision.new_ranks)

    @property
    def all_hosts(self) -> tuple[HostId, ...]:
        """Hosts of both sides, each once."""
        return tuple(dict.fromkeys((*self.old_hosts, *self.new_hosts)))

    def on_rank(self, generation: int, rank: int, report: RankMessage) -> None:
        """Take in a rank's report about this migration."""
        if isinstance(report, Failed):
            self._out_of_memory |= report.out_of_memory
            self._refused = self._refused or report.refused
            self.fail(f"rank {rank} of generation {generation}: {report.why}")
        self._reports.setdefault(type(report), {})[generation, rank] = report
        self._wake()

    def fail(self, why: str) -> None:
        """End the migration: something that it needs is gone."""
        self._failure = self._failure or why
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Run all phases up to the switch; a failure becomes an event."""
        try:
            # It may build an environment: before source ranks wait for anything.
            await self._launches.prepare_hosts(self.decision)
            move = await self._describe()
            if self.decision.source_releases_memory:
                await self._free_source(move)
            else:
                await self._prepare(move)
                await self._quiesce()
            await self._transfer()
        except Exception as error:
            cause = first_of(error)
            if not isinstance(cause, ClusterError):
                log.exception("the move of %s failed by a bug", self.id)
            refused = HostId(cause.host) if isinstance(cause, NotStarted) else None
            await self._failed(str(cause) or type(cause).__name__, refused)

    async def restore(self, whole: CompleteSnapshot, addresses: dict[str, Address]) -> int:
        """Start target ranks from state snapshots, without source ranks; returns their step."""
        move = await self._describe()
        segments = SnapshotSegments(whole.names, whole.hosts)
        move = replace(move, fabric={**addresses, **move.fabric}, snapshot=segments, sets=whole.tokens)
        try:
            await self._launches.start_standby(self.decision, move)
        except ExceptionGroup as errors:  # of several hosts
            raise first_of(errors) from None
        wanted = {(self.decision.new_generation, place.rank) for place in self.decision.new_ranks}
        loaded = await self._wait(Loaded, wanted, TRANSFER_TIMEOUT_S)
        steps = {report.step for report in loaded.values()}
        if steps != {whole.step} or not all(report.verified for report in loaded.values()):
            raise MoveFailed(f"the snapshot of step {whole.step} is not whole: ranks hold steps {sorted(steps)}")
        for host in self.new_hosts:
            named = (self.decision.job, self.decision.attempt, self.decision.new_generation)
            await self._hosts.request(host, ResumeRanks(*named, self.id))
            await self._hosts.request(host, DropMigration(self.id), account=self._account)
        return whole.step

    async def _prepare(self, move: MigrationRequest) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._launches.start_standby, self.decision, move)
            group.start_soon(self._send_to_source, move)
        await self._stand_by()

    async def _free_source(self, move: MigrationRequest) -> None:
        """Have waiting source ranks hand over and free their device memory before target ranks start."""
        await self._send_to_source(move)
        await self._wait(Prepared, self._source_ranks(), PREPARE_TIMEOUT_S + self._steps_s)
        await self._quiesce()
        self._phase = "prepare"
        await self._launches.start_standby(self.decision, move)
        await self._stand_by()

    async def _send_to_source(self, move: MigrationRequest) -> None:
        async with anyio.create_task_group() as group:
            for host in self.old_hosts:
                group.start_soon(self._hosts.request, host, MoveRanks(*self._source, replace(move, host=host)))

    def _source_ranks(self) -> set[tuple[int, int]]:
        return {(self.decision.generation, place.rank) for place in self.old_ranks}

    async def _stand_by(self) -> None:
        """Wait until both sides are ready and have computed the same copy plan."""
        new = {(self.decision.new_generation, place.rank) for place in self.decision.new_ranks}
        limit_s = PREPARE_TIMEOUT_S + PREPARE_STEPS * self._step_s
        prepared = await self._wait(Prepared, self._source_ranks() | new, limit_s)
        digests = {report.digest for report in prepared.values()}
        if len(digests) != 1:
            raise MoveFailed(f"ranks computed {len(digests)} different moves: old and new do not run the same clusterd")
        meanwhile = "training stands still" if self.decision.source_releases_memory else "training goes on"
        description = f"{counted(len(self.decision.new_ranks), 'rank')} ready; {meanwhile}"
        if why := next((report.not_shared for report in prepared.values() if report.not_shared), ""):
            description += f"; through host memory: {why}"
        await self._advance(description, post=not self.decision.source_releases_memory)

    async def _describe(self) -> MigrationRequest:
        """Description from which every rank computes the same copy plan."""
        job = self._state.jobs[self.decision.job]
        shape = job.inspection.shape
        assert shape is not None
        fabric: dict[str, Address] = {}
        for host in self.all_hosts:
            fabric[host] = await self._hosts.slice_server(host, ServeSegments(), account=self._account)
        decision = self.decision
        return MigrationRequest(
            id=self.id,
            token=secrets.token_hex(16),
            shape=shape,
            lost=decision.lost,
            step=decision.step,
            proof_s=PROOF_S + self._steps_s if not (decision.lost or decision.source_releases_memory) else 0.0,
            makes_room=decision.source_releases_memory,
            old=_side(decision.generation, decision.plan.to_dict(), decision.ranks),
            new=_side(decision.new_generation, decision.new_plan.to_dict(), decision.new_ranks),
            fabric=fabric,
        )

    async def _quiesce(self) -> None:
        self._phase = "quiesce"
        async with anyio.create_task_group() as group:
            for host in self.old_hosts:
                group.start_soon(self._hosts.request, host, QuiesceRanks(*self._source, self.id))
        quiesced = await self._wait(Quiesced, self._source_ranks(), QUIESCE_TIMEOUT_S + self._steps_s)
        steps = {report.step for report in quiesced.values()}
        if len(steps) != 1:
            raise MoveFailed(f"old ranks stopped at different steps: {sorted(steps)}")
        # Clocks of hosts differ by little, and the last to end is what counts.
        self.quiesced_at_s = max(report.at_s for report in quiesced.values())
        self._step = steps.pop()
        # Ranks report after copying, when target ranks have read most of it: the copying is part of the transfer.
        copying = [report.copied[0] for report in quiesced.values() if report.copied]
        over_at_s = min(copying, default=self.quiesced_at_s)
        await self._advance(f"training goes on to step {self._step}", post=False, over_at_s=over_at_s)

    async def _transfer(self) -> None:
        self._phase = "transfer"
        wanted = {(self.decision.new_generation, place.rank) for place in self.decision.new_ranks}
        loaded = await self._wait(Loaded, wanted, TRANSFER_TIMEOUT_S)
        network = _once_per_host(loaded, self.decision.new_ranks)
        local = sum(report.bytes_local for report in loaded.values())
        copied_s = _copied_s([*self._reports[Quiesced].values(), *loaded.values()], self.quiesced_at_s)
        on_device = sum(report.bytes_device for report in loaded.values())
        within = f"{size(local)} within hosts" + (f" ({size(on_device)} on their devices)" if on_device else "")
        description = f"{within}, {size(network)} over the network; copied within {copied_s:.4f} s"
        await self._advance(description, post=False)
        self._phase = "verify"
        wrong = [rank for (_, rank), report in loaded.items() if report.step != self._step or not report.verified]
        if wrong:
            raise MoveFailed(f"new ranks {wrong} do not hold the state of step {self._step}")
        await self._advance(f"step {self._step} on {counted(len(loaded), 'rank')}", post=False)
        self._phase = "switch"
        # The measured phases go into the same batch as the switch: one commit within the downtime, not four.
        self.verified = True
        which: dict[str, Any] = {
            "job": self.decision.job,
            "attempt": self.decision.attempt,
            "generation": self.decision.new_generation,
        }
        async with anyio.create_task_group() as group:
            for event in self._measured:
                group.start_soon(self._engine.post, event)
            switch = e.MigrationVerified(
                at_s=time.time(), step=self._step, network_bytes=network, local_bytes=local, **which
            )
            group.start_soon(self._engine.post, switch)

    @property
    def _step_s(self) -> float:
        return self._state.jobs[self.decision.job].progress.step_time_s or 0.0

    @property
    def _steps_s(self) -> float:
        return STEPS_AWAITED * self._step_s

    @property
    def _account(self) -> str:
        return self._state.account_of(self.decision.job)

    # --- waiting and telling ------------------------------------------------------------------------------------------

    @property
    def _source(self) -> tuple[JobId, int, int]:
        """Job, attempt and generation of the source ranks."""
        return self.decision.job, self.decision.attempt, self.decision.generation

    async def _wait(self, kind: type[M], wanted: set[tuple[int, int]], timeout_s: float) -> dict[tuple[int, int], M]:
        """Wait until each of these ranks, by generation and number, has sent a report of this kind."""
        with anyio.move_on_after(timeout_s):
            while True:
                if self._failure is not None:
                    raise MoveFailed(self._failure)
                reports = self._reports.get(kind, {})
                if wanted <= reports.keys():
                    return {key: reports[key] for key in wanted}
                await self._changed.wait()
        missing = sorted(rank for _, rank in wanted - self._reports.get(kind, {}).keys())
        raise MoveFailed(f"ranks {missing} were not {kind.__name__.lower()} within {timeout_s:.0f} s")

    async def _advance(self, what: str, post: bool = True, over_at_s: float | None = None) -> None:
        """End the current phase; its time is journaled, within the downtime together with the switch.

        Args:
            over_at_s: when it was, by the clock of a host; None: now.
        """
        now_s = time.perf_counter()
        if over_at_s is not None:
            now_s = min(max(now_s - (time.time() - over_at_s), self._began_s), now_s)
        log.info("%s: %s over after %.3f s: %s", self.id, self._phase, now_s - self._began_s, what)
        event = e.MigrationAdvanced(
            at_s=time.time(),
            job=self.decision.job,
            attempt=self.decision.attempt,
            generation=self.decision.new_generation,
            phase=self._phase,
            seconds=now_s - self._began_s,
            what=what,
        )
        self._began_s = now_s
        if post:
            await self._engine.post(event)
            self._began_s = time.perf_counter()
        else:
            self._measured.append(event)

    async def _failed(self, why: str, host: HostId | None) -> None:
        log.warning("the move of %s failed in %s: %s", self.id, self._phase, why)
        await self._engine.report(
            e.MigrationFailed(
                at_s=time.time(),
                job=self.decision.job,
                attempt=self.decision.attempt,
                generation=self.decision.new_generation,
                phase=self._phase,
                why=why,
                host=host,
                out_of_memory=self._out_of_memory,
                refused=self._refused,
            )
        )


def move_id(job: str, attempt: int, generation: int) -> str:
    return f"{job}.{attempt}.{generation}"


def _distinct(places: Iterable[RankPlace]) -> tuple[HostId, ...]:
    return tuple(dict.fromkeys(place.host for place in places))


def _side(generation: int, plan: dict[str, Any], places: Iterable[RankPlace]) -> SideRequest:
    ordered = sorted(places, key=lambda place: place.rank)
    hosts, devices = tuple(place.host for place in ordered), tuple(place.device for place in ordered)
    return SideRequest(generation, plan, hosts, devices)


def _copied_s(reports: Iterable[Quiesced | Loaded], quiesced_at_s: float) -> float:
    """Seconds of the downtime from the first copy into a store to the last copy out of one.

    Ranks that finish their last step early copy while others train: that is no downtime. Clocks of hosts are assumed to
    differ by little.
    """
    times = [at_s for report in reports for at_s in report.copied]
    return max(max(times) - max(min(times), quiesced_at_s), 0.0) if times else 0.0


def _once_per_host(loaded: Mapping[tuple[int, int], Loaded], places: Iterable[RankPlace]) -> int:
    """Bytes over the network; ranks of one host read from one inbox, whose bytes count once."""
    host_of = {place.rank: place.host for place in places}
    by_host: dict[HostId, int] = {}
    for (_, rank), report in loaded.items():
        by_host[host_of[rank]] = max(by_host.get(host_of[rank], 0), report.bytes_network)
    return sum(by_host.values())


class Migrations:
    """Migrations under way, by the generation of their target ranks."""

    def __init__(self, engine: Engine, hosts: HostRegistry, launches: LaunchRequests) -> None:
        self._engine, self._hosts, self._launches = engine, hosts, launches
        self._state = engine.state
        self._under_way: dict[tuple[str, int, int], MigrationSaga] = {}
        self._finishing: dict[tuple[str, int, int], MigrationSaga] = {}
        hosts.reports.subscribe(FromRank, self._on_rank_message)
        hosts.reports.subscribe(HostDown, self._on_host_down)
        hosts.reports.subscribe(RankExited, self._on_rank_exited)

    async def run(self, decision: d.StartMigration) -> None:
        """Carry one migration out up to its switch."""
        move = MigrationSaga(decision, self._engine, self._hosts, self._launches)
        key = (decision.job, decision.attempt, decision.new_generation)
        self._under_way[key] = self._finishing[key] = move
        try:
            with move.scope:
                await move.run()
        finally:
            self._under_way.pop(key, None)
            if not move.verified:
                self._finishing.pop(key, None)

    async def restore(self, decision: d.LaunchAttempt, whole: CompleteSnapshot, addresses: dict[str, Address]) -> int:
        """Start the ranks of a lost job from state snapshots in memory; returns their step.

        Args:
            addresses: address and port of each host that holds some.
        Raises:
            ClusterError: a rank could not start, or did not find its state.
        """
        assert decision.plan is not None
        old = tuple(RankPlace(rank=rank, host=host, device=None) for rank, host in enumerate(whole.hosts))
        start = d.StartMigration(
            cause=decision.cause,
            reason=decision.reason,
            job=decision.job,
            attempt=decision.attempt,
            generation=whole.of[2],
            plan=whole.plan,
            ranks=old,
            new_generation=decision.generation,
            new_plan=decision.plan,
            new_ranks=decision.ranks,
            lost=tuple(range(len(old))),
        )
        move = MigrationSaga(start, self._engine, self._hosts, self._launches)
        key = (decision.job, decision.attempt, decision.generation)
        self._under_way[key] = move
        try:
            return await move.restore(whole, addresses)
        finally:
            self._under_way.pop(key, None)

    async def abort(self, decision: d.AbortMigration) -> None:
        """Cancel a migration and let waiting source ranks go on."""
        key = (decision.job, decision.attempt, decision.new_generation)
        move = self._under_way.get(key)
        if move is not None:
            move.scope.cancel()
        await self._hosts.everywhere(decision, AbortRanks, move=move_id(*key))

    async def resume(self, decision: d.ResumeAttempt) -> None:
        """Let the target ranks train after the switch."""
        key = (decision.job, decision.attempt, decision.generation)
        move = self._finishing.get(key)
        if move is not None:
            move.resume_asked_s = time.perf_counter()
        record = await self._hosts.records.make(decision.job)
        await self._hosts.everywhere(decision, ResumeRanks, move=move_id(*key), record=record)

    # --- reports ------------------------------------------------------------------------------------------------------

    async def _on_rank_message(self, _host: HostId, report: FromRank) -> None:
        for key, move in list(self._under_way.items()):
            if key[:2] == (report.job, report.attempt) and getattr(report.message, "id", None) == move.id:
                move.on_rank(report.generation, report.rank, report.message)
        if isinstance(report.message, Trains) and report.rank == 0:
            await self._on_trains(report, report.message)

    async def _on_trains(self, report: FromRank, trains: Trains) -> None:
        job, key = JobId(report.job), (report.job, report.attempt, report.generation)
        move = self._finishing.pop(key, None)
        attempt = self._state.attempt(job, report.attempt, report.generation)
        if attempt is None or self._state.jobs[job].resuming is None:
            return
        now_s = time.time()
        # Without the migration (the daemon was restarted) the end of the last step before it is unknown.
        downtime_s = trains.at_s - move.quiesced_at_s if move is not None else 0.0
        if move is not None:
            seconds = time.perf_counter() - move.resume_asked_s
            await self._engine.report(
                e.MigrationAdvanced(
                    at_s=now_s, job=job, attempt=key[1], generation=key[2], phase="resume", seconds=seconds
                )
            )
            for host in move.all_hosts:
                try:
                    account = self._state.account_of(job)
                    await self._hosts.request(host, DropMigration(move.id), account=account)
                except ClusterError as error:
                    log.info("%s keeps the segments of %s for now: %s", host, move.id, error)
        await self._engine.report(
            e.MigrationFinished(at_s=now_s, job=job, attempt=key[1], generation=key[2], downtime_s=max(downtime_s, 0.0))
        )

    def _on_host_down(self, host: HostId, report: HostDown) -> None:
        for move in self._under_way.values():
            if host in move.all_hosts and self._state.account_of(move.decision.job) == report.account:
                move.fail(f"{host} is not reachable: {report.why}")

    def _on_rank_exited(self, _host: HostId, report: RankExited) -> None:
        move = self._under_way.get((report.job, report.attempt, report.generation))
        if move is not None:
            move.fail(f"new rank {report.rank} ended: {facts.rank_end(report)}")
