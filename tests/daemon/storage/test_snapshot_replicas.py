"""Hosts that store replicas of state snapshots, and snapshots that a lost job can resume from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clusterd.core.host import Host
from clusterd.core.state import Attempt, Former, Job, Rank, State
from clusterd.daemon.hosts.reports import HostUp
from clusterd.daemon.storage.snapshot_replicas import SnapshotReplicas
from clusterd.errors import HostError
from clusterd.plans.plan import Plan
from clusterd.protocol.agent import HelloReply, StateSnapshotRow, StateSnapshotTaken
from clusterd.protocol.messages import Request, to_map
from clusterd.types import AttemptState, DeviceId, HostId, HostState, JobId, JobKind, JobSpec, RankPlace

JOB = JobId("7")


class Agents:
    """Fake agents; a host in `full` stores no further replica."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.full: set[str] = set()

    async def request(self, host: str, request: Request[Any], timeout_s: float | None = 60.0, **_: Any) -> None:
        self.asked.append((host, request.verb, to_map(request)))
        if request.verb == "snapshot_keep" and host in self.full:
            raise HostError("no room for a segment")

    async def slice_server(self, host: str, request: Request[Any], **_: Any) -> tuple[str, int]:
        await self.request(host, request)
        return "127.0.0.1", 1234


@pytest.fixture
def state() -> State:
    """Job 7 under dp=2, zero=3: a rank on a, and one on b; c is free."""
    state = State()
    for name in "abc":
        state.hosts[HostId(name)] = Host(HostId(name), state=HostState.UP)
    ranks = {i: Rank(RankPlace(rank=i, host=HostId(h), device=DeviceId(f"{h}:gpu0"))) for i, h in enumerate("ab")}
    spec = JobSpec(name="j", kind=JobKind.ELASTIC, command=("x",))
    job = Job(JOB, spec, priority=0, submitted_s=0.0, queued_s=0.0)
    job.attempts.append(Attempt(JOB, 1, 1, Plan(dp=2, zero=3), ranks, 0.0, state=AttemptState.RUNNING))
    state.jobs[JOB] = job
    return state


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def replicas(state: State, agents: Agents) -> SnapshotReplicas:
    engine: Any = SimpleNamespace(state=state)
    hosts: Any = agents
    return SnapshotReplicas(engine, hosts, "secret")


def report_snapshot(replicas: SnapshotReplicas, rank: int, step: int, slot: int = 0, generation: int = 1) -> None:
    host = HostId("ab"[rank])
    name = f"7.1.g{generation}.snap{rank}.{slot}"
    anyio.run(replicas.on_taken, host, StateSnapshotTaken("7", 1, generation, rank, name, step, 9))


def up(*snapshots: StateSnapshotRow) -> HostUp:
    return HostUp(HelloReply("agent", "1", "boot", 0.0, {}, (), snapshots))


def lost(state: State, *hosts: str) -> None:
    for host in hosts:
        state.hosts[HostId(host)].state = HostState.LOST


def test_each_rank_is_kept_by_the_other_host(replicas: SnapshotReplicas, agents: Agents, state: State) -> None:
    """Either host may die: the other has both parts. The rank is answered last."""
    report_snapshot(replicas, 0, 20)
    report_snapshot(replicas, 1, 20)
    stored = [(host, what["name"]) for host, verb, what in agents.asked if verb == "snapshot_keep"]
    assert stored == [("b", "7.1.g1.snap0.0"), ("a", "7.1.g1.snap1.0")]
    assert [verb for host, verb, _ in agents.asked if host == "a"][:2] == ["snapshot_admit", "snapshot_kept"]
    lost(state, "b")
    whole = replicas.newest(state.jobs[JOB])
    assert whole is not None and (whole.step, whole.hosts, whole.plan) == (20, ("a", "a"), Plan(dp=2, zero=3))


def test_a_step_counts_when_every_rank_has_it(replicas: SnapshotReplicas, state: State) -> None:
    """A newer snapshot of one rank alone is worth nothing; the older whole one is in the other slot."""
    report_snapshot(replicas, 0, 20)
    report_snapshot(replicas, 1, 20)
    report_snapshot(replicas, 0, 40, slot=1)
    whole = replicas.newest(state.jobs[JOB])
    assert whole is not None and whole.step == 20
    report_snapshot(replicas, 1, 40, slot=1)
    newer = replicas.newest(state.jobs[JOB])
    assert newer is not None and newer.step == 40


def test_without_room_elsewhere_the_rank_goes_on_and_a_lost_host_takes_it_with_it(
    replicas: SnapshotReplicas, agents: Agents, state: State
) -> None:
    agents.full = {"a", "b", "c"}
    report_snapshot(replicas, 0, 20)
    report_snapshot(replicas, 1, 20)
    assert sum(verb == "snapshot_kept" for _, verb, _ in agents.asked) == 2
    assert replicas.newest(state.jobs[JOB]) is not None
    lost(state, "b")
    assert replicas.newest(state.jobs[JOB]) is None


def test_a_daemon_that_starts_learns_from_agents(replicas: SnapshotReplicas, state: State) -> None:
    replicas.on_up(HostId("a"), up(StateSnapshotRow("7.1.g1.snap0.0", 20)))
    replicas.on_up(HostId("b"), up(StateSnapshotRow("7.1.g1.snap1.0", 20), StateSnapshotRow("x.out0", 1)))
    whole = replicas.newest(state.jobs[JOB])
    assert whole is not None and whole.step == 20
    replicas.on_up(HostId("b"), up())  # its agent was started anew
    assert replicas.newest(state.jobs[JOB]) is None


def test_older_generations_are_dropped_and_all_when_the_job_is_over(
    replicas: SnapshotReplicas, agents: Agents, state: State
) -> None:
    report_snapshot(replicas, 0, 20)
    report_snapshot(replicas, 1, 20)
    attempt = state.jobs[JOB].attempts[0]
    assert attempt.plan is not None
    attempt.former[1] = Former(attempt.plan, {})
    attempt.generation = 2
    report_snapshot(replicas, 0, 40, generation=2)
    assert not any(verb == "drop" for _, verb, _ in agents.asked)
    report_snapshot(replicas, 1, 40, generation=2)
    assert {what["move"] for _, verb, what in agents.asked if verb == "drop"} == {"7.1.g1.snaps"}
    anyio.run(replicas.forget, "7")
    assert {what["move"] for _, verb, what in agents.asked if verb == "drop"} == {"7.1.g1.snaps", "7.1.g2.snaps"}
    assert replicas.newest(state.jobs[JOB]) is None
