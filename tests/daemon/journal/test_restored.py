"""A daemon with a restored journal, on hosts that have seen newer events."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from clusterd.daemon.api.jobs import JobIds
from tests.conftest import RunningCluster, until


@pytest.fixture
def restored(cluster: RunningCluster) -> RunningCluster:
    """Job 1 is in the backup; 2, which is over, and 3, which runs, came after it. The daemon is not started."""
    cluster.start(hosts=1, devices=2)
    cluster.wait_until_up(1)
    cluster.run("run", "--no-snapshot", "--", "true")
    cluster.run("stop")
    until(lambda: not (cluster.directory / "journal.db-wal").exists())
    shutil.copy(cluster.directory / "journal.db", cluster.directory / "backup.db")
    cluster.start()
    cluster.wait_until_up(1)
    cluster.run("run", "--no-snapshot", "--", "echo", "of job 2")
    cluster.run("stop")
    cluster.start()
    cluster.wait_until_up(1)
    later = cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "60012").stdout.strip()
    cluster.wait_for(later, lambda row: row["state"] == "running")
    assert later == "3"
    cluster.run("stop")
    until(lambda: not (cluster.directory / "journal.db-wal").exists())
    shutil.copy(cluster.directory / "backup.db", cluster.directory / "journal.db")
    for stored in (cluster.directory / "attempts").glob("[23].*"):
        shutil.rmtree(stored)
    return cluster


@pytest.mark.slow
def test_an_older_copy_of_a_running_daemons_journal_is_refused(cluster: RunningCluster) -> None:
    """The copy has the epoch of the daemon that the host knows: nothing but the events tells that it is older."""
    cluster.start(hosts=1, devices=2)
    cluster.wait_until_up(1)
    cluster.run("run", "--no-snapshot", "--", "true")
    journal, copy = cluster.directory / "journal.db", cluster.directory / "copy.db"
    with contextlib.closing(sqlite3.connect(journal)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    later = cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "60011").stdout.strip()
    cluster.wait_for(later, lambda row: row["state"] == "running")
    before = sleeps(60011)
    cluster.kill()
    for rest in ("-wal", "-shm"):
        journal.with_name(journal.name + rest).unlink(missing_ok=True)
    shutil.copy(copy, journal)
    refused = cluster.run("start", check=False)
    assert refused.returncode == 1 and "journal.db is an older copy" in refused.stderr
    assert "clusterd start --restored" in refused.stderr
    (cluster.directory / "newest_event").unlink()  # as in a directory of another machine
    cluster.run("start")
    until(lambda: "the journal is an older copy" in cluster.run("host", "show", "local0").stdout)
    assert "clusterd start --restored" in cluster.run("host", "show", "local0").stdout
    assert sleeps(60011) == before
    cluster.run("stop")
    cluster.run("start", "--restored")
    cluster.wait_until_up(1)
    assert sleeps(60011) == before
    cluster.kill()
    cluster.start()  # from now on the host follows the restored history
    cluster.wait_until_up(1)


def sleeps(seconds: int) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(place.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_job_that_came_after_the_backup_goes_on_under_the_restored_daemon(restored: RunningCluster) -> None:
    """Its host has a record of the launch: the job is shown, followed and cancelled like any other."""
    cluster = restored
    before = sleeps(60012)
    assert len(before) == 1
    assert "clusterd start --restored" in cluster.run("start", check=False).stderr
    cluster.run("start", "--restored")
    cluster.wait_until_up(1)
    row = cluster.wait_for("3", lambda row: row["state"] == "running")
    assert "from the record that local0 kept" in row["reason"]
    assert sleeps(60012) == before
    assert cluster.run("logs", "3").stdout == ""
    assert "60012" in cluster.run("show", "3").stdout
    new = cluster.run("run", "-d", "--no-snapshot", "--", "echo", "new").stdout.strip()
    assert new == "4", "2 and 3 are remembered there"
    cluster.wait_for(new, lambda row: row["state"] == "finished")
    cluster.kill()
    cluster.start()  # the adoption is in the journal
    cluster.wait_until_up(1)
    assert cluster.job("3")["state"] == "running" and sleeps(60012) == before
    cluster.run("cancel", "3")
    cluster.wait_for("3", lambda row: row["state"] == "cancelled")
    assert sleeps(60012) == []


def test_a_queued_job_of_the_backup_that_ran_since_is_not_run_again(cluster: RunningCluster) -> None:
    """By the backup it waits; its host has the record of its run, and that it succeeded."""
    cluster.start(hosts=1, devices=1)
    cluster.wait_until_up(1)
    mark = cluster.directory / "runs"
    first = cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "600").stdout.strip()
    cluster.wait_for(first, lambda row: row["state"] == "running")
    script = f"echo ran >> {mark}"
    waiting = cluster.run("run", "-d", "--no-snapshot", "--", "sh", "-c", script).stdout.strip()
    journal, copy = cluster.directory / "journal.db", cluster.directory / "copy.db"
    with contextlib.closing(sqlite3.connect(journal)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    cluster.run("cancel", first)
    cluster.wait_for(waiting, lambda row: row["state"] == "finished")
    cluster.run("stop")
    until(lambda: not (cluster.directory / "journal.db-wal").exists())
    shutil.copy(copy, journal)
    cluster.run("start", "--restored")
    cluster.wait_until_up(1)
    cluster.wait_for(waiting, lambda row: row["state"] == "finished")
    assert mark.read_text() == "ran\n"


@pytest.mark.slow
def test_attempts_that_cannot_be_adopted_are_left_alone_until_told(restored: RunningCluster) -> None:
    """Regression: the job was ended silently, and the next job with its number showed its log and never ran."""
    cluster = restored
    (cluster.directory / "secrets_key").unlink()
    before = sleeps(60012)
    cluster.run("start", "--restored")
    cluster.wait_until_up(1)
    message = cluster.run("host", "show", "local0").stdout
    assert "local0 runs job 3 of a later state of this cluster: clusterd host undrain local0 ends that" in message
    new = cluster.run("run", "-d", "--no-snapshot", "--", "echo", "new").stdout.strip()
    assert new == "4", "2 and 3 are remembered there"
    assert "local0 runs job 3 of a later state" in cluster.job(new)["reason"]
    assert sleeps(60012) == before
    cluster.run("host", "undrain", "local0")
    cluster.wait_for(new, lambda row: row["state"] == "finished")
    assert cluster.run("logs", new).stdout == "new\n"
    assert sleeps(60012) == []


@pytest.mark.slow
def test_a_job_is_not_taken_for_another_of_its_number(restored: RunningCluster) -> None:
    """The job is submitted before any host has reported its records."""
    cluster = restored
    cluster.run("start", "--restored", "--local", "1")
    with cluster.client() as client:
        spec = {"name": "again", "command": ["echo", "again"]}
        job = client.call("submit", spec=spec)["id"]
    row = cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed", "queued"))
    cluster.run("host", "undrain", "local0")
    row = cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    message = cluster.run("logs", job, check=False).stdout
    assert "of job 2" not in message
    assert row["state"] == "finished" or "of another job is on this host" in row["reason"]


def test_numbers_are_given_out_once() -> None:
    numbers = JobIds(["1", "7", "odd"])
    assert numbers.next() == "8"
    numbers.seen("5", "gpu01")
    assert numbers.next() == "9"
    numbers.seen("20", "gpu01")
    assert numbers.next() == "21"
