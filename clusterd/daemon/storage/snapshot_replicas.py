"""Snapshots in memory: which host keeps a copy of which rank's state, and what a lost job can go on from.

Nothing of this is journaled: agents hold the segments, and tell what they have to a daemon that has just started.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from clusterd.core.state import Attempt, Job, State
from clusterd.daemon.hosts.registry import Hosts
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import AgentLost, ClusterError, NotStarted
from clusterd.types import HostId, HostState, JobId
from plans.plan import Plan

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<job>.+)\.(?P<attempt>\d+)\.g(?P<generation>\d+)\.snap(?P<rank>\d+)\.\d")

Generation = tuple[str, int, int]
"""Job, attempt, generation."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A snapshot of all ranks of one step, each on a host that is up."""

    of: Generation
    plan: Plan
    step: int
    names: tuple[str, ...]  # by rank
    hosts: tuple[HostId, ...]  # that have them
    tokens: dict[str, str]


@dataclass(slots=True)
class _Copy:
    rank: int
    step: int
    holders: set[HostId] = field(default_factory=set)


class Keeper:
    """Chooses the second hosts, and remembers who has what."""

    def __init__(self, engine: Engine, hosts: Hosts, key: str) -> None:
        """`key`: a secret of this cluster, from which each set's token is made."""
        self._engine = engine
        self._hosts = hosts
        self._key = key.encode()
        self._copies: dict[Generation, dict[str, _Copy]] = {}
        self._ports: dict[tuple[str, HostId], int] = {}

    @property
    def _state(self) -> State:
        return self._engine.scheduler.state

    async def heard(self, host: HostId, message: dict[str, Any]) -> None:
        """A rank on `host` has a new snapshot: have a second host bring it, then let the rank go on."""
        of = (str(message["job"]), int(message["attempt"]), int(message["generation"]))
        name = str(message["name"])
        copy = _Copy(int(message["rank"]), int(message["step"]), {host})
        self._copies.setdefault(of, {})[name] = copy
        attempt = self._state.attempt(JobId(of[0]), of[1], of[2])
        try:
            second = self._second(host, attempt) if attempt is not None else None
            if second is not None:
                address = await self._admitted(of, host)
                await self._hosts.request(
                    second, "snapshot_keep", timeout_s=None, name=name, set=_set(of), token=self._token(of),
                    address=address, bytes=message["bytes"],
                )  # fmt: skip
                copy.holders.add(second)
        except ClusterError as error:
            log.info("the snapshot %s has no second host: %s", name, error)
        try:
            await self._hosts.request(host, "snapshot_kept", name=name)
            await self._drop_older(of)
        except ClusterError as error:
            log.info("%s: %s", host, error)

    def reported(self, host: HostId, snapshots: list[dict[str, Any]]) -> None:
        """What an agent has, as it says when it is connected."""
        for copies in self._copies.values():
            for copy in copies.values():
                copy.holders.discard(host)
        for one in snapshots:
            found = _NAME.fullmatch(str(one["name"]))
            if found is None:
                continue
            of = (found["job"], int(found["attempt"]), int(found["generation"]))
            known = self._copies.setdefault(of, {}).setdefault(
                str(one["name"]), _Copy(int(found["rank"]), int(one["step"]))
            )
            if known.step != int(one["step"]):
                known.step, known.holders = max(known.step, int(one["step"])), set()
            known.holders.add(host)

    def newest(self, job: Job) -> Whole | None:
        """The newest step of which every rank's state is on some host that is up."""
        best: Whole | None = None
        for of, copies in self._copies.items():
            plan = _plan_of(job, of)
            if plan is None:
                continue
            for step in {copy.step for copy in copies.values()}:
                whole = self._whole(of, plan, step, copies)
                if whole is not None and (best is None or step > best.step):
                    best = whole
        return best

    def _whole(self, of: Generation, plan: Plan, step: int, copies: dict[str, _Copy]) -> Whole | None:
        by_rank: dict[int, tuple[str, HostId]] = {}
        for name, copy in copies.items():
            up = [h for h in sorted(copy.holders) if self._is_up(h)]
            if copy.step == step and up:
                by_rank[copy.rank] = (name, up[0])
        if set(by_rank) != set(range(plan.ranks)):
            return None
        names, hosts = zip(*(by_rank[rank] for rank in range(plan.ranks)), strict=True)
        return Whole(of, plan, step, names, hosts, {_set(of): self._token(of)})

    async def admit(self, whole: Whole) -> dict[str, list[Any]]:
        """Where each holder serves; each knows the token from now on.

        Raises:
            NotStarted: one is silent. It may be to have no rank, and then nobody asks again when it is back.
            ClusterError: one refuses.
        """
        served: dict[str, list[Any]] = {}
        for host in dict.fromkeys(whole.hosts):
            try:
                served[host] = await self._admitted(whole.of, host)
            except AgentLost as lost:
                raise NotStarted(host, f"the snapshot that it keeps is out of reach: {lost}") from None
        return served

    async def forget(self, job: str) -> None:
        """The job is over: its snapshots are nobody's."""
        for of in [of for of in self._copies if of[0] == job]:
            await self._drop(of)

    async def _drop_older(self, newest: Generation) -> None:
        """Once a generation has a whole snapshot on two hosts, those before it are worth nothing."""
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
            if self._is_up(host):
                try:
                    await self._hosts.request(host, "drop", move=_set(of))
                except ClusterError as error:
                    log.info("%s keeps old snapshots for now: %s", host, error)

    async def _admitted(self, of: Generation, host: HostId) -> list[Any]:
        answer = await self._hosts.request(host, "snapshot_admit", set=_set(of), token=self._token(of))
        facts = self._state.hosts[host].facts
        return [facts.address if facts else "127.0.0.1", answer["port"]]

    def _second(self, host: HostId, attempt: Attempt) -> HostId | None:
        """The next of the job's own hosts, in a ring; for a job on one host, another with the least to do."""
        others = [h for h in attempt.hosts if h != host and self._is_up(h)]
        if others:
            ring = sorted({*others, host})
            return ring[(ring.index(host) + 1) % len(ring)]
        free = [h for h in self._state.hosts.values() if h.id != host and h.unusable is None]
        return min(free, key=lambda h: (h.memory_used_bytes, h.cores_used, h.id)).id if free else None

    def _is_up(self, host: HostId) -> bool:
        known = self._state.hosts.get(host)
        return known is not None and known.state is HostState.UP

    def _token(self, of: Generation) -> str:
        return hmac.new(self._key, _set(of).encode(), hashlib.sha256).hexdigest()[:32]


def _set(of: Generation) -> str:
    return f"{of[0]}.{of[1]}.g{of[2]}.snaps"


def _plan_of(job: Job, of: Generation) -> Plan | None:
    """Under which the ranks of a generation ran."""
    if job.id != of[0] or not 1 <= of[1] <= len(job.attempts):
        return None
    attempt = job.attempts[of[1] - 1]
    return attempt.plan if attempt.generation == of[2] else attempt.plans_by_generation.get(of[2])
