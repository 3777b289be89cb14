"""Agents that run and do not answer: the host swaps, or a disk hangs."""

from __future__ import annotations

import os
import signal

import pytest

from clusterd.ssh.host import REQUEST_TIMEOUT_S
from tests.conftest import RunningCluster, cut_power, until
from tests.scenarios.test_migration import agent_of

ELASTIC = 'kind = "elastic"\ncommand = ["python", "train.py", "--steps", "3"]\nresources = { devices = 1 }\n'


@pytest.mark.slow
def test_jobs_run_when_a_silent_agent_answers_again(cluster: RunningCluster) -> None:
    """Regression: such jobs stayed in starting, or in the description of their model, for ever."""
    cluster.start(hosts=1)
    cluster.wait_until_up(1)
    agent = agent_of(cluster, 0)
    os.kill(agent, signal.SIGSTOP)
    jobs = [cluster.submit('command = ["true"]\n', "plain"), cluster.submit(ELASTIC, "elastic")]

    def is_given_up(_: object) -> bool:
        return bool(cluster.call("hosts")[0]["state"] == "unreachable")

    cluster.wait_for(jobs[0], is_given_up, REQUEST_TIMEOUT_S + 20.0)
    os.kill(agent, signal.SIGCONT)
    for job in jobs:
        cluster.wait_for(job, lambda row: row["state"] == "finished", 60.0)


@pytest.mark.slow
def test_a_silent_host_is_reported_and_the_log_tail_is_available(cluster: RunningCluster) -> None:
    """Regression: `ls` and `why` did not mention it, and the log could not be read."""
    cluster.start(hosts=1)
    cluster.wait_until_up(1)
    job = cluster.submit('command = ["sh", "-c", "echo the loss is falling; sleep 600"]\n', "quiet")
    stored = cluster.directory / "attempts" / f"{job}.1" / "rank-0.1.tail"
    until(stored.exists, 60.0)
    cut_power(cluster.directory, 0)
    row = cluster.wait_for(job, lambda row: "local0 is unreachable" in row["reason"])
    assert row["state"] == "running"
    assert "its ranks there are presumed to go on" in row["reason"]
    assert "local0 is unreachable" in cluster.run("why", job).stdout
    assert "the loss is falling\n" in cluster.run("logs", job).stdout
