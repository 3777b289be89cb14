"""``clusterd claim``: devices that the scheduler does not give."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clusterd.cli.common.arguments import point_in_time_s
from clusterd.errors import UsageError
from tests.conftest import RunningCluster


def test_a_claimed_device_goes_to_no_job(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    cluster.wait_until_up(2)
    made = cluster.run("claim", "local0:1", "local1", "--for", "2h", "--why", "new fan").stderr
    assert made.startswith("claim 1: local0:cpu1 local1:cpu0-1 since ")
    one = cluster.run("run", "-d", "--no-snapshot", "--devices", "1", "--name", "one", "--", "sleep", "1000")
    row = cluster.wait_for(one.stdout.strip(), lambda row: row["devices"] != [])
    assert row["devices"] == ["local0:cpu0"]
    two = cluster.run("run", "-d", "--no-snapshot", "--devices", "1", "--name", "two", "--", "true").stdout.strip()
    why = cluster.run("why", "two").stdout
    assert "local0:cpu1, local1:cpu0, local1:cpu1 are claimed by " in why
    assert "new fan until" in why
    assert "cpu1 claimed: new fan" in cluster.run("host", "ls").stdout
    (listed,) = json.loads(cluster.run("claim", "ls", "-o", "json").stdout)
    assert (listed["id"], listed["reason"], listed["drain"]) == ("1", "new fan", False)
    assert "new fan" in cluster.run("claim", "ls").stdout
    assert "3 devices claimed by" in cluster.run("history").stdout
    cluster.run("claim", "rm", "1")
    cluster.run("claim", "local0", "local1", "--from", "+1h", "--reason", "move")
    dry = ("run", "--dry-run", "--no-snapshot", "--devices", "1")
    assert "would be queued" in cluster.run(*dry, "--", "true").stdout
    assert "would start now" in cluster.run(*dry, "--time", "10m", "--", "true").stdout
    cluster.run("claim", "rm", "2")
    assert cluster.run("wait", two).returncode == 0
    assert cluster.run("claim", "ls", "-o", "json").stdout.strip() == "[]"
    assert "there is no claim '1'" in cluster.run("claim", "rm", "1", check=False).stderr
    assert "has no device '7'" in cluster.run("claim", "local0:7", "--reason", "x", check=False).stderr


def test_a_claim_that_drains_queues_its_holders_again(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    cluster.wait_until_up(2)
    there = ("--devices", "1", "--host", "local0", "--name", "study")
    job = cluster.run("run", "-d", "--no-snapshot", *there, "--", "sleep", "1000").stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    told = cluster.run("claim", "local0", "--reason", "demo", "--drain").stderr
    assert "still there: study" in told
    claim = told.partition(":")[0].removeprefix("claim ")
    cluster.wait_for(job, lambda row: row["state"] == "queued" and not row["holds_devices"])
    cluster.run("claim", "rm", claim)
    assert cluster.wait_for(job, lambda row: row["state"] == "running")["attempt"] == 2


def test_devices_are_excluded_by_the_configuration(cluster: RunningCluster, tmp_path: Path) -> None:
    configuration = tmp_path / "clusterd.toml"
    configuration.write_text("[hosts.local0]\ncpu_devices = 2\nexclude_devices = [1]\n")
    cluster.environment["CLUSTERD_CONFIG"] = str(configuration)
    cluster.start(hosts=1)
    cluster.wait_until_up(1)
    refused = cluster.run("run", "--devices", "2", "--no-snapshot", "--", "true", check=False)
    assert refused.returncode == 2
    assert "can never start" in refused.stderr
    assert "excluded by exclude_devices" in cluster.run("host", "show", "local0").stdout
    job = cluster.run("run", "-d", "--devices", "1", "--no-snapshot", "--", "true").stdout.strip()
    assert cluster.run("wait", job).returncode == 0
    assert cluster.job(job)["devices"] == ["local0:cpu0"]


def test_times_of_a_start() -> None:
    now_s = time.time()
    assert point_in_time_s("--from", "+2h") == pytest.approx(now_s + 7200.0, abs=60.0)
    assert time.strftime("%H:%M", time.localtime(point_in_time_s("--from", "14:00"))) == "14:00"
    assert now_s - 60.0 <= point_in_time_s("--from", "14:00") <= now_s + 25 * 3600.0
    assert time.localtime(point_in_time_s("--from", "2030-12-24 08:00"))[:5] == (2030, 12, 24, 8, 0)
    with pytest.raises(UsageError, match=r"write it as in 14:00"):
        point_in_time_s("--from", "soon")


def test_a_dry_run_tells_whom_a_claim_or_a_drain_would_delay_and_changes_nothing(cluster: RunningCluster) -> None:
    cluster.start(hosts=1, devices=2)
    cluster.wait_until_up(1)
    job = cluster.run(
        "run", "-d", "--no-snapshot", "--devices", "2", "--time", "1h", "--", "sleep", "1000"
    ).stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    claim = ("claim", "local0", "--for", "30d", "--reason", "fan", "--dry-run")
    for asked in (
        claim,
        ("host", "drain", "local0", "--dry-run"),
        ("host", "drain", "local0", "--when-idle", "--dry-run"),
    ):
        done = cluster.run(*asked)
        assert "free: " in done.stdout and "not known" not in done.stdout and "roll-outs" in done.stdout
        assert "no job would end a minute later or earlier" in done.stdout + done.stderr
    assert cluster.run("claim", "ls").stdout == ""
    assert cluster.run("host", "drain", "local0", "--when-idle").stderr.count("free: ") == 1
    assert "it stays there until its end" in cluster.run("why", job).stdout
    refused = cluster.run("host", "drain", "nohost", "--dry-run", check=False)
    assert refused.returncode == 2 and "nohost" in refused.stderr
