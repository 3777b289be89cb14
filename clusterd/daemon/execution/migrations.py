"""Migrations under way: begun, undone and resumed by decision, and told what ranks and hosts say."""

from __future__ import annotations

import logging
import time
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution.migration import Launch, Saga, move_id
from clusterd.daemon.hosts.registry import Hosts
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.storage.snapshot_replicas import Whole
from clusterd.errors import ClusterError
from clusterd.types import HostId, RankPlace

log = logging.getLogger(__name__)


class Mover:
    """Migrations under way, by the generation they lead to."""

    def __init__(self, engine: Engine, hosts: Hosts, launch_standby: Launch) -> None:
        self._engine = engine
        self._hosts = hosts
        self._launch_standby = launch_standby
        self._under_way: dict[tuple[str, int, int], Saga] = {}
        self._finishing: dict[tuple[str, int, int], Saga] = {}
        hosts.on_rank_said = self._said
        hosts.on_host_down = self._host_down
        hosts.on_rank_gone = self._rank_gone

    async def run(self, decision: d.StartMigration) -> None:
        """Lead one migration to its switch."""
        move = Saga(decision, self._engine, self._hosts, self._launch_standby)
        key = (decision.job, decision.attempt, decision.new_generation)
        self._under_way[key] = self._finishing[key] = move
        try:
            with move.scope:
                await move.run()
        finally:
            self._under_way.pop(key, None)
            if not move.verified:
                self._finishing.pop(key, None)

    async def restore(self, decision: d.LaunchAttempt, whole: Whole, served: dict[str, list[Any]]) -> int:
        """Start a lost job's new ranks from snapshots in memory; returns the step that they hold.

        Args:
            served: address and port of each host that has some.
        Raises:
            ClusterError: a rank could not be started, or did not find what it needs.
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
        move = Saga(start, self._engine, self._hosts, self._launch_standby)
        key = (decision.job, decision.attempt, decision.generation)
        self._under_way[key] = move
        try:
            return await move.restore(whole, served)
        finally:
            self._under_way.pop(key, None)

    async def abort(self, decision: d.AbortMigration) -> None:
        """Stop leading it, and let the old ranks go on where they wait."""
        key = (decision.job, decision.attempt, decision.new_generation)
        move = self._under_way.get(key)
        if move is not None:
            move.scope.cancel()
        await self._hosts.everywhere(decision, "abort", move=move_id(*key))

    async def resume(self, decision: d.ResumeAttempt) -> None:
        """After the switch: the new ranks train."""
        key = (decision.job, decision.attempt, decision.generation)
        move = self._finishing.get(key)
        if move is not None:
            move.resume_asked_s = time.perf_counter()
        await self._hosts.everywhere(decision, "resume", move=move_id(*key))

    # --- what is heard ------------------------------------------------------------------------------------------------

    async def _said(self, message: dict[str, Any]) -> None:
        said = message["said"]
        for key, move in list(self._under_way.items()):
            if said.get("id") == move.id and key[:2] == (message["job"], message["attempt"]):
                move.hear(message["generation"], message["rank"], said)
        if said["what"] == "trains":
            await self._trains(message)

    async def _trains(self, message: dict[str, Any]) -> None:
        key = (message["job"], message["attempt"], message["generation"])
        if message["rank"] != 0:
            return
        move = self._finishing.pop(key, None)
        attempt = self._engine.scheduler.state.attempt(*key[:2])
        if attempt is None or attempt.generation != key[2]:
            return
        if self._engine.scheduler.state.jobs[attempt.job].resuming is None:
            return
        now_s = time.time()
        # Without the move (the daemon was restarted in between) nobody knows when the last old step ended.
        downtime_s = message["said"]["at_s"] - move.quiesced_at_s if move is not None else 0.0
        if move is not None:
            seconds = time.perf_counter() - move.resume_asked_s
            await self._engine.report(
                e.MigrationAdvanced(
                    at_s=now_s, job=message["job"], attempt=key[1], generation=key[2], phase="resume", seconds=seconds
                )
            )
            for host in move.all_hosts:
                try:
                    await self._hosts.request(host, "drop", move=move.id)
                except ClusterError as error:
                    log.info("%s keeps the segments of %s for now: %s", host, move.id, error)
        await self._engine.report(
            e.MigrationFinished(
                at_s=now_s, job=message["job"], attempt=key[1], generation=key[2], downtime_s=max(downtime_s, 0.0)
            )
        )

    def _host_down(self, host: HostId, why: str) -> None:
        for move in self._under_way.values():
            if host in move.all_hosts:
                move.fail(f"{host} is not reachable: {why}")

    def _rank_gone(self, job: str, attempt: int, generation: int, rank: int, why: str) -> None:
        move = self._under_way.get((job, attempt, generation))
        if move is not None:
            move.fail(f"new rank {rank} ended: {why}")
