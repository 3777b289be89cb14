"""Replicas of state snapshots in host memory: placement on a second host, and choice of the snapshot to restart from.

Nothing of this is journaled: the agents hold the segments and report them to a restarted daemon.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass, field

from clusterd.core.queueing.admission import hosts_without_login
from clusterd.core.state import Attempt, Job
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import AgentLost, ClusterError, NotStarted
from clusterd.plans.plan import Plan
from clusterd.protocol import agent
from clusterd.protocol.launch import Address
from clusterd.protocol.requests import AdmitReaders, DropMigration, KeepReplica, ReplicaIsDone
from clusterd.types import HostId, JobId

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<job>.+)\.(?P<attempt>\d+)\.g(?P<generation>\d+)\.snap(?P<rank>\d+)\.\d")

Generation = tuple[str, int, int]
"""Job, attempt number, generation."""


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """State snapshots of all ranks of one step, each on a host that is up."""

    of: Generation
    plan: Plan
    step: int
    names: tuple[str, ...]  # names of the segments, by rank
    hosts: tuple[HostId, ...]  # their holders, by rank
    tokens: dict[str, str]  # by snapshot set


@dataclass(slots=True)
class _Replicas:
    rank: int
    step: int
    holders: set[HostId] = field(default_factory=set)


class SnapshotReplicas:
    """Places replicas of state snapshots and tracks which hosts hold them."""

    def __init__(self, engine: Engine, hosts: HostRegistry, key: str) -> None:
        """`key`: secret of the cluster, from which the access token of each snapshot set is derived."""
        self._engine = engine
        self._state = engine.state
        self._hosts = hosts
        self._key = key.encode()
        self._copies: dict[Generation, dict[str, _Replicas]] = {}
        self._ports: dict[tuple[str, HostId], int] = {}

    async def on_taken(self, host: HostId, report: agent.StateSnapshotTaken) -> None:
        """Let a second host fetch a new state snapshot, then let the rank that wrote it continue."""
        of = (report.job, report.attempt, report.generation)
        name = report.name
        copy = _Replicas(report.rank, report.step, {host})
        self._copies.setdefault(of, {})[name] = copy
        attempt = self._state.attempt(JobId(of[0]), of[1], of[2])
        try:
            second = self._second(host, attempt) if attempt is not None else None
            if second is not None:
                address = await self._admitted(of, host)
                wanted = KeepReplica(name, _set(of), self._token(of), address, report.bytes)
                await self._hosts.request(second, wanted, timeout_s=None, account=self._account(of))
                copy.holders.add(second)
        except ClusterError as error:
            log.info("state snapshot %s has no replica: %s", name, error)
        try:
            await self._hosts.request(host, ReplicaIsDone(name), account=self._account(of))
            await self._drop_older(of)
        except ClusterError as error:
            log.info("%s: %s", host, error)

    def on_up(self, host: HostId, report: HostUp) -> None:
        """Update the replicas that a host holds from its agent's reply to hello."""
        for of, copies in self._copies.items():
            for copy in copies.values() if self._account(of) == report.account else ():
                copy.holders.discard(host)
        for row in report.hello.snapshots:
            found = _NAME.fullmatch(row.name)
            if found is None:
                continue
            of = (found["job"], int(found["attempt"]), int(found["generation"]))
            if self._account(of) != report.account:
                continue
            known = self._copies.setdefault(of, {}).setdefault(row.name, _Replicas(int(found["rank"]), row.step))
            if known.step != row.step:
                known.step, known.holders = max(known.step, row.step), set()
            known.holders.add(host)

    def newest(self, job: Job) -> CompleteSnapshot | None:
        """Newest state snapshot that is complete on hosts that are up; None if there is none."""
        best: CompleteSnapshot | None = None
        for of, copies in self._copies.items():
            plan = _plan_of(job, of)
            if plan is None:
                continue
            for step in {copy.step for copy in copies.values()}:
                whole = self._whole(of, plan, step, copies)
                if whole is not None and (best is None or step > best.step):
                    best = whole
        return best

    def _whole(self, of: Generation, plan: Plan, step: int, copies: dict[str, _Replicas]) -> CompleteSnapshot | None:
        by_rank: dict[int, tuple[str, HostId]] = {}
        for name, copy in copies.items():
            up = [h for h in sorted(copy.holders) if self._is_up(h, self._account(of))]
            if copy.step == step and up:
                by_rank[copy.rank] = (name, up[0])
        if set(by_rank) != set(range(plan.ranks)):
            return None
        names, hosts = zip(*(by_rank[rank] for rank in range(plan.ranks)), strict=True)
        return CompleteSnapshot(of, plan, step, names, hosts, {_set(of): self._token(of)})

    async def admit(self, whole: CompleteSnapshot) -> dict[str, Address]:
        """Ask every holder of a state snapshot to admit readers; returns address and port of each.

        Raises:
            NotStarted: a holder does not answer. The holder may run no rank of the job, so its return would trigger no
                retry.
            ClusterError: a holder refuses.
        """
        addresses: dict[str, Address] = {}
        for host in dict.fromkeys(whole.hosts):
            try:
                addresses[host] = await self._admitted(whole.of, host)
            except AgentLost as lost:
                raise NotStarted(host, f"its state snapshot is unreachable: {lost}") from None
        return addresses

    async def forget(self, job: str) -> None:
        """Drop the state snapshots of a job that has ended."""
        for of in [of for of in self._copies if of[0] == job]:
            await self._drop(of)

    async def _drop_older(self, newest: Generation) -> None:
        """Drop state snapshots of earlier generations once the newest generation has a complete one."""
        job = self._state.jobs.get(JobId(newest[0]))
        plan = _plan_of(job, newest) if job is not None else None
        older = [of for of in self._copies if of[0] == newest[0] and of < newest]
        if plan is None or not older:
            return
        copies = self._copies[newest]
        if any(self._whole(newest, plan, step, copies) for step in {c.step for c in copies.values()}):
            for of in older:
                await self._drop(of)

    async def _drop(self, of: Generation) -> None:
        copies = self._copies.pop(of, {})
        for host in sorted({h for copy in copies.values() for h in copy.holders}):
            self._ports.pop((_set(of), host), None)
            if self._is_up(host, self._account(of)):
                try:
                    await self._hosts.request(host, DropMigration(_set(of)), account=self._account(of))
                except ClusterError as error:
                    log.info("%s could not drop old state snapshots: %s", host, error)

    async def _admitted(self, of: Generation, host: HostId) -> Address:
        return await self._hosts.slice_server(host, AdmitReaders(_set(of), self._token(of)), account=self._account(of))

    def _second(self, host: HostId, attempt: Attempt) -> HostId | None:
        """Host of the replica: the job's next host in a ring; for a job on one host, the least busy other one."""
        others = [h for h in attempt.hosts if h != host and self._is_up(h, attempt.account)]
        if others:
            ring = sorted({*others, host})
            return ring[(ring.index(host) + 1) % len(ring)]
        left_out = hosts_without_login(self._state, self._state.jobs[attempt.job].spec.account)
        hosts = (h for h in self._state.hosts.values() if h.id != host and h.id not in left_out)
        free = [h for h in hosts if h.unusable is None]
        return min(free, key=lambda h: (h.memory_used_bytes, h.cores_used, h.id)).id if free else None

    def _is_up(self, host: HostId, account: str) -> bool:
        known = self._state.hosts.get(host)
        return known is not None and known.reaches(account)

    def _account(self, of: Generation) -> str:
        return self._state.account_of(of[0])

    def _token(self, of: Generation) -> str:
        return hmac.new(self._key, _set(of).encode(), hashlib.sha256).hexdigest()[:32]


def _set(of: Generation) -> str:
    return f"{of[0]}.{of[1]}.g{of[2]}.snaps"


def _plan_of(job: Job, of: Generation) -> Plan | None:
    """Plan of the ranks of a generation; None if unknown."""
    if job.id != of[0] or not 1 <= of[1] <= len(job.attempts):
        return None
    attempt = job.attempts[of[1] - 1]
    if attempt.generation == of[2]:
        return attempt.plan
    return attempt.former[of[2]].plan if of[2] in attempt.former else None
