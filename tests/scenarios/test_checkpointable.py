"""Scripts with a loop of their own: saved on request, stopped, and started again at another size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RunningCluster, until

EXAMPLE = REPOSITORY / "examples" / "checkpointable"

JOB = """
kind = "checkpointable"
workdir = "EXAMPLE"
command = ["python", "train.py", "--dp", "{dp}", "--directory", "DIRECTORY", "--steps", "100000"]
resources = { plans = ["dp=2", "dp=1"] }
"""

BY_SIGNAL = """
import pathlib, signal, sys, time
saved = pathlib.Path(sys.argv[1])
count = int(saved.read_text()) if saved.exists() else 0
print("starts at", count, "with", sys.argv[2], flush=True)
def leave(*_):
    saved.write_text(str(count + 1))
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.pause()
"""


@pytest.mark.slow
def test_a_checkpointable_job_restarts_at_another_size_where_it_stopped(local_cluster: RunningCluster) -> None:
    """`checkpoint` saves while it runs; `migrate` has it save, stop and start with the other sizes filled in."""
    saved = local_cluster.directory / "saved"
    text = JOB.replace("EXAMPLE", str(EXAMPLE)).replace("DIRECTORY", f"{saved}/{{job}}")
    job = local_cluster.submit(text, "own")
    row = local_cluster.wait_for(job, lambda row: row["step"] >= 5)
    assert (row["plan"], len(row["devices"])) == ("dp=2", 2)

    local_cluster.run("checkpoint", job, str(saved / "elsewhere"))
    assert (saved / job / "newest.pt").exists()
    assert local_cluster.job(job)["checkpoint_step"] >= 5

    for wish, why in (
        (["dp=8"], "asks for 8"),
        (["dp=1", "--devices", "local1:cpu0"], "it starts where there is room"),
    ):
        refused = local_cluster.run("migrate", job, "--plan", *wish, check=False)
        assert refused.returncode and why in refused.stderr
    local_cluster.run("migrate", job, "--plan", "dp=1")
    row = local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    assert (row["plan"], len(row["devices"])) == ("dp=1", 1)
    before = [json.loads(x)["step"] for x in local_cluster.call("steps", job=job, attempt=1)["data"].splitlines()]
    until(lambda: bool(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()), 30.0, local_cluster.log)
    after = json.loads(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()[0])
    assert after["step"] == before[-1] + 1
    local_cluster.run("cancel", job)
    assert local_cluster.wait_for(job, lambda row: row["ended_s"])["state"] == "cancelled"


@pytest.mark.slow
def test_a_script_that_only_knows_sigterm_is_restarted_too(local_cluster: RunningCluster) -> None:
    """SIGTERM is what every script can hear: it saves, ends with 0, and is not taken for finished."""
    work = local_cluster.directory / "plain"
    work.mkdir()
    (work / "loop.py").write_text(BY_SIGNAL)
    saved = work.parent / "count"
    text = f"""
kind = "checkpointable"
workdir = "{work}"
command = ["python3", "loop.py", "{saved}", "{{devices}}"]
resources = {{ devices = 2 }}
"""
    job = local_cluster.submit(text, "plain")
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    until(lambda: "starts at" in logs(local_cluster, job), 30.0, local_cluster.log)
    local_cluster.run("migrate", job, "--plan", "dp=1")
    local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    until(lambda: "with 1" in logs(local_cluster, job), 30.0, local_cluster.log)
    assert Path(saved).read_text() != ""


def logs(cluster: RunningCluster, job: str) -> str:
    """What the newest attempt has said."""
    return cluster.run("logs", job).stdout
