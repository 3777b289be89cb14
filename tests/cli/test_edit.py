"""``clusterd edit``: what a job asks for is changed in place."""

from __future__ import annotations

import pytest

from clusterd.errors import UsageError
from clusterd.submission.job_file import parse_changes
from tests.conftest import RunningCluster


def test_a_queued_job_is_edited(local_cluster: RunningCluster) -> None:
    cluster = local_cluster
    cluster.run("run", "-d", "--no-snapshot", "--name", "first", "--", "sleep", "1000")
    wide = ("--devices", "2", "--after", "first", "--name", "wide", "--", "true")
    job = cluster.run("run", "-d", "--no-snapshot", *wide).stdout.strip()
    told = cluster.run("edit", "wide", "devices=1", "time=2h", "priority=-3", "name=narrow").stderr
    change = "name wide -> narrow, priority 0 -> -3, time none -> 2h00m, devices 2 -> 1"
    assert told == f"{job} (narrow): {change}\n"
    row = cluster.job("narrow")
    assert (row["asked"], row["priority"], row["spec"]["time_limit_s"]) == (1, -3, 7200.0)
    history = cluster.run("history", "--job", "narrow").stdout
    assert f"{change}, changed by " in history
    never = cluster.run("edit", "narrow", "devices=200", check=False)
    assert never.returncode == 2
    assert "narrow can never start: it asks for 200 devices" in never.stderr
    assert cluster.job("narrow")["asked"] == 1
    cycle = cluster.run("edit", "narrow", "after=narrow", check=False)
    assert cycle.returncode == 2
    assert "waits for job" in cycle.stderr
    cluster.run("edit", "narrow", "after=none")
    assert cluster.run("wait", "narrow").returncode == 0
    over = cluster.run("edit", "narrow", "priority=1", check=False)
    assert over.returncode == 1
    assert "is finished already" in over.stderr


@pytest.mark.slow
def test_a_running_job_takes_a_new_time_limit(local_cluster: RunningCluster) -> None:
    cluster = local_cluster
    job = cluster.run(
        "run", "-d", "--no-snapshot", "--time", "1h", "--name", "long", "--", "sleep", "1000"
    ).stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    refused = cluster.run("edit", "long", "devices=2", "name=other", check=False)
    assert refused.returncode == 1
    assert f"job {job} (long) is running: name and devices cannot change now" in refused.stderr
    assert "nothing changes" in cluster.run("edit", "long", "time=1h").stderr
    ran = cluster.run("edit", "long", "time=0.001s", check=False)
    assert ran.returncode == 2
    assert "already: clusterd cancel" in ran.stderr
    cluster.run("edit", "long", "time=5s")
    assert cluster.run("wait", "long", check=False).returncode == 124
    assert cluster.job(job)["reason"] == "its time limit of 5.0s is over"


@pytest.mark.parametrize(
    "given, report",
    [
        ([], "nothing to change"),
        (["tme"], "did you mean 'time'?"),
        (["unlike=anything"], "write KEY=VALUE"),
        (["tenant=x"], "with one of the keys"),
        (["time=soon"], "time=soon: "),
        (["gpus=many"], "is no number of GPUs"),
        (["devices=-1"], "must not be negative"),
        (["plan=dp=x"], "plan=dp=x: "),
        (["name=7"], "name"),
    ],
)
def test_what_is_no_change(given: list[str], report: str) -> None:
    with pytest.raises(UsageError, match=report):
        parse_changes(given)


def test_changes_of_resources_come_together() -> None:
    changes = parse_changes(["gpus=a100:2", "memory=1GiB", "time=none", "after=a,b:any"])
    assert changes == {
        "resources": {"devices": 2, "kind": "cuda", "device_name": "a100", "memory_bytes": 1 << 30},
        "time_limit_s": None,
        "after": ["a", "b:any"],
    }
