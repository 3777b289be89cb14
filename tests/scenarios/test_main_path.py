"""The first five minutes of a new user, with real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterd.train.process.start_phases import PHASES
from tests.conftest import RunningCluster, crash_host, processes_of, until

ELASTIC = """
kind = "elastic"
command = ["python", "train.py", "--steps", "{steps}"]
resources = {{ devices = {devices}, plan = {plan} }}
"""
STUBBORN = ["sleep", f"1000.{os.getpid()}"]  # unique to this process


def test_run_streams_the_log_and_returns_the_exit_code(local_cluster: RunningCluster) -> None:
    """`clusterd run -- COMMAND` with any command."""
    done = local_cluster.run("run", "--devices", "1", "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert done.returncode == 7
    assert done.stdout.splitlines() == ["out"]
    assert "err" in done.stderr.splitlines() and "exit code 7" in done.stderr
    (job,) = (row["id"] for row in local_cluster.call("jobs", all=True))
    assert local_cluster.run("logs", job).stdout.splitlines() == ["out", "err"]


def test_the_code_that_runs_is_the_code_of_the_submit(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """The code is edited while the job is in the queue."""
    (tmp_path / "say.py").write_text("print('as submitted')")
    (tmp_path / ".clusterdignore").write_text("big.bin\n")
    (tmp_path / "big.bin").write_bytes(b"x" * 1000)
    local_cluster.run("host", "drain", "local0", "local1")
    job = local_cluster.run("run", "-d", "--", "python3", "say.py", cwd=tmp_path).stdout.strip()
    (tmp_path / "say.py").write_text("print('edited')")
    local_cluster.run("host", "undrain", "local0")
    assert local_cluster.run("wait", job).returncode == 0
    assert local_cluster.run("logs", job).stdout == "as submitted\n"
    attempts = [p for p in local_cluster.directory.glob("local/*/agent/attempts/*/work/*") if p.name == "big.bin"]
    assert attempts == []


@pytest.mark.slow
def test_two_elastic_jobs_under_different_plans_across_hosts(local_cluster: RunningCluster) -> None:
    """Both jobs need all four devices: one waits, both train, and ls, show, why and logs report it."""
    saved = local_cluster.directory / "saved"
    text = ELASTIC.format(steps=12, devices=4, plan="{ dp = 2, tp = 2 }")
    first = local_cluster.submit(f'{text}checkpoints = {{ directory = "{saved}" }}', "wide")
    local_cluster.wait_for(first, lambda row: row["state"] in ("starting", "running"))
    second = local_cluster.submit(
        ELASTIC.format(steps=12, devices=4, plan="{ dp = 2, pp = 2, accumulation = 4 }"), "deep"
    )
    waiting = local_cluster.wait_for(second, lambda row: "waits for 4 free devices" in row["reason"])
    assert waiting["state"] == "queued"
    message = local_cluster.run("why", "deep").stdout
    assert "wide holds 4 devices" in message
    assert local_cluster.run("wait", "wide", "deep").returncode == 0
    for job in (first, second):
        row = local_cluster.job(job)
        assert (row["step"], row["steps"]) == (12, 12)
        assert row["loss"] < row["first_loss"]
        started = [phase["phase"] for phase in row["attempts"][0]["start"]]
        assert started == ["inspect", "queue", "launch", *PHASES]
        assert len(row["hosts"]) == 2
        steps = [json.loads(line) for line in local_cluster.call("steps", job=job)["data"].splitlines()]
        assert [s["step"] for s in steps] == list(range(1, 13))
    assert "step 12/12" in local_cluster.run("logs", "deep").stdout
    assert (saved / f"wide-{first}/final/.metadata").exists()
    row = local_cluster.job(first)
    assert (row["checkpoint"], row["checkpoint_step"]) == (str(saved / f"wide-{first}/final"), 12)
    rows = json.loads(local_cluster.run("ls", "--all", "-o", "json").stdout)
    assert {row["name"]: row["plan"] for row in rows} == {"wide": "dp=2,tp=2", "deep": "dp=2,pp=2,accumulation=4"}


def test_cancel_leaves_no_process_and_frees_the_devices(local_cluster: RunningCluster) -> None:
    """The script ignores SIGTERM and has a child in another session."""
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; {0} & wait; {0}' & {0}; {0}".format(" ".join(STUBBORN))
    limits = "limits = { grace = '1s' }\nresources = { devices = 2 }"
    text = f"command = ['sh', '-c', '''{script}''']\nworkdir = '.'\n{limits}"
    job = local_cluster.submit(text, "stubborn")
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    until(lambda: len(_sleepers()) >= 2)
    local_cluster.run("cancel", "--wait", "stubborn")
    assert _sleepers() == []
    status = local_cluster.call("status")
    assert status["leased"] == 0
    assert local_cluster.job(job)["state"] == "cancelled"


def _sleepers() -> list[int]:
    command = b"".join(word.encode() + b"\0" for word in STUBBORN)
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and (place / "cmdline").read_bytes() == command:
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_secrets_reach_the_job_and_nothing_else(local_cluster: RunningCluster) -> None:
    """A secret is in none of: the journal's events, command lines, `show`, files on the host."""
    secret = "s3cr3t-that-must-not-leak"
    local_cluster.environment["MY_TOKEN"] = secret
    text = """
    command = ["sh", "-c", "test -n \\"$TOKEN\\" && sleep 1 && echo got ${#TOKEN}"]
    workdir = "."
    [secrets]
    TOKEN = "env:MY_TOKEN"
    """
    job = local_cluster.submit("\n".join(line.strip() for line in text.splitlines()), "secretive")
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    for pid in processes_of(local_cluster.directory):
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    assert local_cluster.run("wait", job).returncode == 0
    assert local_cluster.run("logs", job).stdout == f"got {len(secret)}\n"
    assert secret not in local_cluster.run("show", job, "-o", "json").stdout
    local_cluster.run("stop")
    for place in local_cluster.directory.rglob("*"):
        # SQLite may retain freed pages of the journal; no other file may have the secret.
        if place.is_file() and place.name not in ("journal.db", "journal.db-wal"):
            assert secret.encode() not in place.read_bytes(), place


def test_stop_leaves_jobs_running_and_start_finds_them(local_cluster: RunningCluster) -> None:
    """Such as in an upgrade of the daemon."""
    job = local_cluster.submit(ELASTIC.format(steps=60, devices=2, plan="{ dp = 2 }"), "long")
    local_cluster.wait_for(job, lambda row: row["step"] >= 2)
    assert "1 job keeps running: long" in local_cluster.run("stop").stderr
    local_cluster.start()
    row = local_cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert row["attempt"] == 1
    assert row["step"] == 60
    steps = [json.loads(line)["step"] for line in local_cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, 61))


def test_kill_9_of_the_daemon_loses_nothing(local_cluster: RunningCluster) -> None:
    """The same attempt continues without a lost step, with a complete log; a queued job stays queued, and runs."""
    job = local_cluster.submit(ELASTIC.format(steps=60, devices=4, plan="{ dp = 4 }"), "long")
    local_cluster.wait_for(job, lambda row: row["step"] >= 2)
    queued = local_cluster.run("run", "-d", "--devices", "1", "--", "true").stdout.strip()
    local_cluster.kill()
    local_cluster.start()
    row = local_cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert (row["attempt"], row["step"]) == (1, 60)
    assert local_cluster.run("logs", job).stdout.count("step 60/60") == 1
    steps = [json.loads(line)["step"] for line in local_cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, 61))
    assert local_cluster.wait_for(queued, lambda row: row["state"] == "finished")["attempt"] == 1


def test_a_job_is_requeued_when_its_host_dies(local_cluster: RunningCluster) -> None:
    """After kill -9 of all processes of one host the job is requeued with a reason, and finishes."""
    resources = "{ devices = 1, hosts = ['local0'] }"
    text = f"command = ['sleep', '2']\nworkdir = '.'\nresources = {resources}"
    job = local_cluster.submit(text, "unlucky")
    local_cluster.wait_for(job, lambda row: row["state"] == "running")
    crash_host(local_cluster.directory, 0)
    row = local_cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert row["attempt"] == 2
    assert "vanished without an exit record" in local_cluster.run("why", job).stdout


@pytest.mark.slow
def test_a_second_training_in_a_script_is_refused_in_one_line(local_cluster: RunningCluster) -> None:
    """Regression: its rendezvous used the first training's port, and the job was requeued again and again as lost."""
    script = (
        "import torch\n"
        "from clusterd import train\n"
        "for _ in range(2):\n"
        "    train.run(model=lambda: torch.nn.Linear(2, 2), loss=lambda o, t: (o - t).square().mean(),\n"
        "              global_batch=4, steps=3, data=[(torch.ones(2), torch.zeros(2))] * 8,\n"
        "              optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    job = local_cluster.submit_script(script, "twice", devices=2)
    row = local_cluster.wait_for(job, lambda row: row["state"] in ("failed", "finished"), 120.0)
    assert (row["state"], row["exit_code"], row["attempt"]) == ("failed", 1, 1)
    assert "the script trains a second time (clusterd.train.run or session)" in local_cluster.run("logs", job).stdout


def test_a_loader_that_starves_its_device_is_named(local_cluster: RunningCluster) -> None:
    script = """
import time
import torch
from clusterd import train

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.ones(4), torch.ones(1)

train.run(
    model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, data=Slow(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=8, steps=100000,
)
"""
    job = local_cluster.submit_script(script, "slow")
    local_cluster.wait_for(job, lambda row: "wait for its data loader" in row["reason"])
