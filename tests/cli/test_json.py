"""JSON output: points in time as text beside the number, durations as numbers alone."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from clusterd.units import with_iso_times
from tests.conftest import RunningCluster


def test_times_are_there_by_iso_8601_and_durations_stay() -> None:
    row = {
        "at_s": 1_700_000_000.25,
        "started_s": None,
        "left_s": 30.0,
        "spec": {"time_limit_s": 60.0},
        "claims": [{"from_s": 0.0, "until_s": 1e300, "step_time_s": 0.1}],
    }
    shown = with_iso_times(row)
    assert shown["at"] == "2023-11-14T22:13:20.250Z"
    assert (shown["started_s"], shown["started_at"]) == (None, None)
    assert shown["claims"][0]["from_at"] == "1970-01-01T00:00:00.000Z"
    assert shown["claims"][0]["until_at"] == "", "beyond what a calendar has"
    assert (
        "left_at" not in shown and shown["spec"] == {"time_limit_s": 60.0} and "step_time_at" not in shown["claims"][0]
    )
    assert row["at_s"] == 1_700_000_000.25 and "at" not in row, "a copy"


def test_every_command_prints_them(cluster: RunningCluster, tmp_path: Path) -> None:
    cluster.start()
    assert (
        cluster.call("status")["json_version"] == json.loads(cluster.run("status", "-o", "json").stdout)["json_version"]
    )
    job = cluster.run("run", "-d", "--no-snapshot", "--wait-for-hosts", "--", "true").stdout.strip()
    (row,) = json.loads(cluster.run("ls", "-o", "json").stdout)
    assert row["submitted_at"].endswith("Z") and row["started_at"] is None
    assert json.loads(cluster.run("show", job, "-o", "json").stdout)["submitted_at"] == row["submitted_at"]
    (line,) = csv.DictReader(io.StringIO(cluster.run("ls", "-o", "csv").stdout))
    assert (line["id"], line["state"], json.loads(line["devices"])) == (job, "queued", [])
    story = [json.loads(line) for line in cluster.run("history", "-o", "jsonl").stdout.splitlines()]
    assert story and all(event["at"].endswith("Z") for event in story)
