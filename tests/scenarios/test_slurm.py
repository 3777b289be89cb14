"""A host inside an allocation of Slurm, whose daemons run for the test in a directory of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningCluster, until
from tests.hang import HANG_S
from tests.scenarios.test_joined import Far, hosts, wait_gone, wait_up

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None for program in PROGRAMS),
        reason="needs Slurm: apt-get install slurmctld slurmd slurm-client munge",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd starts jobs as other users: needs root"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Controller, node daemon and authentication of a cluster of this machine alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in ("state", "spool"):
            (directory / name).mkdir()
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        with socket.socket() as one, socket.socket() as two:
            for probe in (one, two):
                probe.bind(("127.0.0.1", 0))
            ports = [probe.getsockname()[1] for probe in (one, two)]
        host = socket.gethostname().partition(".")[0]
        values = {"host": host, "ports": ports, "directory": directory, "cores": os.cpu_count()}
        (directory / "slurm.conf").write_text(CONFIGURATION.format(**values))
        self.environment = {
            **os.environ, "SLURM_CONF": str(directory / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"
        }  # fmt: skip
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        here = self.directory
        self._start(
            "munged", "--foreground", "--force", f"--key-file={here}/munge.key", f"--socket={here}/munge.socket",
            f"--pid-file={here}/munged.pid", f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed",
        )  # fmt: skip
        until((here / "munge.socket").exists, HANG_S)
        self._start("slurmctld", "-D", "-i")
        self._start("slurmd", "-D")
        until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%t", check=False), HANG_S, self.log)

    def _start(self, *command: str) -> None:
        with open(self.directory / f"{command[0]}.out", "wb") as output:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=output, stderr=output))

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )  # fmt: skip
        assert not check or not done.returncode, done.stderr + self.log()
        return done.stdout

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--format=%T", f"--jobs={job}", check=False).strip()

    def log(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-2000:] for file in self.directory.glob("*.out"))

    def stop(self) -> None:
        self.run("scancel", "--user=root", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(HANG_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture
def slurm(cluster: RunningCluster) -> Iterator[Slurm]:
    made = Slurm(cluster.directory / "slurm")
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def far(cluster: RunningCluster) -> Far:
    cluster.start()
    return Far(cluster, "far")


def allocate(slurm: Slurm, far: Far, *arguments: str) -> str:
    """Submit the command as a job of Slurm; returns its id."""
    command = " ".join(["exec", sys.executable, "-m", "clusterd", "agent", "--join", "ssh://head", *arguments])
    far.environment["SLURM_CONF"] = slurm.environment["SLURM_CONF"]
    done = subprocess.run(
        ["sbatch", "--parsable", "--ntasks=1", "--time=10", f"--output={far.directory}/output", f"--wrap={command}"],
        env=far.environment, capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_jobs_run_inside_an_allocation_until_shortly_before_its_end(
    cluster: RunningCluster, slurm: Slurm, far: Far
) -> None:
    allocation = allocate(slurm, far, "--name", "inside", "--until", "+60s", "--margin", "20s")
    wait_up(cluster, far, "inside")
    assert hosts(cluster)["inside"]["cpu_cores"] == 1
    done = cluster.run("run", "--no-snapshot", "--", sys.executable, "-c", "print(6 * 7)")
    assert done.stdout == "42\n"
    waits = cluster.run("run", "-d", "--no-snapshot", "--name", "waits", "--", "sleep", "600").stdout.strip()
    cluster.wait_for(waits, lambda row: row["state"] == "running")
    assert slurm.state(allocation) == "RUNNING"
    wait_gone(cluster, far)
    assert cluster.job(waits)["state"] == "queued"
    until(lambda: slurm.state(allocation) in ("", "COMPLETED"), HANG_S, lambda: slurm.state(allocation))
    assert "inside has left the cluster" in far.output
    # The next allocation takes the job up.
    allocation = allocate(slurm, far, "--name", "inside")
    cluster.wait_for(waits, lambda row: row["state"] == "running")
    # As sbatch --signal=B:TERM@60 does, some time before the end.
    slurm.run("scancel", "--signal=TERM", "--batch", allocation)
    wait_gone(cluster, far)
    assert cluster.job(waits)["state"] == "queued"
