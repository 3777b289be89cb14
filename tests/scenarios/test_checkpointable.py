"""Scripts with their own training loop save on request, stop, and restart at another size."""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RunningCluster, until
from tests.hang import HANG_S

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

DEAF = """
import os, time
from clusterd.train.checkpointable import Requests
while not os.path.exists("{go}"):
    time.sleep(0.01)
with Requests() as requests:
    requests.progress(1, 1.0)
    while not requests.save:
        time.sleep(0.01)
    print("asked to save", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_a_checkpointable_job_restarts_at_another_size_where_it_stopped(local_cluster: RunningCluster) -> None:
    """`checkpoint` saves while the job runs; `migrate` makes it save, stop and restart under another plan."""
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
def test_a_checkpointable_job_leaves_a_drained_host(local_cluster: RunningCluster) -> None:
    """The job saves and continues on the other host with the next step."""
    text = JOB.replace("EXAMPLE", str(EXAMPLE)).replace("DIRECTORY", f"{local_cluster.directory}/{{job}}")
    job = local_cluster.submit(text, "own")
    row = local_cluster.wait_for(job, lambda row: row["step"] >= 5)
    (host,) = {device.partition(":")[0] for device in row["devices"]}
    local_cluster.run("host", "drain", host)
    row = local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["state"] == "running")
    assert row["plan"] == "dp=2" and not any(device.startswith(host) for device in row["devices"])
    assert local_cluster.call("host", host=host)["jobs"] == []
    before = [json.loads(x)["step"] for x in local_cluster.call("steps", job=job, attempt=1)["data"].splitlines()]
    until(lambda: bool(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()), 30.0, local_cluster.log)
    after = json.loads(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()[0])
    assert after["step"] == before[-1] + 1
    assert f"{host} is drained: it saves" in local_cluster.run("why", job).stdout
    local_cluster.run("cancel", job)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="Hugging Face's Trainer is not installed: pip install transformers accelerate",
)
def test_hugging_faces_trainer_restarts_at_another_size_where_it_stopped(local_cluster: RunningCluster) -> None:
    text = f"""
kind = "checkpointable"
workdir = "{EXAMPLE.with_name("hf_trainer")}"
command = ["python", "train.py", "--directory", "{local_cluster.directory}/{{job}}", "--steps", "4000"]
resources = {{ plans = ["dp=2", "dp=1"] }}
"""
    job = local_cluster.submit(text, "trainer")
    local_cluster.wait_for(job, lambda row: row["step"] >= 5)
    local_cluster.run("migrate", job, "--plan", "dp=1")
    local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["step"] > 5)
    (saved,) = (int(f.name.rpartition("-")[2]) for f in (local_cluster.directory / job).glob("checkpoint-*"))
    until(lambda: bool(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()), 30.0, local_cluster.log)
    after = json.loads(local_cluster.call("steps", job=job, attempt=2)["data"].splitlines()[0])
    assert (saved >= 5, after["step"]) == (True, saved + 1)
    log = local_cluster.run("logs", job).stdout
    assert f"goes on from {local_cluster.directory}/{job}/checkpoint-{saved} with 1 replicas" in log
    local_cluster.run("cancel", job)


@pytest.mark.slow
def test_a_script_that_only_knows_sigterm_is_restarted_too(local_cluster: RunningCluster) -> None:
    """The script saves on SIGTERM and exits with 0, which does not count as finished."""
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
    """Log of the newest attempt."""
    return cluster.run("logs", job).stdout


@pytest.mark.slow
def test_checkpoint_fails_when_the_job_is_cancelled(local_cluster: RunningCluster) -> None:
    """The script gets the request and saves nothing, and then the job is cancelled."""
    work = local_cluster.directory / "deaf"
    work.mkdir()
    (work / "deaf.py").write_text(DEAF.replace("{go}", str(work.parent / "go")))
    job = local_cluster.submit(
        f'kind = "checkpointable"\nworkdir = "{work}"\ncommand = ["{sys.executable}", "deaf.py"]\n'
        "resources = { devices = 1 }\nlimits = { grace = 0.1 }"
    )
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    place = str(local_cluster.directory / "place")
    early = local_cluster.run("checkpoint", job, place, check=False)
    assert (early.returncode, "nobody of job listens: it is still at its start, or" in early.stderr) == (75, True)
    (work.parent / "go").touch()
    local_cluster.wait_for(job, lambda row: row["step"] == 1)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(local_cluster.run, "checkpoint", job, place, check=False)
        until(lambda: "asked to save" in local_cluster.run("logs", job).stdout)
        second = local_cluster.run("checkpoint", job, place, check=False)
        assert (second.returncode, f"writing a checkpoint to {place}: wait for it" in second.stderr) == (75, True)
        local_cluster.run("cancel", job)
        answer = first.result(timeout=HANG_S)
    assert (answer.returncode, "had not written its checkpoint" in answer.stderr) == (1, True), answer.stderr
