"""`clusterd wait` returns a job's end, also across a restart of the daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunningCluster, cut_power, until
from tests.hang import HANG_S


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "wait", "logs"])
def test_a_daemon_that_is_restarted_is_waited_for(local_cluster: RunningCluster, tmp_path: Path, command: str) -> None:
    """An upgrade is a stop and a start; a script that waits is none the wiser."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    script = f"echo begun; touch {begun}; until [ -e {over} ]; do sleep 0.05; done; echo over; exit 3"
    arguments = ["run", "--no-snapshot", "--", "sh", "-c", script]
    if command == "wait":
        job = local_cluster.run("run", "-d", *arguments[1:]).stdout.strip()
        done = local_cluster.run("run", "-d", "--no-snapshot", "--", "true").stdout.strip()
        arguments = ["wait", done, job]
    elif command == "logs":
        arguments = ["logs", "-f", "--all-ranks", local_cluster.run("run", "-d", *arguments[1:]).stdout.strip()]
    with subprocess.Popen(
        [sys.executable, "-m", "clusterd", *arguments],
        cwd=tmp_path,
        env=local_cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stderr is not None and waiting.stdout is not None
        until(begun.exists)
        if command == "wait":
            assert "(true) finished" in waiting.stderr.readline()
        else:
            assert "begun" in waiting.stdout.readline()
        local_cluster.run("stop")
        local_cluster.run("start")
        over.touch()
        printed, message = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == (0 if command == "logs" else 3), message
    assert ("the daemon went away; sh (1) keeps running" in message) == (command != "wait")
    assert printed == {"run": "over\n", "logs": "0: over\n", "wait": ""}[command]


@pytest.mark.slow
def test_overdue_times_are_shown_as_over(local_cluster: RunningCluster) -> None:
    done = local_cluster.run("run", "-d", "--no-snapshot", "--", "true").stdout.strip()
    local_cluster.run("wait", done)
    runs = local_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "1000").stdout.strip()
    answer = local_cluster.run("wait", "--timeout", "0.5s", "-o", "json", done, runs, check=False)
    assert answer.returncode == 124
    assert [row["id"] for row in json.loads(answer.stdout)] == [done]
    answer = local_cluster.run("wait", runs, "nosuch", check=False)
    assert answer.returncode == 2, "at once, and not when the first is over"


@pytest.mark.slow
def test_a_cancel_that_waits_for_a_silent_host_says_so(cluster: RunningCluster) -> None:
    """Regression: `cancel`, `wait` and `run` printed nothing until the host was declared lost."""
    settings = cluster.directory / "clusterd.toml"
    settings.write_text('[daemon]\nhost_lost_after = "6s"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1)
    job = cluster.run("run", "-d", "--no-snapshot", "--name", "long", "--", "sleep", "1000").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    cut_power(cluster.directory, 0)
    cluster.wait_for(job, lambda row: bool(row["away"]))
    message = cluster.run("cancel", "--wait", job).stderr.splitlines()
    assert message[0].startswith("long (1): local0 is unreachable since ")
    assert "it is over without an answer; cancelled by " in message[0]
    assert message[-1] == "1 (long) is cancelled"


def test_an_ended_job_is_not_reported_as_unknown(local_cluster: RunningCluster) -> None:
    """`ls` of its name said that there were no such jobs."""
    local_cluster.run("run", "--no-snapshot", "--name", "done", "--", "true")
    message = local_cluster.run("ls", "done").stderr
    assert message == "no such jobs are queued or running (clusterd ls --all shows finished ones)\n"
    assert "finished" in local_cluster.run("ls", "--all", "done").stdout
    assert local_cluster.run("ls", "--all", "nobody").stderr == "no such jobs\n"
