"""After a change of `agent_home` one agent runs on the host, in the new directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterd.agent.host.home import Home, read_json
from tests.conftest import RunningCluster, cut_power, processes_of, until


def settings(cluster: RunningCluster, home: str | None) -> None:
    file = cluster.directory / "clusterd.toml"
    file.write_text(f'[hosts.local0]\nagent_home = "{home}"\n' if home else "")
    cluster.environment["CLUSTERD_CONFIG"] = str(file)


def agents(cluster: RunningCluster) -> list[int]:
    """Processes that serve as an agent."""
    serving = (pid for pid in processes_of(cluster.directory) if _argv(pid)[-1:] == [b"serve"])
    return sorted(serving)


def _argv(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


@pytest.mark.slow
def test_the_agent_at_the_old_place_ends_when_nothing_runs_there(cluster: RunningCluster) -> None:
    """Regression: the agent never ended, and stayed in the process list of a user who deleted its directory."""
    scratch = cluster.directory / "local" / "scratch"
    settings(cluster, str(scratch))
    cluster.start(hosts=1)
    (first,) = agents(cluster)
    job = cluster.run("run", "-d", "--devices", "1", "--", "sleep", "1000").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    cluster.run("stop")
    settings(cluster, None)
    cluster.start(hosts=1)
    assert agents(cluster) == [first], "the job's agent stays while the job runs"
    cluster.run("cancel", "--wait", job)
    cluster.run("stop")
    cluster.start(hosts=1)
    until(lambda: first not in agents(cluster), explain=cluster.log)
    (second,) = agents(cluster)
    assert (read_json(Home(cluster.directory / "local/0/agent").record) or {})["pid"] == second
    assert "has ended; agent_home is not set" in cluster.log()


@pytest.mark.slow
def test_nothing_is_made_at_the_old_place_where_no_agent_lives(cluster: RunningCluster) -> None:
    """For instance because its disk was removed."""
    scratch = cluster.directory / "local" / "scratch"
    settings(cluster, str(scratch))
    cluster.start(hosts=1)
    (first,) = agents(cluster)
    cluster.run("stop")
    os.kill(first, 9)
    scratch.rename(cluster.directory / "taken-away")
    settings(cluster, None)
    cluster.start(hosts=1)
    assert not scratch.exists()
    assert len(agents(cluster)) == 1
    assert cluster.run("run", "--devices", "1", "--", "echo", "here").stdout == "here\n"


@pytest.mark.slow
def test_whoever_removes_a_host_that_is_away_is_told_of_its_agent(cluster: RunningCluster) -> None:
    """Regression: the host was reported as removed, and its agent ran on for ever."""
    cluster.start(hosts=2)
    cluster.wait_until_up(2)
    cut_power(cluster.directory, 0)
    until(lambda: [row["state"] for row in cluster.call("hosts")] == ["unreachable", "up"])
    lines = cluster.run("host", "remove", "local0", "local1").stderr.splitlines()
    assert lines[0].startswith("local0 is removed; it could not be reached, and its idle agent is still running there")
    assert lines[1] == "local1 is removed"
