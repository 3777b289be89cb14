"""A job that is over runs again, with another request, environment or today's code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import RunningCluster


def test_a_failed_command_runs_again_with_changes_and_todays_code(
    shared_cluster: RunningCluster, tmp_path: Path
) -> None:
    cluster = shared_cluster
    (tmp_path / "main.sh").write_text("exit ${CODE:-3}\n")
    first = cluster.run("run", "-d", "--name", "night", "--", "sh", "main.sh", cwd=tmp_path).stdout.strip()
    assert cluster.run("wait", first, check=False).returncode == 3
    again = cluster.run("rerun", "night", "--env", "CODE=0", "time=1h", "cpus=2").stdout.strip()
    cluster.run("wait", again)
    spec = cluster.job(again)["spec"]
    assert (spec["time_limit_s"], spec["resources"]["cpus"]) == (3600.0, 2)
    (tmp_path / "main.sh").write_text("echo today\n")
    old, new = (cluster.run("rerun", first, *fresh).stdout.strip() for fresh in ((), ("--fresh",)))
    assert cluster.run("wait", old, check=False).returncode == 3
    cluster.run("wait", new)
    assert cluster.run("logs", new).stdout == "today\n"


def test_the_failed_tasks_of_an_array_run_again_in_their_places(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    cluster = shared_cluster
    script = f"[ -e {tmp_path}/mended ] || [ $CLUSTERD_ARRAY_TASK_ID = 1 ]"
    command = ("--no-snapshot", "--name", "grid", "--array", "0-2", "--", "sh", "-c", script)
    tasks = cluster.run("run", "-d", *command).stdout.split()
    cluster.run("wait", *tasks, check=False)
    (tmp_path / "mended").touch()
    again = cluster.run("rerun", "grid").stdout.split()
    cluster.run("wait", *again)
    (listed,) = (line for line in cluster.run("ls", "--all").stdout.splitlines() if line.startswith(f"{tasks[0]}_* "))
    assert " finished " in listed and listed.endswith(" 3 tasks: 3 done"), listed
    rows = json.loads(cluster.run("results", "grid", "--json").stdout)
    assert [(row["id"], row["index"], row["state"]) for row in rows] == [
        (again[0], 0, "finished"), (tasks[1], 1, "finished"), (again[1], 2, "finished"),
    ]  # fmt: skip
    assert cluster.run("rerun", "grid", check=False).returncode == 2


def test_what_is_not_over_is_not_run_again_and_a_cancel_has_a_reason(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    job = cluster.run("run", "-d", "--no-snapshot", "--name", "long", "--", "sleep", "1000").stdout.strip()
    refused = cluster.run("rerun", job, check=False)
    assert refused.returncode == 1 and f"clusterd requeue {job}" in refused.stderr
    held = cluster.run("run", "-d", "--no-snapshot", "--hold", "--name", "held", "--", "true").stdout.strip()
    assert "it has yet to run" in cluster.run("rerun", held, check=False).stderr
    command = [sys.executable, "-m", "clusterd", "logs", "-f", held]
    with subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True) as following:
        assert following.stderr is not None
        assert following.stderr.readline().startswith(f"held ({held}) is queued: held by")
        cluster.run("cancel", held)
    cluster.run("cancel", job, "--why", "the data was wrong")
    cluster.run("wait", job, check=False)
    assert cluster.job(job)["reason"].endswith(": the data was wrong")
