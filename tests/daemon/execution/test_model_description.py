"""A process that describes a model ends with its requester."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clusterd.core import events as e
from clusterd.daemon.access import Peer
from clusterd.daemon.api.files import RetentionVerbs
from clusterd.protocol.requests import ForgetAttempt, Forgotten
from clusterd.types import JobKind
from tests.conftest import RunningCluster, processes_of, until
from tests.core.conftest import Lab

SLEEPS = 'kind = "elastic"\ncommand = ["sh", "-c", "sleep 3123"]\nresources = { devices = 1 }\n'


def sleepers(cluster: RunningCluster) -> set[int]:
    """Processes of scripts that never tell."""
    found = set()
    for pid in processes_of(cluster.directory):
        try:
            message = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if message[:2] == [b"sleep", b"3123"]:
            found.add(pid)
    return found


def test_a_job_that_is_cancelled_leaves_no_description(local_cluster: RunningCluster) -> None:
    job = local_cluster.submit(SLEEPS)
    until(lambda: bool(sleepers(local_cluster)), 30.0, local_cluster.log)
    local_cluster.run("cancel", job)
    until(lambda: not sleepers(local_cluster), 10.0, local_cluster.log)
    until(lambda: not list(local_cluster.directory.rglob(f"attempts/{job}.*")), 10.0, local_cluster.log)


@pytest.mark.slow
def test_a_description_does_not_outlive_its_daemon(local_cluster: RunningCluster) -> None:
    """The next daemon does not know of it: it ends it, and asks anew."""
    job = local_cluster.submit(SLEEPS)
    until(lambda: bool(sleepers(local_cluster)), 30.0, local_cluster.log)
    first = sleepers(local_cluster)
    local_cluster.kill()
    local_cluster.start()
    until(lambda: bool(sleepers(local_cluster)) and not sleepers(local_cluster) & first, 30.0, local_cluster.log)
    local_cluster.run("cancel", job)
    until(lambda: not sleepers(local_cluster), 10.0, local_cluster.log)
    assert local_cluster.job(job)["state"] == "cancelled"


def test_forget_asks_every_host_for_measurements_of_the_model() -> None:
    """The host that inspected the model is not recorded, and it may have failed to remove the files."""
    asked: list[tuple[str, str, int]] = []

    class Agents:
        async def request(
            self, host: str, request: ForgetAttempt, timeout_s: float | None = 60.0, **_: Any
        ) -> Forgotten:
            asked.append((host, request.verb, request.attempt))
            return Forgotten(7)

    lab = Lab()
    for name in "ab":
        lab.host(name, gpus=1)
    job, _ = lab.submit(kind=JobKind.ELASTIC)
    lab.tell(e.JobCancelled(**lab.at(), job=job))
    engine: Any = SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state)
    agents: Any = Agents()
    archive: Any = SimpleNamespace(remove_job=lambda job: 0)
    workdirs: Any = SimpleNamespace()  # the job has none
    answer = anyio.run(RetentionVerbs(engine, agents, archive, workdirs).forget, Peer("ann", 0, is_operator=True), job)
    assert asked == [("a", "forget", 0), ("b", "forget", 0)]
    assert answer["bytes"] == 14
