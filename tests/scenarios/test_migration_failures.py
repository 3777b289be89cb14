"""Failures in each phase of a migration, with real agents: the job continues, and trains each step once.

Tests hold phases open, so that nothing depends on timing: the job's script waits at gates (files) when it
builds its model or reads its samples, and ranks are stopped with SIGSTOP.

========  ==============================================================================================================
prepare   the target ranks wait at a gate in ``model()``
quiesce   the target ranks are ready; the source ranks wait at a gate in their data set, during a step
transfer  the source ranks have filled their segments; one target rank is stopped
resume    the switch is done; the target ranks wait at a gate for the samples of their first step
========  ==============================================================================================================
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from clusterd.errors import ClusterError
from tests.conftest import GPT, RunningCluster, processes_of, until
from tests.scenarios.test_migration import agent_of, last_move, phase_over, ranks, steps_of

SCRIPT = """
import json, os, sys, time
import torch
from model import GPT
from torch.nn.functional import cross_entropy
from clusterd import train

GATES = sys.argv[1]
RANK_FILE = os.environ.get("CLUSTERD_RANK_FILE")
GENERATION = json.load(open(RANK_FILE))["generation"] if RANK_FILE else 0


def gate(name):
    while os.path.exists(f"{GATES}/{name}.{GENERATION}"):
        time.sleep(0.01)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        if i:  # the first sample is for rehearsals
            gate("data")
        tokens = torch.arange(i, i + 33) * 7 % 251
        return tokens[:-1], tokens[1:]


def model():
    gate("model")
    return GPT(width=32, depth=2, context=32)


train.run(
    model=model,
    loss=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
    data=Tokens(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    global_batch=8, steps=20_000, seed=0, layers=GPT.LAYERS, tp_plan=GPT.TP_PLAN,
)
"""
JOB = """
kind = "elastic"
trials = false
snapshots = 0
workdir = "{workdir}"
command = ["python", "train.py", "{gates}"]
resources = {{ devices = 2, plan = {{ dp = 2 }}, hosts = ["local0"] }}
"""
OLD_PLACES = ["local0:cpu0", "local0:cpu1"]
NEW_PLACES = ["local1:cpu0", "local1:cpu1"]


class Scene:
    """A job of two replicas on local0 that migrates to local1."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster = cluster
        self.gates = cluster.directory / "gates"
        self.gates.mkdir()
        workdir = cluster.directory / "work"
        workdir.mkdir()
        shutil.copy(GPT / "model.py", workdir)
        (workdir / "train.py").write_text(SCRIPT)
        self.job = cluster.submit(JOB.format(workdir=workdir, gates=self.gates), "gated")
        row = cluster.wait_for(self.job, lambda row: row["step"] >= 3)
        assert row["devices"] == OLD_PLACES

    def move(self, places: list[str] = NEW_PLACES, plan: str = "dp=2") -> None:
        """Request the migration without waiting for it."""
        self.cluster.call("migrate", job=self.job, plan=plan, devices=places)

    @contextmanager
    def gate(self, name: str) -> Iterator[None]:
        """Close a gate: ranks wait at it."""
        file = self.gates / name
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    @contextmanager
    def held(self, phase: str, stopped: str = "last") -> Iterator[None]:
        """Context in which the migration is held in this phase."""
        if phase == "prepare":
            with self.gate("model.2"):
                self.move()
                until(lambda: len(ranks(self.cluster, self.job, 2)) == 2)
                yield
        elif phase == "quiesce":
            with self.gate("data.1"):
                self.move()
                self.cluster.wait_for(self.job, phase_over(self.cluster, "prepare"))
                yield
        elif phase == "transfer":
            with self.stopped_in_transfer(1, NEW_PLACES, "dp=2"):
                yield
        else:
            with ExitStack() as held:
                # Before they are ready, target ranks read samples to show that their data are the same.
                with self.gate("data.1"):
                    self.move()
                    self.cluster.wait_for(self.job, phase_over(self.cluster, "prepare"))
                    held.enter_context(self.gate("data.2"))
                self.cluster.wait_for(self.job, lambda row: row["devices"] == NEW_PLACES)
                yield

    @contextmanager
    def stopped_in_transfer(self, count: int, places: list[str], plan: str) -> Iterator[None]:
        """Wait until the source ranks have handed over and `count` target ranks are stopped."""
        with self.gate("data.1"):
            self.move(places, plan)
            self.cluster.wait_for(self.job, phase_over(self.cluster, "prepare"))
            pids = ranks(self.cluster, self.job, 2)[-count:]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: f"{self.job}.1.2: quiesce over" in (self.cluster.directory / "daemon.log").read_text())
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def strike(self, victim: str, phase: str) -> None:
        """Kill processes with SIGKILL, or cut a connection."""
        cluster = self.cluster
        if victim == "old rank":
            os.kill(ranks(cluster, self.job, 1)[-1], signal.SIGKILL)
        elif victim == "new rank":
            os.kill(ranks(cluster, self.job, 2)[-1], signal.SIGKILL)
        elif victim == "old agent":
            os.kill(agent_of(cluster, 0), signal.SIGKILL)
        elif victim == "new agent":
            os.kill(agent_of(cluster, 1), signal.SIGKILL)
        elif victim == "link":
            for pid in bridges(cluster, 1):
                os.kill(pid, signal.SIGKILL)
        else:
            cluster.kill()
            cluster.start()

    def goes_on(self, killed: int = 0) -> dict[str, Any]:
        """Wait until the first attempt has trained further; its log must have each step once. Returns the job's row.

        Args:
            killed: killed ranks; the log may lack the step that was in flight, which the others complete.
        """
        cluster, job = self.cluster, self.job
        cluster.wait_until_up(2)
        cluster.wait_for(
            job, lambda row: row["migrations"] and row["migrations"][-1]["ended_s"] and not row["migrating"]
        )
        until(lambda: bool(self.logged()), 60.0)
        step = max(self.logged())  # the daemon's number is some seconds old
        row = cluster.wait_for(job, lambda row: row["step"] >= step + 5 and row["state"] == "running")
        assert row["attempt"] == 1, cluster.run("why", job).stdout
        steps = self.logged()
        assert steps == sorted(set(steps))
        missing = set(range(1, max(steps) + 1)) - set(steps)
        assert len(missing) <= 2 * killed, missing
        return row

    def logged(self) -> list[int]:
        """Steps in the log in order; empty while a host with a part of it is away."""
        try:
            return steps_of(self.cluster, self.job)
        except ClusterError:
            return []


def bridges(cluster: RunningCluster, number: int) -> list[int]:
    """Processes between the SSH connection of a host and its agent."""
    home = f"{cluster.directory}/local/{number}/".encode()
    found = []
    for pid in processes_of(cluster.directory):
        with suppress(OSError):
            place = Path(f"/proc/{pid}")
            if home in (place / "environ").read_bytes() and b"attach" in (place / "cmdline").read_bytes():
                found.append(pid)
    assert found
    return found


BEFORE = [
    (phase, victim)
    for phase in ("prepare", "quiesce", "transfer")
    for victim in ("old rank", "new rank", "old agent", "new agent", "link", "daemon")
]


@pytest.fixture
def scene(local_cluster: RunningCluster) -> Scene:
    return Scene(local_cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "victim"), BEFORE)
def test_before_the_switch(scene: Scene, phase: str, victim: str) -> None:
    """The migration fails with a reason; the source ranks continue, or a survivor gets new peers."""
    with scene.held(phase):
        scene.strike(victim, phase)
        if victim != "daemon":
            scene.cluster.wait_for(scene.job, lambda row: bool(row["migrations"]))
    if victim == "old rank":
        scene.cluster.wait_for(scene.job, lambda row: len(row["migrations"]) == 2)
    row = scene.goes_on(killed=int(victim == "old rank"))
    first = row["migrations"][0]
    assert first["failure"]
    assert first["from"] == first["to"] == "dp=2"
    if victim == "old rank":
        assert [m["failure"] for m in row["migrations"][1:]] == [""]  # recovered from its replica
    else:
        assert row["devices"] == OLD_PLACES
        until(lambda: not ranks(scene.cluster, scene.job, 2))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["old rank", "new rank", "old agent", "new agent", "link", "daemon"])
def test_after_the_switch(scene: Scene, victim: str) -> None:
    """The target ranks are the job: it does not return, and source ranks have no influence."""
    with scene.held("resume"):
        if victim == "old rank":
            with suppress(IndexError, ProcessLookupError):  # they are being stopped
                scene.strike(victim, "resume")
        else:
            scene.strike(victim, "resume")
    if victim == "new rank":
        scene.cluster.wait_for(scene.job, lambda row: len(row["migrations"]) == 2)
    row = scene.goes_on(killed=int(victim == "new rank"))
    assert row["migrations"][0]["failure"] == ""
    if victim != "new rank":
        assert row["devices"] == NEW_PLACES
    until(lambda: not ranks(scene.cluster, scene.job, 1))


@pytest.mark.slow
def test_a_corrupted_transfer_undoes_the_migration(scene: Scene) -> None:
    """One flipped byte of a source rank's segment fails verify, and the source ranks continue."""
    with scene.stopped_in_transfer(2, OLD_PLACES, "tp=2"):
        home = str(scene.cluster.directory / "local/0/agent")
        (owner,) = (file for file in Path("/dev/shm").glob("clusterd-*/owner") if file.read_text() == home)
        for file in owner.parent.glob(f"{scene.job}.1.2.out*"):
            with file.open("r+b") as segment:
                byte = segment.read(1)
                segment.seek(0)
                segment.write(bytes([byte[0] ^ 1]))
    move = last_move(scene.cluster, scene.job)
    assert "has a different checksum here" in move["failure"]
    row = scene.goes_on()
    assert (row["plan"], row["devices"]) == ("dp=2", OLD_PLACES)


@pytest.mark.slow
def test_segments_go_to_disk_and_a_full_disk_refuses_the_migration(scene: Scene) -> None:
    """Detected in prepare, while the source ranks train."""
    limits = scene.cluster.directory / "local/0/agent/store.json"
    limits.write_text('{"memory_bytes": 0, "disk_bytes": 0}')
    scene.move(OLD_PLACES, "tp=2")
    move = last_move(scene.cluster, scene.job)
    assert "no room for a segment" in move["failure"]
    assert [p["phase"] for p in move["phases"]] == []
    assert scene.goes_on()["plan"] == "dp=2"
    limits.write_text('{"memory_bytes": 0}')
    files = scene.cluster.directory / "local/0/agent/segments"
    with scene.gate("data.1"):
        scene.move(OLD_PLACES, "tp=2")
        scene.cluster.wait_for(scene.job, phase_over(scene.cluster, "prepare"))
        assert len(list(files.glob(f"{scene.job}.1.3.out*"))) == 2
    row = scene.cluster.wait_for(scene.job, lambda row: len(row["migrations"]) == 2)
    assert row["migrations"][1]["failure"] == ""
    assert scene.goes_on()["plan"] == "tp=2"
