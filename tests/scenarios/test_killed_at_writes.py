"""Daemons that are killed at each write of their journal, one after the other, over the same jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from clusterd.client import Client
from clusterd.errors import ClusterError, DaemonAbsent
from tests.conftest import RunningCluster, until
from tests.hang import HANG_S

KILLED = 86

DAEMON = f"""
import os, sys
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.main import main

write, count, (number, when) = Journal._in_transaction, 0, divmod(int(sys.argv[1]), 2)

def counted(self, work):
    global count
    count += 1
    if (count, when) == (number, 0):
        os._exit({KILLED})
    write(self, work)
    if (count, when) == (number, 1):
        os._exit({KILLED})

Journal._in_transaction = counted
sys.exit(main(sys.argv[2:]))
"""
"""A daemon that ends at once, as by SIGKILL, before (2 n) or after (2 n + 1) the commit of its n-th write."""

pytestmark = pytest.mark.slow


class Users:
    """Requests of users, and the answers that they got."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self.accepted: dict[str, str] = {}  # name by id
        self.submitted = 0

    def submit(self, client: Client, then: str) -> str:
        """Submit a command that notes that it ran."""
        self.submitted += 1
        name = f"job-{self.submitted}"
        command = ["sh", "-c", f"echo >> {self.notes(name)}; {then}"]
        spec: dict[str, Any] = {
            "name": name, "command": command, "workdir": str(self._cluster.directory), "resources": {"cpus": 1},
            "waits_for_hosts": True,
        }  # fmt: skip
        job = str(client.call("submit", spec=spec)["id"])
        self.accepted[job] = name
        return job

    def cancel(self, client: Client, job: str) -> None:
        """Cancel a job that may be over."""
        try:
            client.call("cancel", job=job, now=True)
        except DaemonAbsent:
            raise
        except ClusterError:  # an earlier daemon took the request, and died before it answered
            if client.call("job", job=job)["ended_s"] is None:
                raise

    def notes(self, name: str) -> Any:
        """File with a line for each time that a job ran."""
        return self._cluster.directory / f"{name}.ran"


def _served(daemon: subprocess.Popen[bytes], cluster: RunningCluster, act: Callable[[Client], None]) -> bool:
    """Act as a client of this daemon; false if the daemon was killed meanwhile."""
    client: Client | None = None

    def connects() -> bool:
        nonlocal client
        if daemon.poll() is not None:
            return True
        try:
            client = cluster.client()
        except DaemonAbsent:
            return False
        return True

    until(connects, HANG_S, cluster.log)
    if client is not None:
        try:
            with client:
                act(client)
            return True
        except DaemonAbsent:
            pass
    assert daemon.wait(HANG_S) == KILLED, cluster.log()
    return False


def test_no_write_is_the_wrong_moment_to_die(cluster: RunningCluster) -> None:
    """Each daemon takes up the jobs of those before, gets two more, one of which is cancelled, and dies later."""
    users = Users(cluster)

    def act(client: Client) -> None:
        for row in client.call("jobs"):  # also those whose submit was written and not answered
            if row["name"] in long:
                users.cancel(client, row["id"])
        short = users.submit(client, "true")
        long.add(f"job-{users.submitted + 1}")
        job = users.submit(client, "exec sleep 600")
        until(lambda: client.call("job", job=job)["state"] == "running", HANG_S, cluster.log)
        users.cancel(client, job)
        until(lambda: all(row["ended_s"] for row in client.call("jobs", all=True)), HANG_S, cluster.log)
        assert client.call("job", job=short)["state"] == "finished"

    long: set[str] = set()
    rows: dict[str, Any] = {}
    point, is_over = 2, False
    while not is_over:
        argv = [sys.executable, "-c", DAEMON, str(point), "--local", "1", "--devices", "2"]
        daemon = subprocess.Popen(argv, env=cluster.environment, cwd=cluster.directory)
        try:
            is_over = _served(daemon, cluster, act)
            point += 1
        finally:
            if not is_over:
                daemon.kill()
                daemon.wait()
    daemon.terminate()
    assert daemon.wait(HANG_S) in (0, KILLED)  # it may write more than its users waited for
    daemon = subprocess.Popen([*argv[:3], "0", *argv[4:]], env=cluster.environment, cwd=cluster.directory)
    assert _served(
        daemon, cluster, lambda client: rows.update({row["id"]: row for row in client.call("jobs", all=True)})
    )
    daemon.terminate()
    assert daemon.wait(HANG_S) == 0
    assert rows.keys() >= users.accepted.keys()
    for row in rows.values():
        ran = users.notes(row["name"])
        times = len(ran.read_text()) if ran.exists() else 0
        assert times <= 1, f"{row['name']} ran {times} times: {row['reason']}"
        if row["name"] in long:
            assert row["state"] == "cancelled", row["reason"]
        else:
            assert (row["state"], times) == ("finished", 1), row["reason"]
    assert point > 20, "the daemon's writes were not counted"
