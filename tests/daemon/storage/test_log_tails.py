"""Last lines of ranks whose host was lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clusterd.agent.host import files
from clusterd.core.host import Host
from clusterd.core.state import Attempt, Job, Rank, State
from clusterd.daemon.api.job_logs import JobLogs
from clusterd.daemon.storage.archive import TAIL_BYTES, Archive, LogTails
from clusterd.errors import AgentLost, ClusterError
from clusterd.protocol.requests import Chunk, ReadLog
from clusterd.types import AttemptState, HostId, HostState, JobId, JobKind, JobSpec, RankPlace

JOB, A, B = JobId("7"), HostId("a"), HostId("b")


class Agents:
    """Real log files of ranks 0 (on a) and 1 (on b); what is named in `away` does not answer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.away: set[str] = set()
        self.pulled_bytes = 0

    def file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}"

    async def request(self, host: str, wanted: ReadLog) -> Chunk:
        if host in self.away:
            raise AgentLost(f"{host} did not answer")
        answer = files.pull(self.file(wanted.rank), wanted.offset, wanted.limit, ended=False)
        self.pulled_bytes += len(answer.data)
        return answer


@pytest.fixture
def state() -> State:
    state = State()
    for name in (A, B):
        state.hosts[name] = Host(name, state=HostState.UP)
    ranks = {i: Rank(RankPlace(rank=i, host=host, device=None)) for i, host in enumerate((A, B))}
    job = Job(JOB, JobSpec(name="j", kind=JobKind.COMMAND, command=("x",)), priority=0, submitted_s=0.0, queued_s=0.0)
    job.attempts.append(Attempt(JOB, 1, 1, None, ranks, 0.0, state=AttemptState.RUNNING))
    state.jobs[JOB], state.active[JOB] = job, None
    return state


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path)


@pytest.fixture
def parts(state: State, agents: Agents, tmp_path: Path) -> tuple[LogTails, JobLogs]:
    engine: Any = SimpleNamespace(state=state)
    hosts: Any = agents
    journal: Any = None
    archive = Archive(tmp_path / "head", journal)
    feed: Any = None
    return LogTails(engine, hosts, archive), JobLogs(engine, hosts, archive, feed)


def read(job_logs: JobLogs, rank: int | None = None) -> bytes:
    async def collect() -> bytes:
        peer: Any = SimpleNamespace(user="u")
        return b"".join([piece["data"] async for piece in job_logs.logs(peer, "7", rank)])

    return anyio.run(collect)


def test_the_last_log_lines_are_readable_while_their_host_is_away(
    parts: tuple[LogTails, JobLogs], agents: Agents
) -> None:
    mirror, job_logs = parts
    agents.file(0).write_bytes(b"step 1\n")
    agents.file(1).write_bytes(b"other\n")
    anyio.run(mirror.look)
    with agents.file(0).open("ab") as file:
        file.write(b"step 2\n")
    anyio.run(mirror.look)
    agents.away.add("a")
    assert read(job_logs, 0) == b"step 1\nstep 2\n\n[clusterd: a does not answer; what this rank said last is there]\n"
    assert b"other\n" in read(job_logs), "the rank on the host that answers is read from there"


def test_of_a_long_log_the_end_is_at_hand_and_the_rest_is_counted(
    parts: tuple[LogTails, JobLogs], agents: Agents
) -> None:
    mirror, job_logs = parts
    lines = b"".join(b"line %06d\n" % number for number in range(20_000))
    agents.file(0).write_bytes(lines)
    anyio.run(mirror.look)
    agents.away.add("a")
    message = read(job_logs, 0)
    assert lines[-TAIL_BYTES:] in message
    assert message.startswith(b"\n[clusterd: 170 KiB of this log are on a alone"), message[:80]


def test_a_log_that_did_not_grow_is_not_brought_again(parts: tuple[LogTails, JobLogs], agents: Agents) -> None:
    mirror, _ = parts
    agents.file(0).write_bytes(b"once\n")
    for _ in range(3):
        anyio.run(mirror.look)
    assert agents.pulled_bytes == len(b"once\n")


def test_a_silent_host_keeps_nothing_from_the_others(
    parts: tuple[LogTails, JobLogs], agents: Agents, state: State
) -> None:
    """A host that the scheduler takes for up, and that does not answer."""
    mirror, job_logs = parts
    agents.file(1).write_bytes(b"other\n")
    agents.away.add("a")
    anyio.run(mirror.look)
    agents.away.add("b")
    assert b"other\n" in read(job_logs, 1)
    with pytest.raises(ClusterError, match="a cannot be reached now"):
        read(job_logs, 0)
