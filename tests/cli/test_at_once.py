"""One request for several jobs, and several requests at once."""

from __future__ import annotations

import pytest

from clusterd.client import Client
from tests.conftest import RunningCluster, until
from tests.hang import HANG_S


def test_thousands_of_calls_at_once_are_answered(shared_cluster: RunningCluster) -> None:
    """Client and daemon waited for each other, for ever: neither read before the other did."""
    with Client(shared_cluster.socket, timeout_s=HANG_S) as client:
        assert len(client.call_many("hello", [{}] * 5000)) == 5000


def test_hosts_that_are_drained_together_pass_no_job_on(shared_cluster: RunningCluster) -> None:
    answer = shared_cluster.run("host", "drain", "local0", "nosuch", "local1", check=False)
    assert answer.returncode == 2
    assert "there is no host 'nosuch'" in answer.stderr
    rows = {row["name"]: row for row in shared_cluster.call("hosts")}
    assert rows["local0"]["drained"] is not None
    assert rows["local1"]["drained"] is not None
    drains = [event["at_s"] for event in shared_cluster.call("history")["events"] if event["kind"] == "HostDrained"]
    assert len(drains) == 2
    assert len(set(drains)) == 1


@pytest.mark.slow
def test_jobs_that_are_cancelled_together_do_not_start_where_one_of_them_ends(local_cluster: RunningCluster) -> None:
    """A sweep that was a mistake: what waited took the places of what was ended, one after the other."""
    over = local_cluster.run("run", "-d", "--no-snapshot", "--", "true").stdout.strip()
    local_cluster.run("wait", over)
    sweep = ("--sweep", f"N={','.join(map(str, range(24)))}", "--name", "q")
    command = ("run", "-d", "--no-snapshot", "--devices", "1", *sweep, "--", "sleep", "1000")
    jobs = local_cluster.run(*command).stdout.split()
    until(lambda: sum(local_cluster.job(job)["state"] == "running" for job in jobs) == 4, 30.0, local_cluster.log)
    answer = local_cluster.run("cancel", "--wait", "q_*", "nosuch", over, check=False)
    assert answer.returncode == 2
    assert "24 jobs: 24 cancelled\n" in answer.stderr
    assert "there is no job 'nosuch'" in answer.stderr
    assert f"job {over} (true) is finished already" in answer.stderr
    history = local_cluster.call("history", limit=5000)
    assert len({event["at_s"] for event in history["events"] if event["kind"] == "JobCancelled"}) == 1
    launched = {row["job"] for row in history["decisions"] if row["kind"] == "LaunchAttempt"}
    assert len(launched - {over}) == 4


def test_a_few_jobs_that_are_cancelled_are_told_of_each(shared_cluster: RunningCluster) -> None:
    command = ("run", "-d", "--no-snapshot", "--name", "w", "--sweep", "N=1,2", "--", "sleep", "1000")
    first, second = shared_cluster.run(*command).stdout.split()
    answer = shared_cluster.run("cancel", "--wait", first, "w*")
    assert answer.stderr == f"{first} (w_N1) is cancelled\n{second} (w_N2) is cancelled\n"


def test_a_priority_below_zero_is_a_number(shared_cluster: RunningCluster) -> None:
    job = shared_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000").stdout.strip()
    shared_cluster.run("priority", job, "-5")
    assert shared_cluster.job(job)["priority"] == -5
    answer = shared_cluster.run("priority", job, "low", check=False)
    assert answer.returncode == 2


def test_nobody_is_meant_by_an_empty_name(shared_cluster: RunningCluster) -> None:
    shared_cluster.run("run", "--no-snapshot", "--", "true")
    for verb in ("plans", "profile"):
        answer = shared_cluster.run(verb, "", check=False)
        assert answer.returncode == 2
        assert "no job is named" in answer.stderr
