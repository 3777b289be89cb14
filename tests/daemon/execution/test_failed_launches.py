"""A launch starts its ranks or fails; no job stays in `starting`."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.daemon.execution.executor import Executor
from clusterd.daemon.execution.migration import Migrations
from clusterd.daemon.execution.model_description import ModelInspector
from clusterd.daemon.hosts.reports import HostUp, Reports
from clusterd.daemon.storage.snapshot_replicas import SnapshotReplicas
from clusterd.errors import AgentLost
from clusterd.protocol.agent import HelloReply, StateSnapshotRow
from clusterd.protocol.messages import Request
from clusterd.types import HostId, JobId, JobKind
from tests.conftest import RunningCluster
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import running
from tests.scenarios.test_migration import agent_of


class Broken:
    """Launches with a bug."""

    async def prepare(self, *_: Any) -> None:
        raise KeyError("nobody thought of this")


class Away(Broken):
    """The first launch loses its host, and is not over when the host is back."""

    def __init__(self) -> None:
        self._was_away = False

    async def prepare(self, *_: Any) -> None:
        if self._was_away:
            await super().prepare()
        self._was_away = True
        await anyio.wait_all_tasks_blocked()
        raise AgentLost("a: the connection broke")


class Deaf:
    """Agents of which one does not answer."""

    def __init__(self, deaf: str) -> None:
        self._deaf = deaf
        self.reports = Reports()

    async def request(self, host: str, request: Request[Any], timeout_s: float | None = 60.0, **_: Any) -> None:
        if host == self._deaf:
            raise AgentLost(f"{host} did not answer {request.verb!r} within 60 s")

    async def slice_server(self, host: str, request: Request[Any], **_: Any) -> tuple[str, int]:
        await self.request(host, request)
        return "127.0.0.1", 0


def carried_out(lab: Lab, decided: list[d.Decision], launches: Any = None, deaf: str | None = None) -> list[e.Event]:
    """Events reported when every launch and model inspection raises an exception.

    Args:
        launches: what else happens to them.
        deaf: the host that has the job's snapshot, and does not answer.
    """
    reported: list[e.Event] = []

    async def report(event: e.Event) -> None:
        reported.append(event)

    async def secrets(job: str) -> dict[str, str]:
        return {}

    async def nothing(*_: Any) -> None:
        pass

    async def run() -> None:
        engine: Any = SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state, report=report)
        archive: Any = SimpleNamespace(secrets=secrets, forget_secrets=nothing)
        hosts: Any = Deaf(deaf) if deaf else SimpleNamespace(reports=Reports())
        timers: Any = SimpleNamespace(changed=lambda: None)
        replicas: Any = SimpleNamespace(forget=nothing)
        if deaf:
            replicas = SnapshotReplicas(engine, hosts, "secret")
            hello = HelloReply("agent", "1", "boot", 0.0, {}, (), (StateSnapshotRow("1.1.g1.snap0.0", 20),))
            replicas.on_up(HostId(deaf), HostUp(hello))
        made = launches or Broken()
        migrations = Migrations(engine, hosts, made)
        inspector = ModelInspector(engine, hosts, archive, hosts, made)
        async with anyio.create_task_group() as tasks:
            Executor(engine, hosts, archive, timers, tasks, made, migrations, inspector, replicas).carry_out(
                [x for x in decided if not isinstance(x, d.StopAttempt)]
            )

    anyio.run(run)
    return reported


def wait_for_retry(lab: Lab, job: JobId) -> list[d.Decision]:
    """The next try, when it is time."""
    due_s = lab.scheduler.state.timers.get(Timer(TimerKind.RETRY, job))
    if due_s is None:
        return []
    lab.now_s = due_s
    return lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.RETRY, job)))


def test_a_bug_in_a_launch_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, decided = lab.submit()
    while lab.state(job) != "failed":
        assert any(isinstance(x, d.LaunchAttempt) for x in decided), "it is starting for ever"
        lab.tell(*carried_out(lab, decided))
        decided = lab.stopped(job)
        if lab.state(job) == "queued":
            decided = wait_for_retry(lab, job)
    assert "a bug of clusterd's own, which daemon.log tells of: KeyError: 'nobody thought of this'" in lab.why(job)
    assert "Traceback" in caplog.text
    assert lab.scheduler.state.holders == {}


def test_a_bug_while_a_model_is_learned_is_said(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, decided = lab.submit(kind=JobKind.ELASTIC)
    while lab.state(job) != "failed":
        assert any(isinstance(x, d.DescribeModel) for x in decided), "its model is learned for ever"
        decided = lab.tell(*carried_out(lab, decided))
        decided += wait_for_retry(lab, job)
    assert "KeyError: 'nobody thought of this'" in lab.why(job)
    assert "Traceback" in caplog.text


def test_a_snapshot_whose_host_falls_silent_is_not_waited_for_for_ever() -> None:
    """No rank is to be on that host, so that nobody asks for the launch again when it is back."""
    lab = Lab()
    for name in "ab":
        lab.host(name, gpus=1)
    lab.host("c", cpus=1)
    job = running(lab, devices=1)
    lost = lab.attempt(job).hosts[0]
    lab.tell(e.HostDisconnected(**lab.at(), host=lost, why="no power"))
    decided = lab.fire(Timer(TimerKind.HOST_LOST, lost))
    decided = [x for x in decided if isinstance(x, d.LaunchAttempt)]
    assert [x.attempt for x in decided] == [2]
    lab.tell(*carried_out(lab, decided, deaf="c"))
    assert "c did not answer 'snapshot_admit'" in lab.why(job)
    lab.stopped(job)
    assert lab.state(job) == "starting"
    assert lab.attempt(job).number == 3


def test_a_host_that_is_back_before_the_launch_was_given_up_is_heard() -> None:
    """Another host still ended what the launch had begun there; whoever is back asks for it once."""
    lab = Lab()
    lab.host("a", gpus=1)
    job, decided = lab.submit()
    launch = next(x for x in decided if isinstance(x, d.LaunchAttempt))
    lab.tell(*carried_out(lab, [launch, launch], Away()))
    assert "nobody thought of this" in lab.why(job), "it is starting for ever"


@pytest.mark.slow
def test_a_device_that_is_gone_when_the_launch_is_asked_for_again(cluster: RunningCluster) -> None:
    """The daemon and a GPU died together: the job waits for another, and what is left serves others."""
    cluster.start(hosts=1)
    cluster.wait_until_up(1)
    agent = agent_of(cluster, 0)
    os.kill(agent, signal.SIGSTOP)
    try:
        job = cluster.submit('command = ["true"]\nresources = { devices = 2 }\n')
        cluster.wait_for(job, lambda row: row["state"] == "starting")
        cluster.kill()
        (cluster.directory / "clusterd.toml").write_text("[hosts.local0]\ncpu_devices = 1\n")
        cluster.environment["CLUSTERD_CONFIG"] = str(cluster.directory / "clusterd.toml")
    finally:
        os.kill(agent, signal.SIGCONT)
    cluster.start()
    cluster.wait_for(job, lambda row: row["state"] == "queued")
    assert "it has no local0:cpu1 any more" in cluster.run("why", job).stdout
    cluster.run("run", "--devices", "1", "--", "true")
