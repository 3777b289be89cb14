"""A stopped job frees its devices, whatever it left behind and whichever host does not answer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution import executor as module
from clusterd.daemon.execution.executor import Stops
from clusterd.errors import AgentLost, HostError
from clusterd.protocol.requests import Stopped, StopRanks
from tests.conftest import RunningCluster
from tests.core.conftest import Lab


@pytest.fixture
def lab() -> Lab:
    return Lab()


STEPS = """
import json
step = {"step": 1, "loss": None, "time_s": 0.5, "samples": 16, "at_s": 1.7e9, "plan": "dp=2,tp=2,pp=2,zero=3"}
with open("../steps.jsonl", "w") as steps:
    print(json.dumps(step), file=steps)
    for number in range(2, 180_001):
        print(json.dumps({**step, "step": number, "loss": 1 / number}), file=steps)
    steps.write('{"step": 180001, "los')
"""


@pytest.mark.slow
def test_a_job_of_many_steps_ends(local_cluster: RunningCluster) -> None:
    """Of 21 MB of steps the end is kept, from the middle of a line on; a crash cut the last one off."""
    job = local_cluster.run("run", "-d", "--", sys.executable, "-c", STEPS).stdout.strip()
    local_cluster.run("wait", job)
    row = local_cluster.job(job)
    assert (row["state"], row["step"], row["loss"]) == ("finished", 180_000, 1 / 180_000)
    stored = local_cluster.call("steps", job=job)["data"]
    assert len(stored) == 16 << 20
    assert not any(device["job"] for host in local_cluster.call("hosts") for device in host["devices"])


class Agent:
    """Of a host whose disk is full for a while, and which takes long after that."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    async def request(self, host: str, request: StopRanks, timeout_s: float | None = 60.0) -> Stopped:
        if self.refusals:
            self.refusals -= 1
            raise HostError("No space left on device")
        if timeout_s is not None:
            raise AgentLost(f"{host} did not answer {request.verb!r} within {timeout_s:.0f} s")
        return Stopped(())


def stop(lab: Lab, agent: Any, decided: list[d.Decision]) -> list[e.Event]:
    """Event that reports the outcome of a stop."""
    reported: list[e.Event] = []

    async def report(event: e.Event) -> None:
        reported.append(event)

    async def nothing(*_: Any) -> None:
        pass

    async def run() -> None:
        engine: Any = SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state, report=report)
        archive: Any = SimpleNamespace(fetch_attempt=nothing)
        async with anyio.create_task_group() as tasks:
            for decision in decided:
                if isinstance(decision, d.StopAttempt):
                    tasks.start_soon(Stops(engine, agent, archive).stop, decision)

    anyio.run(run)
    return reported


def test_a_host_that_could_not_stop_an_attempt_is_asked_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the host stays connected, so nothing repeated the stop, and the devices were never freed."""
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job))
    lab.tell(*stop(lab, Agent(refusals=3), decided))
    assert lab.state(job) == "cancelled"


def test_a_host_that_went_meanwhile_is_left_to_its_return(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are reconciled, and stopped, when it reconnects."""
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job))
    host = lab.attempt(job).hosts[0]
    lab.tell(e.HostDisconnected(**lab.at(), host=host, why="pulled"))
    assert stop(lab, Agent(refusals=1), decided) == []
    assert any(isinstance(x, d.StopAttempt) for x in lab.connect("a"))
