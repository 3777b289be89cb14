"""docs/client.md describes every verb of the socket."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from clusterd.daemon.api import files, host_check, hosts, job_logs, jobs, migration, performance, retention, terminals
from tests.conftest import RunningCluster

PAGE = (Path(__file__).parents[3] / "docs" / "client.md").read_text()


def test_its_example_runs(local_cluster: RunningCluster, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env=local_cluster.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("42\n")


def test_every_verb_is_told_with_its_arguments() -> None:
    answer = {name: arguments.split(", ") for name, arguments in re.findall(r"^\| `(\w+)\(([\w, ]*)\)`", PAGE, re.M)}
    there: dict[str, list[str]] = {}
    for verbs in (
        jobs.JobVerbs, migration.MigrationVerbs, host_check.HostChecks, files.FileVerbs, retention.RetentionVerbs,
        hosts.HostVerbs, performance.PerformanceVerbs, terminals.Terminals,
    ):  # fmt: skip
        for name, verb in inspect.getmembers(verbs, inspect.isfunction):
            of, *arguments = list(inspect.signature(verb).parameters)[1:] or [""]
            if of == "peer" and not name.startswith("_") and _is_verb(verb):
                there[name] = arguments or [""]
    there["logs"] = list(inspect.signature(job_logs.JobLogs.follow).parameters)[2:]
    assert answer == there


def _is_verb(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
