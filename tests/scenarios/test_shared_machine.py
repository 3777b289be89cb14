"""One machine under two names, or in two clusters."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.agent.client import end_all
from tests.conftest import RunningCluster, new_cluster
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd

pytestmark = needs_sshd

HELD = 'command = ["sh", "-c", "echo ran >> {place}/runs; while [ ! -e {place}/go ]; do sleep 0.05; done"]\n'
"""Script that records each start and runs until its file appears."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OpenSshServer]:
    started = OpenSshServer("alpha", tmp_path / "alpha", make_key(tmp_path / "id_ed25519"))
    started.start()
    yield started
    started.stop()
    end_all(started.agent_home)


def knows(cluster: RunningCluster, server: OpenSshServer, *names: str) -> None:
    """Write an SSH configuration in which each of these names leads to the server."""
    known_hosts = cluster.directory / "known_hosts"
    config = cluster.directory / "ssh_config"
    text = server.config(known_hosts)
    config.write_text("".join(text.replace(f"Host {server.name}", f"Host {name}") for name in names))
    settings = cluster.directory / "clusterd.toml"
    settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)


def submit_held(cluster: RunningCluster, place: Path) -> str:
    """A running job on the only device."""
    work = place / "work"
    work.mkdir()
    job = cluster.submit(f'workdir = "{work}"\n{HELD.format(place=place)}resources = {{ devices = 1 }}\n')
    cluster.wait_for(job, lambda row: row["state"] == "running" and (place / "runs").exists())
    return job


def runs_to_its_end(cluster: RunningCluster, job: str, place: Path) -> None:
    """Check that the job was started once."""
    (place / "go").touch()
    row = cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    assert (row["state"], row["attempt"], (place / "runs").read_text()) == ("finished", 1, "ran\n")


@pytest.mark.slow
def test_a_machine_is_in_the_cluster_once(cluster: RunningCluster, server: OpenSshServer, tmp_path: Path) -> None:
    """Otherwise its devices would be offered twice, and each name would stop the jobs of the other."""
    knows(cluster, server, "alpha", "beta")
    cluster.start()
    cluster.run("host", "add", "--yes", "--cpu-devices", "1", "alpha")
    job = submit_held(cluster, tmp_path)
    refused = cluster.run("host", "add", "--yes", "--cpu-devices", "1", "beta", check=False)
    assert refused.returncode == 1
    assert "beta is added but not up: it is alpha under another name" in refused.stderr
    assert "clusterd host remove beta" in refused.stderr
    assert [len(host["devices"]) for host in cluster.call("hosts")] == [1, 0]
    os.kill(cluster.pid, 9)  # the next daemon may dial either name first
    cluster.start()
    cluster.wait_for(job, lambda _: {h["name"]: h["state"] for h in cluster.call("hosts")}["alpha"] == "up")
    cluster.wait_for(job, lambda _: "it is alpha" in {h["name"]: h["why"] for h in cluster.call("hosts")}["beta"])
    runs_to_its_end(cluster, job, tmp_path)
    cluster.run("host", "remove", "beta")


@pytest.mark.slow
def test_two_clusters_of_one_user_leave_each_other_alone(
    cluster: RunningCluster, server: OpenSshServer, tmp_path: Path
) -> None:
    """Regression: the second cluster stopped the first one's jobs."""
    knows(cluster, server, "alpha")
    cluster.start()
    cluster.run("host", "add", "--yes", "--cpu-devices", "1", "alpha")
    job = submit_held(cluster, tmp_path)
    with new_cluster() as second:
        knows(second, server, "alpha")
        second.start()
        second.run("host", "add", "--yes", "--cpu-devices", "1", "alpha")
        assert second.run("run", "--", "echo", "of the second").stdout == "of the second\n"
    runs_to_its_end(cluster, job, tmp_path)


@pytest.mark.slow
def test_a_new_cluster_gets_nothing_of_the_one_before(server: OpenSshServer) -> None:
    """Regression: its jobs with the same ids got the output of the old ones, and never started."""
    for word in ("first", "second"):
        with new_cluster() as made:
            knows(made, server, "alpha")
            made.start()
            made.run("host", "add", "--yes", "--cpu-devices", "1", "alpha")
            assert made.run("run", "--", "echo", word).stdout == f"{word}\n"


@pytest.mark.slow
def test_a_cluster_of_an_earlier_version_keeps_its_agents(cluster: RunningCluster, server: OpenSshServer) -> None:
    """Earlier agents served all clusters of a user, and the cluster's jobs run under them."""
    knows(cluster, server, "alpha")
    cluster.start()
    cluster.kill()
    with closing(sqlite3.connect(cluster.directory / "journal.db")) as journal, journal:
        assert journal.execute("DELETE FROM facts WHERE name = 'agents_of'").rowcount == 1
    cluster.start()
    cluster.run("host", "add", "--yes", "--cpu-devices", "1", "alpha")
    assert (server.agent_home / "agent.json").exists()
