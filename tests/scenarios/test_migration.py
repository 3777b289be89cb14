"""Live migrations, and failures around them: the job continues, and each step is trained once."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningCluster, crash_host, processes_of, until

JOB = """
kind = "elastic"
trials = false
command = ["python", "train.py", "--steps", "{steps}"]
{more}
resources = {{ devices = {devices}, plan = {plan} }}
"""


def train(
    cluster: RunningCluster, steps: int = 400, devices: int = 4, plan: str = "{ dp = 2, tp = 2 }", **more: Any
) -> str:
    """Start a migration of a job and wait until it is under way."""
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in more.items() if key != "name")
    job = cluster.submit(JOB.format(steps=steps, devices=devices, plan=plan, more=lines), more.get("name", "gpt"))
    cluster.wait_for(job, lambda row: row["step"] >= 3)
    return job


def steps_of(cluster: RunningCluster, job: str) -> list[int]:
    data = cluster.call("steps", job=job)["data"]
    return [line["step"] for line in map(json.loads, data.splitlines()) if "step" in line]


def trains_on(cluster: RunningCluster, job: str, more: int = 3) -> dict[str, Any]:
    """Wait until the job is some steps further; fail if a step is missing or repeated. Returns the job's row."""
    step = cluster.job(job)["step"]
    row = cluster.wait_for(job, lambda row: row["step"] >= step + more and row["state"] == "running")
    steps = steps_of(cluster, job)
    assert steps == list(range(1, len(steps) + 1))
    return row


def ranks(cluster: RunningCluster, job: str, generation: int) -> list[int]:
    """Pids of one generation of the job's first attempt."""
    tag = f"/{job}.1".encode() if generation == 1 else f"/{job}.1.{generation}".encode()
    found = []
    for pid in processes_of(cluster.directory):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if any(word.endswith(tag) for word in environment.split(b"\0") if b"CLUSTERD_TAG" in word):
            found.append(pid)
    return found


def agent_of(cluster: RunningCluster, number: int) -> int:
    record = json.loads((cluster.directory / "local" / str(number) / "agent" / "agent.json").read_text())
    return int(record["pid"])


def begin(cluster: RunningCluster, job: str, plan: str) -> None:
    """Request a migration without waiting for it."""
    cluster.call("migrate", job=job, plan=plan, devices=[])


def last_move(cluster: RunningCluster, job: str) -> dict[str, Any]:
    row = cluster.wait_for(job, lambda row: row["migrations"] and row["migrations"][-1]["ended_s"])
    move: dict[str, Any] = row["migrations"][-1]
    return move


@pytest.mark.slow
def test_manual_migrations_to_other_plans_and_devices(local_cluster: RunningCluster) -> None:
    """To another plan, to fewer devices, and back; the output has plan, bytes and downtime, and each phase its time."""
    job = train(local_cluster)
    message = local_cluster.run("migrate", "gpt", "--plan", "tp=4", "--dry-run").stdout
    assert "dp=2,tp=2 -> tp=4" in message
    assert "predicted downtime" in message
    assert local_cluster.job(job)["migrations"] == []
    message = local_cluster.run("migrate", "gpt", "--plan", "dp=4,zero=3").stdout
    assert "resumed after step" in message
    local_cluster.run("migrate", "gpt", "--plan", "tp=2", "--devices", "local1:cpu0,local1:cpu1", "--pin")
    row = trains_on(local_cluster, job)
    assert (row["plan"], row["devices"], row["attempt"]) == ("tp=2", ["local1:cpu0", "local1:cpu1"], 1)
    assert [m["failure"] for m in row["migrations"]] == ["", ""]
    assert {p["phase"] for p in row["migrations"][-1]["phases"]} == {
        "prepare",
        "quiesce",
        "transfer",
        "verify",
        "resume",
    }
    for move in row["migrations"]:
        transfer = next(phase for phase in move["phases"] if phase["phase"] == "transfer")
        copied = re.search(r"copied within ([0-9.]+) s", transfer["what"])
        assert copied is not None
        assert 0 < float(copied[1]) <= transfer["seconds"] + 1e-3, "more time copying than the transfer took"
    local_cluster.wait_for(job, lambda _: local_cluster.call("status")["leased"] == 2)  # the source ranks have exited
    refused = local_cluster.run("migrate", "gpt", "--plan", "dp=3", check=False)
    assert refused.returncode == 1
    assert "16 cannot be cut into 3 equal shares" in refused.stderr


@pytest.mark.slow
def test_a_job_leaves_a_drained_host(local_cluster: RunningCluster) -> None:
    """The job migrates to the remaining devices."""
    job = train(local_cluster, devices=2, plan="{ dp = 2 }")
    local_cluster.run("host", "drain", local_cluster.job(job)["hosts"][0])
    move = last_move(local_cluster, job)
    assert move["failure"] == ""
    row = trains_on(local_cluster, job)
    assert row["hosts"] == ["local1"]
    assert (row["plan"], row["attempt"]) == ("dp=2", 1)


@pytest.mark.slow
def test_the_death_of_a_target_rank_undoes_the_migration(local_cluster: RunningCluster) -> None:
    """kill -9 of a target rank during prepare."""
    job = train(local_cluster)
    begin(local_cluster, job, "dp=4,zero=3")
    until(lambda: bool(ranks(local_cluster, job, 2)))
    os.kill(ranks(local_cluster, job, 2)[0], signal.SIGKILL)
    assert "new rank" in last_move(local_cluster, job)["failure"]
    assert trains_on(local_cluster, job)["plan"] == "dp=2,tp=2"
    until(lambda: not ranks(local_cluster, job, 2))
    local_cluster.run("migrate", "gpt", "--plan", "tp=4")
    assert trains_on(local_cluster, job)["plan"] == "tp=4"


@pytest.mark.slow
def test_the_death_of_an_agent_undoes_the_migration(local_cluster: RunningCluster) -> None:
    """The ranks live on, and the link reconnects to a new agent."""
    job = train(local_cluster)
    begin(local_cluster, job, "dp=4,zero=3")
    until(lambda: bool(ranks(local_cluster, job, 2)))
    os.kill(agent_of(local_cluster, 1), signal.SIGKILL)
    assert last_move(local_cluster, job)["failure"]
    assert trains_on(local_cluster, job)["plan"] == "dp=2,tp=2"


def phase_over(cluster: RunningCluster, phase: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: bool(row["migrating"]) and phase in {p["phase"] for p in row["migrating"]["phases"]}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["prepare", "quiesce"])
def test_the_death_of_the_daemon_during_a_migration(local_cluster: RunningCluster, when: str) -> None:
    """kill -9 before and after all ranks are ready: the job continues under one of the plans."""
    job = train(local_cluster)
    begin(local_cluster, job, "dp=4,zero=3")
    if when == "prepare":
        until(lambda: bool(ranks(local_cluster, job, 2)))
    else:
        local_cluster.wait_for(job, lambda row: phase_over(local_cluster, "prepare")(row) or row["migrations"])
    local_cluster.kill()
    local_cluster.start()
    local_cluster.wait_until_up(2)
    row = trains_on(local_cluster, job)
    assert row["attempt"] == 1
    assert row["plan"] in ("dp=2,tp=2", "dp=4,zero=3")


@pytest.mark.slow
def test_a_killed_rank_is_replaced_from_its_replica(local_cluster: RunningCluster) -> None:
    """kill -9 of one rank of dp=2 x tp=2: its replica has the same state, and no step is repeated.

    The log may lack the step in flight if the killed rank writes the log.
    """
    job = train(local_cluster)
    os.kill(ranks(local_cluster, job, 1)[0], signal.SIGKILL)
    row = local_cluster.wait_for(job, lambda row: row["migrations"] and row["migrations"][-1]["ended_s"])
    move = row["migrations"][-1]
    assert move["failure"] == ""
    row = local_cluster.wait_for(job, lambda row: row["step"] >= move["step"] + 3 and row["state"] == "running")
    assert row["attempt"] == 1
    steps = steps_of(local_cluster, job)
    assert steps == sorted(set(steps))
    assert set(range(1, max(steps) + 1)) - set(steps) <= {move["step"] - 1, move["step"]}


@pytest.mark.slow
def test_survivors_that_spoke_while_there_was_no_daemon_are_heard(local_cluster: RunningCluster) -> None:
    """A rank dies after the daemon, whose successor finds out what the others said meanwhile."""
    job = train(local_cluster)
    pids = ranks(local_cluster, job, 1)
    local_cluster.kill()
    os.kill(pids[0], signal.SIGKILL)

    def said() -> int:
        logs = (local_cluster.directory / "local").rglob("*.log")
        return sum(log.read_bytes().count(b"clusterd: peers are gone after step") for log in logs)

    until(lambda: said() == 3, explain=lambda: str(said()))
    local_cluster.start()
    local_cluster.wait_until_up(2)
    move = last_move(local_cluster, job)
    assert move["failure"] == "" and "died" in move["reason"]
    row = local_cluster.wait_for(job, lambda row: row["step"] >= move["step"] + 3 and row["state"] == "running")
    assert row["attempt"] == 1


@pytest.mark.slow
def test_a_job_without_survivors_resumes_from_its_checkpoint(local_cluster: RunningCluster) -> None:
    """Both hosts lose power; the newest checkpoint is on a shared disk."""
    job = train(local_cluster)
    directory = local_cluster.directory / "checkpoint"
    message = local_cluster.run("checkpoint", "gpt", str(directory)).stderr
    taken = local_cluster.job(job)["checkpoint_step"]
    assert f"step {taken} is in {directory}" in message
    for number in (0, 1):
        crash_host(local_cluster.directory, number)
    row = local_cluster.wait_for(job, lambda row: row["attempt"] == 2 and row["step"] > taken)
    assert f"from step {taken}" in local_cluster.run("why", "gpt").stdout
    steps = steps_of(local_cluster, job)
    assert steps[0] == taken + 1
    assert row["state"] in ("running", "stopping", "finished")


@pytest.mark.slow
def test_a_job_shrinks_for_a_guaranteed_one_and_grows_back(local_cluster: RunningCluster) -> None:
    """A job uses all devices when a guaranteed one arrives."""
    night = train(local_cluster, steps=2000, plan="{ dp = 4 }", name="night")
    text = JOB.format(steps=10, devices=2, plan="{ dp = 2 }", more="guaranteed = true")
    morning = local_cluster.submit(text, "morning")
    local_cluster.wait_for(morning, lambda row: row["state"] == "finished")
    row = local_cluster.wait_for(night, lambda row: len(row["devices"]) == 4 and len(row["migrations"]) >= 2)
    assert [len(m["devices"]) for m in row["migrations"]][:2] == [2, 4]
    assert "to morning: " in row["migrations"][0]["reason"]
    trains_on(local_cluster, night)


@pytest.mark.slow
def test_survivors_release_memory_before_new_ranks_load(cluster: RunningCluster) -> None:
    """Each device fits one rank: survivors release their tensors once their state is handed over."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cluster.start(hosts=1, devices=total // (550 << 20))
    job = train(cluster, devices=2, plan="{ dp = 2 }")
    os.kill(ranks(cluster, job, 1)[-1], signal.SIGKILL)
    move = last_move(cluster, job)
    assert move["failure"] == "" and "died" in move["reason"]
    assert [phase["phase"] for phase in move["phases"]][:2] == ["quiesce", "prepare"], "in this order"
    assert trains_on(cluster, job)["attempt"] == 1
