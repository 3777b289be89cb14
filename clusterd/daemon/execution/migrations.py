"""Migrations under way: started, aborted and resumed by decisions, and fed with the reports of ranks and hosts."""

from __future__ import annotations

import logging
import time

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution.launching import LaunchRequests
from clusterd.daemon.execution.migration import MigrationSaga, move_id
from clusterd.daemon.hosts import facts
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostDown
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.snapshot_replicas import CompleteSnapshot
from clusterd.errors import ClusterError
from clusterd.protocol.agent import RankExited
from clusterd.protocol.migration import Address
from clusterd.protocol.rank import FromRank, Trains
from clusterd.protocol.requests import AbortRanks, DropMigration, ResumeRanks
from clusterd.types import HostId, JobId, RankPlace

log = logging.getLogger(__name__)


class Migrations:
    """Migrations under way, by the generation of their target ranks."""

    def __init__(self, engine: Engine, hosts: HostRegistry, launches: LaunchRequests) -> None:
        self._engine, self._hosts, self._launches = engine, hosts, launches
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
        attempt = self._engine.scheduler.state.attempt(job, report.attempt, report.generation)
        if attempt is None or self._engine.scheduler.state.jobs[job].resuming is None:
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
                    account = self._engine.scheduler.state.account_of(job)
                    await self._hosts.request(host, DropMigration(move.id), account=account)
                except ClusterError as error:
                    log.info("%s keeps the segments of %s for now: %s", host, move.id, error)
        await self._engine.report(
            e.MigrationFinished(at_s=now_s, job=job, attempt=key[1], generation=key[2], downtime_s=max(downtime_s, 0.0))
        )

    def _on_host_down(self, host: HostId, report: HostDown) -> None:
        for move in self._under_way.values():
            if host in move.all_hosts and self._engine.scheduler.state.account_of(move.decision.job) == report.account:
                move.fail(f"{host} is not reachable: {report.why}")

    def _on_rank_exited(self, _host: HostId, report: RankExited) -> None:
        move = self._under_way.get((report.job, report.attempt, report.generation))
        if move is not None:
            move.fail(f"new rank {report.rank} ended: {facts.rank_end(report)}")
