"""Hosts that dial in: `clusterd agent --join` in another process, reached by its own connection alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd import protocol
from clusterd.protocol.proof import proof
from tests.conftest import GPT, RunningCluster, until
from tests.hang import HANG_S

STAND_IN = """#!/bin/sh
# ssh that needs no server: the remote command is the last argument
echo $$ >> {pids}
for last; do :; done
exec sh -c "$last"
"""

SAVES = """
import os, pathlib, signal, sys
saved = pathlib.Path(sys.argv[1])
print("starts again" if saved.exists() else "starts", flush=True)
def save(*_):
    saved.write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.pause()
"""


class Far:
    """Another machine, as far as its directories and programs go."""

    def __init__(self, cluster: RunningCluster, name: str) -> None:
        # Below "local": the fixture ends what runs under that.
        self.directory = cluster.directory / "local" / name
        (self.directory / "bin").mkdir(parents=True)
        self.pids = self.directory / "ssh.pids"
        program = self.directory / "bin" / "ssh"
        program.write_text(STAND_IN.format(pids=self.pids))
        program.chmod(0o755)
        self.environment = {
            **os.environ, "CLUSTERD_STATE_DIR": str(self.directory), "CLUSTERD_SOCKET": str(cluster.socket),
            "HOME": str(self.directory), "PATH": f"{program.parent}:{os.environ['PATH']}",
        }  # fmt: skip
        self.commands: list[subprocess.Popen[str]] = []

    def join(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the command; its messages go to a file."""
        with open(self.directory / "output", "a") as output:
            command = subprocess.Popen(
                [sys.executable, "-m", "clusterd", "agent", "--join", "ssh://head", *arguments],
                env={**self.environment, **environment}, stdout=output, stderr=output, text=True,
            )  # fmt: skip
        self.commands.append(command)
        return command

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    @property
    def agent(self) -> int:
        """Pid of the agent in the first slot."""
        (record,) = self.directory.glob("joined/*/1/agent/*/agent.json")
        return int(json.loads(record.read_text())["pid"])

    def cut(self) -> None:
        """Kill the newest connection."""
        os.kill(int(self.pids.read_text().split()[-1]), signal.SIGKILL)


@pytest.fixture
def far(cluster: RunningCluster) -> Iterator[Far]:
    """A machine beside a head node without hosts, which gives lost hosts up soon."""
    (cluster.directory / "clusterd.toml").write_text('[daemon]\nhost_lost_after = "4s"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(cluster.directory / "clusterd.toml")
    cluster.run("start", "--config", cluster.environment["CLUSTERD_CONFIG"])
    machine = Far(cluster, "far")
    yield machine
    for command in machine.commands:
        command.kill()
        command.wait(HANG_S)


def hosts(cluster: RunningCluster) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in cluster.call("hosts")}


def wait_up(cluster: RunningCluster, far: Far, *names: str) -> None:
    def are_up() -> bool:
        return {name for name, row in hosts(cluster).items() if row["state"] == "up"} == set(names)

    until(are_up, HANG_S, lambda: f"{far.output}\n{hosts(cluster)}\n{cluster.log()}")


def wait_gone(cluster: RunningCluster, far: Far) -> None:
    until(lambda: not hosts(cluster), HANG_S, lambda: f"{far.output}\n{hosts(cluster)}\n{cluster.log()}")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_command_runs_on_a_host_that_dialed_in_and_ctrl_c_removes_it(cluster: RunningCluster, far: Far) -> None:
    command = far.join("--name", "pod", "--label", "far", "--cpu-devices", "2")
    wait_up(cluster, far, "pod")
    done = cluster.run("run", "--no-snapshot", "--", sys.executable, "-c", "print(6 * 7)")
    assert done.stdout == "42\n"
    row = hosts(cluster)["pod"]
    assert (row["labels"], len(row["devices"])) == (["far"], 2)
    waits = cluster.run("run", "-d", "--no-snapshot", "--name", "waits", "--", "sleep", "600").stdout.strip()
    cluster.wait_for(waits, lambda row: row["state"] == "running")
    agent = far.agent
    command.send_signal(signal.SIGINT)
    assert command.wait(HANG_S) == 0, far.output
    assert "pod has left the cluster" in far.output
    assert hosts(cluster) == {}
    until(lambda: is_gone(agent), HANG_S)
    assert cluster.job(waits)["state"] == "queued"


@pytest.mark.slow
def test_a_broken_connection_comes_back_and_the_job_goes_on(cluster: RunningCluster, far: Far) -> None:
    far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    job = cluster.submit(
        f'kind = "elastic"\ntrials = false\nworkdir = "{GPT}"\ncommand = ["python", "train.py", "--steps", "100000"]\n'
        "resources = { devices = 1 }\n", "trains",
    )  # fmt: skip
    step = cluster.wait_for(job, lambda row: row["step"] >= 3)["step"]
    far.cut()
    until(lambda: "pod is connected again" in far.output, HANG_S, lambda: far.output)
    wait_up(cluster, far, "pod")
    row = cluster.wait_for(job, lambda row: row["step"] > step + 3)
    assert (row["attempt"], row["state"]) == (1, "running")
    # The agent dies; the next one finds its ranks.
    os.kill(far.agent, signal.SIGKILL)
    step = cluster.wait_for(job, lambda row: row["step"] > row["attempt"])["step"]
    row = cluster.wait_for(job, lambda row: row["step"] > step + 3)
    assert (row["attempt"], row["state"]) == (1, "running")


@pytest.mark.slow
def test_the_daemon_restarts_and_the_host_dials_again(cluster: RunningCluster, far: Far) -> None:
    far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    job = cluster.run("run", "-d", "--no-snapshot", "--name", "waits", "--", "sleep", "600").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    cluster.kill()
    cluster.run("start", "--config", cluster.environment["CLUSTERD_CONFIG"])
    wait_up(cluster, far, "pod")
    row = cluster.job(job)
    assert (row["attempt"], row["state"]) == (1, "running")


@pytest.mark.slow
def test_a_host_that_stays_away_is_removed_and_its_jobs_are_queued(cluster: RunningCluster, far: Far) -> None:
    command = far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    job = cluster.run("run", "-d", "--no-snapshot", "--name", "waits", "--", "sleep", "600").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    command.kill()
    until(lambda: hosts(cluster).get("pod", {"state": "unreachable"})["state"] == "unreachable", HANG_S)
    wait_gone(cluster, far)
    assert cluster.job(job)["state"] == "queued"
    # The machine comes back, with a rank that is nobody's any more.
    far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    row = cluster.wait_for(job, lambda row: row["state"] == "running")
    assert row["attempt"] == 2


@pytest.mark.slow
def test_until_drains_the_host_and_removes_it_before_its_end(cluster: RunningCluster, far: Far, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    script = tmp_path / "job.py"
    script.write_text(SAVES)
    command = far.join("--name", "pod", "--until", "+60s", "--margin", "30s")
    wait_up(cluster, far, "pod")
    job = cluster.run(
        "run", "-d", "--no-snapshot", "--name", "saves", "--", sys.executable, str(script), str(saved)
    ).stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    until(lambda: "allocation ends" in str(hosts(cluster).get("pod", {}).get("drained")), HANG_S, lambda: far.output)
    assert command.wait(HANG_S) == 0, far.output
    assert hosts(cluster) == {}
    assert saved.read_text() == "saved"
    assert cluster.job(job)["state"] == "queued"
    assert "queued again" in cluster.run("why", job).stdout


@pytest.mark.slow
def test_an_elastic_job_moves_to_another_host_that_dialed_in(cluster: RunningCluster, far: Far) -> None:
    """In memory, between two hosts that the head node cannot reach."""
    first = far.join("--name", "first", "--cpu-devices", "1")
    wait_up(cluster, far, "first")
    job = cluster.submit(
        f'kind = "elastic"\ntrials = false\nworkdir = "{GPT}"\ncommand = ["python", "train.py", "--steps", "100000"]\n'
        "resources = { devices = 1 }\n", "trains",
    )  # fmt: skip
    cluster.wait_for(job, lambda row: row["step"] > 0)
    far.join("--name", "second", "--cpu-devices", "1")
    wait_up(cluster, far, "first", "second")
    cluster.run("host", "drain", "first")
    cluster.wait_for(job, lambda row: row["devices"] == ["second:cpu0"] and not row["migrating"])
    first.terminate()
    assert first.wait(HANG_S) == 0, far.output
    wait_up(cluster, far, "second")
    step = cluster.job(job)["step"]
    row = cluster.wait_for(job, lambda row: row["step"] > step)
    assert (row["devices"], row["attempt"]) == (["second:cpu0"], 1)


@pytest.mark.slow
def test_names_are_unique(cluster: RunningCluster, far: Far) -> None:
    far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    refused = far.join("--name", "pod")
    assert refused.wait(HANG_S) == 1
    assert "pod is in the cluster already: give another --name" in far.output
    far.join()
    far.join()
    until(lambda: len(hosts(cluster)) == 3, HANG_S, lambda: far.output)
    names = sorted(set(hosts(cluster)) - {"pod"}, key=len)
    assert names[1] == f"{names[0]}-2"
    wait_up(cluster, far, "pod", *names)
    # An operator removes one: its command ends, the others stay.
    cluster.run("host", "remove", names[1])
    until(lambda: sum(command.poll() is None for command in far.commands) == 2, HANG_S, lambda: far.output)
    wait_up(cluster, far, "pod", names[0])


def test_the_host_offers_what_the_allocation_gives(cluster: RunningCluster, far: Far) -> None:
    far.join("--name", "pod", SLURM_CPUS_ON_NODE="1", SLURM_MEM_PER_NODE="512", CUDA_VISIBLE_DEVICES="")
    wait_up(cluster, far, "pod")
    row = hosts(cluster)["pod"]
    assert (row["cpu_cores"], row["memory_bytes"]) == (1, 512 << 20)
    assert {device["kind"] for device in row["devices"]} == {"cpu"}
    done = cluster.run("run", "--no-snapshot", "--", "sh", "-c", "env | grep SLURM_ || echo none")
    assert done.stdout == "none\n"


@pytest.mark.slow
def test_an_allocation_that_ends_before_the_margin_is_left_at_once(cluster: RunningCluster, far: Far) -> None:
    """Without --until the end is that of the job of Slurm."""
    command = far.join("--name", "pod", SLURM_JOB_END_TIME="1000000000")
    assert command.wait(HANG_S) == 0, far.output
    assert hosts(cluster) == {}


@pytest.mark.slow
def test_a_host_that_leaves_while_the_daemon_is_away_ends_its_jobs_itself(cluster: RunningCluster, far: Far) -> None:
    command = far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    pid = cluster.directory / "rank.pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"
    job = cluster.run("run", "-d", "--no-snapshot", "--name", "waits", "--", "sh", "-c", script).stdout.strip()
    until(pid.exists, HANG_S)
    agent = far.agent
    cluster.kill()
    command.terminate()
    assert command.wait(HANG_S) == 0, far.output
    assert "are ended here" in far.output
    until(lambda: is_gone(agent) and is_gone(int(pid.read_text())), HANG_S)
    cluster.run("start", "--config", cluster.environment["CLUSTERD_CONFIG"])
    wait_gone(cluster, far)
    assert cluster.job(job)["state"] == "queued"


def test_the_agent_obeys_its_own_key_and_not_the_cluster_s(cluster: RunningCluster, far: Far) -> None:
    far.join("--name", "pod")
    wait_up(cluster, far, "pod")
    with contextlib.closing(sqlite3.connect(cluster.directory / "journal.db")) as journal:
        facts = dict(journal.execute("SELECT name, value FROM facts"))
        (address,) = journal.execute("SELECT address FROM hosts WHERE name = 'pod'").fetchone()
    (record,) = far.directory.glob("joined/*/1/agent/*/agent.json")

    def say_hello(key: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(json.loads(record.read_text())["socket"])
            agent.settimeout(HANG_S)
            received = agent.makefile("rb")

            def ask(verb: str, **arguments: Any) -> dict[str, Any]:
                agent.sendall(protocol.encode({"id": 1, "verb": verb, **arguments}))
                return protocol.decode(received.read(int.from_bytes(received.read(4), "big")))

            nonce = ask("challenge", daemon="another")["ok"]["nonce"]
            shown = proof(key, "hello", nonce, "another", 1)
            return ask("hello", protocol=protocol.VERSION, daemon="another", epoch=1, proof=shown)

    assert say_hello(facts["agent_key"])["error"]["kind"] == "key"
    assert "ok" in say_hello(proof(facts["agent_key"], "joined", address))


@pytest.mark.parametrize(
    ("head", "code", "message"),
    [
        ("head", 2, "write ssh://HEAD"),
        ("ssh://head/nothing.sock", 69, "no daemon answers on ssh://head: /nothing.sock: No such file or directory"),
    ],
)
def test_a_head_node_that_is_none_is_reported_in_one_line(far: Far, head: str, code: int, message: str) -> None:
    command = [sys.executable, "-m", "clusterd", "agent", "--join", head]
    done = subprocess.run(
        command, env=far.environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )  # fmt: skip
    assert (done.returncode, message in done.stderr, len(done.stderr.splitlines())) == (code, True, 1), done.stderr


@pytest.mark.slow
def test_a_machine_without_ssh_is_told_so(far: Far) -> None:
    shutil.rmtree(far.directory / "bin")
    environment = {**far.environment, "PATH": str(Path(sys.executable).parent)}
    command = [sys.executable, "-m", "clusterd", "agent", "--join", "ssh://head"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, "no `ssh` program" in done.stderr) == (69, True), done.stderr
