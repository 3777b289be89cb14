"""A secret is stored as long as its job lives, and no longer."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import anyio
import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.daemon.execution.executor import Executor
from clusterd.daemon.hosts.reports import Reports
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.storage.archive import Archive
from clusterd.errors import ClusterError
from clusterd.types import JobId
from tests.conftest import RunningCluster

INSERT = "INSERT INTO secrets VALUES (?, ?, ?)"


def test_a_secret_goes_before_hosts_are_asked(tmp_path: Path) -> None:
    """They may be silent for a minute each, and the daemon may die meanwhile."""
    journal = Journal(tmp_path / "journal.db")
    archive = Archive(tmp_path, journal)
    asked: list[dict[str, str]] = []

    async def forget(job: str) -> None:
        asked.append(await archive.secrets(job))

    async def run() -> None:
        nobody: Any = Mock(reports=Reports())
        replicas: Any = SimpleNamespace(forget=forget)
        await journal.execute([(INSERT, ("1", "KEY", "hush"))])
        async with anyio.create_task_group() as tasks:
            executor = Executor(nobody, nobody, archive, nobody, tasks, nobody, nobody, nobody, replicas)
            end = d.EndJob(cause=e.EventId(1), reason="finished", job=JobId("1"), state="finished", exit_code=0)
            executor.carry_out([end])

    anyio.run(run)
    journal.close()
    assert asked == [{}]


def test_a_copy_of_the_journal_tells_no_secret(local_cluster: RunningCluster) -> None:
    local_cluster.environment["TOKEN"] = "hush-hush"
    local_cluster.run("host", "drain", "local0", "local1")
    job = local_cluster.run("run", "-d", "--secret", "TOKEN", "--", "sh", "-c", "echo $TOKEN").stdout.strip()
    files = [p for p in local_cluster.directory.rglob("*") if p.is_file()]
    assert [p.name for p in files if b"hush-hush" in p.read_bytes()] == []
    key = local_cluster.directory / "secrets_key"
    assert key.stat().st_mode & 0o077 == 0
    local_cluster.run("host", "undrain", "local0", "local1")
    assert local_cluster.run("logs", "-f", job).stdout == "hush-hush\n"


def test_without_its_key_a_secret_is_refused_in_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    archive = Archive(tmp_path, journal)

    async def run() -> None:
        await journal.execute([(INSERT, ("1", "KEY", archive.sealed("hush"))), (INSERT, ("2", "KEY", "of before"))])
        assert await archive.secrets("1") == {"KEY": "hush"}
        assert await archive.secrets("2") == {"KEY": "of before"}
        (tmp_path / "secrets_key").unlink()
        with pytest.raises(ClusterError, match="secrets_key: restore that file, or submit the job again"):
            await archive.secrets("1")

    anyio.run(run)
    journal.close()


@pytest.mark.slow
def test_secrets_of_jobs_that_are_over_go_at_the_start(local_cluster: RunningCluster) -> None:
    """The daemon died between a job's end and the end of its secret; those of jobs that wait stay."""
    ended = local_cluster.run("run", "-d", "--", "true").stdout.strip()
    local_cluster.run("wait", ended)
    local_cluster.run("host", "drain", "local0", "local1")
    waits = local_cluster.run("run", "-d", "--", "true").stdout.strip()
    local_cluster.run("stop")
    path = local_cluster.directory / "journal.db"
    with sqlite3.connect(path) as db:
        db.executemany(INSERT, [(job, "KEY", "hush") for job in (ended, waits, "99")])
    db.close()
    local_cluster.start()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT job FROM secrets").fetchall() == [(waits,)]
    db.close()


def test_passwords_are_masked_and_a_secret_reaches_the_job(
    local_cluster: RunningCluster,
) -> None:
    """The history of events gave the values away that `show` does not."""
    local_cluster.environment |= {"MY_TOKEN": "hush-1", "OTHER": "hush-2"}
    options = ("--env", "MY_TOKEN", "--env", "PLAIN=seen", "--secret", "OTHER", "--name", "teller")
    done = local_cluster.run("run", *options, "--", "sh", "-c", "echo $MY_TOKEN $PLAIN $OTHER")
    assert done.stdout == "hush-1 seen hush-2\n"
    shown = json.dumps([local_cluster.call("job", job="teller"), local_cluster.call("history")])
    assert "seen" in shown and "MY_TOKEN" in shown
    assert "hush" not in shown
    missing = local_cluster.run("run", "--secret", "NOT_SET_HERE", "--", "true", check=False)
    assert missing.returncode == 2 and "NOT_SET_HERE is not set" in missing.stderr
