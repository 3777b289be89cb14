"""Forecasts of a live cluster: shown by all faces, stored with what came of them, and not known without the process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningCluster, until


def forecast_of(cluster: RunningCluster, job: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = cluster.job(job)["forecast"]
    return found


def player(cluster: RunningCluster) -> int | None:
    """Process that plays roll-outs for the cluster's daemon."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and b"clusterd.simulate.forecaster" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == cluster.pid:
                    return int(entry.name)
        except OSError:  # it is gone
            continue
    return None


@pytest.mark.slow
def test_when_a_job_starts_is_told_while_it_can_be_and_not_known_afterwards(cluster: RunningCluster) -> None:
    """One device, two jobs: the second starts when the first ends. At last the process that knows such things dies."""
    cluster.start(hosts=1, devices=1)
    sleep = ["run", "--detach", "--no-snapshot", "--devices", "1"]
    first = cluster.run(*sleep, "--name", "first", "--", "sleep", "600").stdout.strip()
    second = cluster.run(*sleep, "--name", "second", "--time", "1h", "--", "sleep", "1").stdout.strip()
    until(lambda: (forecast_of(cluster, second) or {}).get("start") is not None, explain=cluster.log)
    found = forecast_of(cluster, second)
    assert found is not None
    assert found["after"] == "first"
    assert found["rollouts"] >= 5
    assert found["start"]["p5_s"] <= found["start"]["p50_s"] <= found["end"]["p50_s"]
    text = cluster.run("why", "second").stdout
    assert "expected start: " in text
    assert "after first ends or shrinks" in text
    assert "first" in (long := cluster.run("ls", "--long").stdout)
    assert "EXPECTED START" in long
    cluster.run("hold", second)  # what was forecast before is not shown meanwhile
    assert "expected start and end: not known" in cluster.run("why", "second").stdout
    cluster.run("release", second)

    (cluster.directory / "job.toml").write_text('name = "third"\ncommand = ["true"]\n[resources]\ndevices = 1\n')
    rows = json.loads(cluster.run("when", "job.toml", "--guaranteed", "-o", "json").stdout)
    assert [row["guaranteed"] for row in rows] == [False, True]
    assert all(row["forecast"]["start"]["p50_s"] > found["at_s"] for row in rows)
    sizes = cluster.run("when", "job.toml", "--devices", "1,64").stdout.splitlines()
    assert sizes[1].startswith("1 ") and "third can never start: it asks for 64 devices" in sizes[2]
    assert [row["name"] for row in cluster.call("jobs")] == ["first", "second"], "nothing was submitted"

    cluster.run("cancel", "--wait", first)
    cluster.wait_for(second, lambda row: row["state"] == "finished")
    until(lambda: {row["what"] for row in cluster.call("forecasts")} == {"start", "end"}, explain=cluster.log)
    report = cluster.run("report", "--forecasts").stdout
    assert "WITHIN 90%" in report
    assert "start" in report
    assert 'clusterd_forecasts{what="start",kind="command"' in cluster.run("metrics").stdout

    cluster.run(*sleep, "--name", "fourth", "--", "sleep", "600")
    fifth = cluster.run(*sleep, "--name", "fifth", "--", "sleep", "1").stdout.strip()
    until(lambda: (forecast_of(cluster, fifth) or {}).get("start") is not None, explain=cluster.log)
    pid = player(cluster)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    cluster.run("priority", fifth, "1")  # the next forecast is due
    until(lambda: forecast_of(cluster, fifth) is None, explain=cluster.log)
    assert "expected start and end: not known" in cluster.run("why", "fifth").stdout
