"""A head node that dies, and another machine that leads its hosts from a backup."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.agent.client import end_all
from tests.conftest import GPT, RunningCluster, new_cluster, until
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd

pytestmark = [pytest.mark.slow, needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture
def lab(cluster: RunningCluster, tmp_path: Path) -> Iterator[tuple[RunningCluster, RunningCluster]]:
    """A head node with one host, and a second machine, which is that host's sshd as well; no daemon runs there."""
    key = make_key(tmp_path / "id_ed25519")
    server = OpenSshServer("gpu01", tmp_path / "gpu01", key)
    server.start()
    config = tmp_path / "ssh_config"
    config.write_text(server.config(tmp_path / "known_hosts"))
    try:
        with new_cluster() as second:
            for head in (cluster, second):
                settings = head.directory / "clusterd.toml"
                settings.write_text(f'[daemon]\nssh_config = "{config}"\n')
                head.environment["CLUSTERD_CONFIG"] = str(settings)
            shutil.rmtree(second.directory)
            cluster.start()
            cluster.run("host", "add", "--yes", "--cpu-devices", "2", "gpu01")
            yield cluster, second
    finally:
        server.stop()
        end_all(server.agent_home)


def training(cluster: RunningCluster, name: str, steps: int) -> str:
    file = cluster.directory / f"{name}.toml"
    file.write_text(
        f'name = "{name}"\nkind = "elastic"\nworkdir = "{GPT}"\npython = "{sys.executable}"\ntrials = false\n'
        f'command = ["python", "train.py", "--steps", "{steps}"]\nresources = {{ devices = 1, plan = {{ dp = 1 }} }}\n'
    )
    job = cluster.run("submit", str(file)).stdout.strip()
    cluster.wait_for(job, lambda row: row["step"] >= 3)
    return job


def test_another_machine_leads_the_hosts_and_the_old_head_is_fenced(
    lab: tuple[RunningCluster, RunningCluster],
) -> None:
    """One job is in the backup, one came after it: both go on without losing a step."""
    old, new = lab
    before = training(old, "before", 400)
    report = old.run("backup", f"gpu01:{new.directory}").stdout
    assert f"gpu01:{new.directory} is the state as of event " in report
    modes = {file.name: file.stat().st_mode & 0o777 for file in new.directory.rglob("*")}
    assert modes.pop("snapshots") == 0o700 and set(modes.values()) == {0o600}
    assert {"journal.db", "secrets_key", "known_hosts", "clusterd.toml"} <= set(modes)
    assert not [name for name in modes if name.endswith(".partial")]
    after = training(old, "after", 400)
    old.kill()
    refused = new.run("start", check=False)
    assert refused.returncode == 1 and f"is a backup of {old.directory}" in refused.stderr
    new.run("start", "--restored")
    new.wait_until_up(1)
    assert new.job(after)["state"] == "running" and new.job(before)["state"] == "running"
    old.start()  # it has lost its hosts, and lets them be
    until(lambda: "a newer daemon" in old.run("host", "show", "gpu01").stdout)
    assert old.call("hosts")[0]["state"] != "up"
    refused = old.run("backup", f"gpu01:{new.directory}", check=False)
    assert "gpu01:" in refused.stderr or "a daemon has led from that directory" in refused.stderr
    for job in (before, after):
        row = new.wait_for(job, lambda row: row["state"] == "finished", timeout_s=180.0)
        assert (row["attempt"], row["step"]) == (1, 400)
        steps = [json.loads(line)["step"] for line in new.call("steps", job=job)["data"].splitlines()]
        assert steps == list(range(1, 401))


def test_a_repeated_backup_follows_the_journal_and_says_what_is_wrong(
    lab: tuple[RunningCluster, RunningCluster], tmp_path: Path
) -> None:
    old, _ = lab
    target = tmp_path / "backup"
    old.run("backup", "--every", "10s", str(target))
    assert "every 10s" in old.run("status").stdout
    old.kill()
    old.start()
    old.run("run", "-d", "--no-snapshot", "--", "sleep", "600")

    def has_the_job() -> bool:
        with closing(sqlite3.connect(target / "journal.db")) as db:
            found: int = db.execute("SELECT count(*) FROM events WHERE kind = 'JobSubmitted'").fetchone()[0]
        return found == 1

    until(has_the_job, 60.0)
    shutil.rmtree(target)
    target.write_text("a file in its place")
    until(lambda: "FAILS" in old.run("backup", check=False).stdout, 60.0)
    target.unlink()
    until(lambda: old.run("backup", check=False).returncode == 0, 60.0)
    old.run("backup", "--stop", str(target))
    assert "no backup is repeated" in old.run("backup").stdout


def test_a_migration_since_the_backup_is_known_to_the_hosts(cluster: RunningCluster, tmp_path: Path) -> None:
    """By the backup the job runs on one device; its ranks of now are of a later generation, on two."""
    cluster.start(hosts=1, devices=2)
    cluster.wait_until_up(1)
    job = training(cluster, "moved", 1000)
    cluster.run("backup", str(tmp_path / "backup"))
    cluster.run("migrate", job, "--plan", "dp=2")
    moved = cluster.wait_for(job, lambda row: row["plan"] == "dp=2" and not row["migrating"] and row["step"] >= 5)
    cluster.kill()
    for rest in ("-wal", "-shm"):
        (cluster.directory / f"journal.db{rest}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup" / "journal.db", cluster.directory / "journal.db")
    cluster.run("start", "--restored")
    cluster.wait_until_up(1)
    row = cluster.job(job)
    assert (row["plan"], row["attempt"], row["state"]) == ("dp=2", 1, "running")
    assert len(row["devices"]) == 2
    cluster.wait_for(job, lambda row: row["step"] > moved["step"])
    cluster.run("migrate", job, "--plan", "dp=1")  # it is led on, not only watched
    cluster.wait_for(job, lambda row: row["plan"] == "dp=1" and not row["migrating"])
    row = cluster.wait_for(job, lambda row: row["state"] == "finished", timeout_s=180.0)
    assert (row["attempt"], row["step"]) == (1, 1000)
    steps = [json.loads(line)["step"] for line in cluster.call("steps", job=job)["data"].splitlines()]
    assert sorted(set(steps)) == list(range(1, 1001))
