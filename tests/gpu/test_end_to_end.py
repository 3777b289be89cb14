"""A training job on a GPU through daemon, SSH, agent and fork server: check, train, migrate, a killed rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

for _package in ("asyncssh", "msgspec", "platformdirs", "hypothesis"):
    pytest.importorskip(_package, reason=f"no {_package} here: unpack it into the folder GPU_PACKAGES")

from tests.conftest import RunningCluster, new_cluster  # noqa: E402  # a missing package skips it

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(240)]

JOB = """
kind = "elastic"
command = ["python", "train.py", "--steps", "100000"]
trials = false
limits = { retries = 1 }
resources = { gpus = 1 }
"""


@pytest.fixture
def running() -> Iterator[RunningCluster]:
    with new_cluster() as made:
        made.start(1)
        yield made


def test_a_job_trains_moves_and_survives_a_killed_rank(
    running: RunningCluster, up_to_cuda: Callable[[str], None]
) -> None:
    checked = running.run("host", "check", "--python", sys.executable, check=False).stdout
    assert "torch" in checked
    job = running.submit(JOB)
    row = running.wait_for(job, lambda row: "being learned" not in row["reason"] or row["state"] == "failed")
    assert row["state"] != "failed", row["reason"]
    up_to_cuda("daemon, SSH, agent and fork server run; the host was checked and the job's model inspected")
    assert "computed within" in checked
    _train_further(running, job)
    for plan in ("offload=optimizer", "dp=1"):
        running.run("migrate", job, "--plan", plan)
        running.wait_for(job, lambda row, plan=plan: row["plan"] == plan)  # type: ignore[misc]
        _train_further(running, job)
    records = running.directory.glob(f"local/0/agent/attempts/{job}.1*/rank-0.state.json")
    ranks = [json.loads(record.read_text()) for record in records]
    [pid] = [rank["pid"] for rank in ranks if rank["state"] == "running"]
    os.kill(pid, signal.SIGKILL)
    running.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    _train_further(running, job)
    running.run("cancel", job)


def _train_further(cluster: RunningCluster, job: str) -> None:
    before: dict[str, Any] = cluster.job(job)
    cluster.wait_for(job, lambda row: (row["step"] or 0) >= (before["step"] or 0) + 10)
