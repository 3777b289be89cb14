"""``--array``: many jobs as one line, and their results as one table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from clusterd.errors import UsageError
from clusterd.submission.sweep import parse_array
from clusterd.units import is_match
from tests.conftest import RunningCluster, until

TRAIN = """
import json, os, sys
index = int(os.environ["CLUSTERD_ARRAY_TASK_ID"])
assert sys.argv[1] == str(index)
json.dump({"accuracy": index / 4, "test": {"loss": 1.0}, "state": "good"}, open("metrics.json", "w"))
sys.exit(3 if index == 2 else 0)
"""


def test_results_join_index_and_metrics(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    file = tmp_path / "job.toml"
    file.write_text('name = "net"\ncommand = ["python3", "train.py", "{index}"]\narray = "1-3%2"\n')
    submitted = shared_cluster.run("submit", "--wait", str(file), check=False)
    assert submitted.returncode == 3
    jobs = submitted.stdout.split()
    assert "3 jobs are queued, net_1 to net_3" in submitted.stderr
    rows = json.loads(shared_cluster.run("results", "net", "--json").stdout)
    assert [(row["id"], row["index"], row["state"], row["exit_code"]) for row in rows] == [
        (jobs[0], 1, "finished", 0),
        (jobs[1], 2, "failed", 3),
        (jobs[2], 3, "finished", 0),
    ]
    metrics = [{"accuracy": index / 4, "test.loss": 1.0, "state": "good"} for index in (1, 2, 3)]
    assert [row["metrics"] for row in rows] == metrics
    table = csv.DictReader(io.StringIO(shared_cluster.run("results", jobs[0], "--csv").stdout))
    assert [(row["index"], row["state"], row["accuracy"], row["metrics.state"]) for row in table] == [
        ("1", "finished", "0.25", "good"), ("2", "failed", "0.5", "good"), ("3", "finished", "0.75", "good"),
    ]  # fmt: skip
    assert "loss" not in (table.fieldnames or ())  # none of them trained
    assert "ACCURACY" in shared_cluster.run("results", "net").stdout
    assert shared_cluster.run("results", "nosuch", check=False).returncode == 2
    assert shared_cluster.run("show", f"{jobs[0]}_2").stdout.startswith(f"{jobs[1]}  net_2  failed")
    assert "net is an array: name one of its tasks, as net_1" in shared_cluster.run("why", "net", check=False).stderr
    for named, folder in ((jobs[0], "by id"), ("net", "by name")):  # by id it was the first task's file alone
        shared_cluster.run("get", named, "metrics.json", "--to", folder, cwd=tmp_path)
        found = sorted(file.parent.name for file in (tmp_path / folder).glob("*/metrics.json"))
        assert found == ["net_1", "net_2", "net_3"]
    listed = json.loads(shared_cluster.run("get", "net", "--json").stdout)
    assert [file["path"] for file in listed] == [f"net_{index}/metrics.json" for index in (1, 2, 3)]
    assert "is no folder" in shared_cluster.run("get", "net", "metrics.json", "--to", "-", check=False).stderr


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("gpu[02-11]", ["gpu02", "gpu10"]), ("gpu[1-12]", ["gpu10", "gpu3"]), ("gpu0[1-4]", ["gpu02"]),
        ("gpu[23]", ["gpu3"]), ("gpu_[3,20-30]", ["gpu_23"]), ("r[1-2]-n[01-09]*", ["r1-n02", "r2-n07b"]),
        ("r[12]-*", ["r1-n02", "r2-n07b", "r1-n10"]),
    ],
)  # fmt: skip
def test_brackets_with_a_range_are_numbers(pattern: str, matching: list[str]) -> None:
    """Regression: `host drain 'gpu[1-12]'` would mean gpu1 and gpu2, as in a shell, and not all twelve, as in Slurm."""
    names = ["gpu02", "gpu10", "gpu3", "gpu_23", "r1-n02", "r2-n07b", "r3-n02", "r1-n10"]
    assert [name for name in names if is_match(name, pattern)] == matching


def test_brackets_list_tasks_by_number(shared_cluster: RunningCluster) -> None:
    """Regression: `cancel 12_[10-12]`, as scancel has it, was a pattern of single characters, and ended 0, 1 and 2."""
    cluster = shared_cluster
    jobs = cluster.run("run", "-d", "--hold", "--name", "grid", "--array", "0-13", "--", "true").stdout.split()
    for listed in (f"{jobs[0]}_[3,10-12]", "grid_[3,10-12]"):
        rows = json.loads(cluster.run("ls", listed, "-o", "json").stdout)
        assert [row["array"]["index"] for row in rows] == [3, 10, 11, 12]
    cluster.run("cancel", f"{jobs[0]}_[10-12]")
    assert len(json.loads(cluster.run("wait", "grid_[10-12]", "-o", "json", check=False).stdout)) == 3
    rows = json.loads(cluster.run("ls", "-a", "grid", "--json").stdout)
    assert [row["array"]["index"] for row in rows if row["state"] == "cancelled"] == [10, 11, 12]
    after = cluster.run("run", "-d", "--hold", "--after", f"{jobs[0]}_[0-1]:any", "--", "true").stdout.strip()
    assert set(cluster.job(after)["spec"]["after"]) == {f"{jobs[0]}:any", f"{jobs[1]}:any"}
    assert cluster.run("cancel", "grid_[20-30]", check=False).returncode == 2
    cluster.run("cancel", "*")


def test_an_array_is_one_line_and_is_held_and_cancelled_whole(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    command = ("run", "-d", "--no-snapshot", "--name", "night", "--array", "0-4%1", "--", "sleep", "1000")
    jobs = cluster.run(*command).stdout.split()
    cluster.wait_for(jobs[0], lambda row: row["state"] == "running")
    listed = cluster.run("ls").stdout.splitlines()
    assert len(listed) == 2
    assert listed[1].split()[:3] == [f"{jobs[0]}_*", "night", "running"]
    assert "5 tasks, at most 1 at once: 4 pending, 1 running" in listed[1]
    assert (
        len(cluster.run("ls", "--tasks").stdout.splitlines())
        == len(cluster.run("ls", "night").stdout.splitlines())
        == 6
    )
    cluster.run("hold", "night")
    assert [cluster.job(job)["held_by"] is not None for job in jobs] == [False, True, True, True, True]
    cluster.run("release", f"{jobs[0]}_*")
    assert [cluster.job(job)["held_by"] for job in jobs] == [None] * 5
    assert cluster.run("priority", "night", "5").stderr.count("has priority 5") == 5
    assert cluster.run("wait", "night", "--timeout", "0.1s", check=False).returncode == 124
    cluster.run("cancel", "--wait", "night")
    assert cluster.run("wait", "night", check=False).returncode == 130
    assert [cluster.job(job)["state"] for job in jobs] == ["cancelled"] * 5
    (over,) = [line for line in cluster.run("ls", "--all").stdout.splitlines() if "night" in line]
    assert over.split()[:3] == [f"{jobs[0]}_*", "night", "cancelled"] and "5 cancelled" in over


def test_the_id_of_an_array_is_the_array(shared_cluster: RunningCluster) -> None:
    """As in Slurm: its first task alone has an id with an index."""
    cluster = shared_cluster
    jobs = cluster.run("run", "-d", "--no-snapshot", "--array", "0-2%1", "--", "sleep", "1000").stdout.split()
    array = jobs[0]
    cluster.wait_for(array, lambda row: row["state"] == "running")
    assert len(cluster.run("ls", array).stdout.splitlines()) == 4
    cluster.run("hold", array)
    assert [cluster.job(job)["held_by"] is not None for job in jobs] == [False, True, True]
    cluster.run("release", array)
    cluster.run("edit", array, "comment=night")
    assert [cluster.job(job)["comment"] for job in jobs] == ["night"] * 3
    assert f"this is its task {array}_0" in cluster.run("why", array).stderr
    cluster.run("cancel", "--wait", f"{array}_0")
    cluster.wait_for(jobs[1], lambda row: row["state"] == "running")
    assert "no task for that" in cluster.run("release", array, check=False).stderr
    cluster.run("cancel", "--wait", array)
    assert [cluster.job(job)["state"] for job in jobs] == ["cancelled"] * 3
    assert cluster.run("wait", array, check=False).returncode == 130


def test_jobs_are_cancelled_by_state_and_signalled(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    cluster = shared_cluster
    script = f"trap 'echo told > {tmp_path}/told' USR1; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    running = cluster.run("run", "-d", "--no-snapshot", "--", "sh", "-c", script).stdout.strip()
    cluster.wait_for(running, lambda row: row["state"] == "running")
    waiting = cluster.run("run", "-d", "--no-snapshot", "--after", running, "--", "true").stdout.strip()
    assert "there is no such signal" in cluster.run("cancel", "--signal", "BAD", running, check=False).stderr
    until((tmp_path / "ready").exists)
    for usr1 in ("USR1", "sigusr1", "10"):
        (tmp_path / "told").unlink(missing_ok=True)
        cluster.run("cancel", "--signal", usr1, running)
        until((tmp_path / "told").exists)
    assert waiting in cluster.run("ls", "--state", "pending").stdout
    cluster.run("cancel", "--state", "pending")
    assert [cluster.job(job)["state"] for job in (running, waiting)] == ["running", "cancelled"]
    assert "none of them is queued" in cluster.run("cancel", "--state", "queued", running, check=False).stderr
    cluster.run("cancel", "--wait", running)


def test_a_sweep_has_results_by_value(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "codes"\ncommand = ["sh", "-c", "exit {CODE}"]\n')
    shared_cluster.run("submit", "--sweep", "CODE=0,3", "--wait", str(file), check=False)
    rows = json.loads(shared_cluster.run("results", "codes", "-o", "json").stdout)
    assert [(row["values"], row["exit_code"]) for row in rows] == [({"CODE": "0"}, 0), ({"CODE": "3"}, 3)]
    both = shared_cluster.run("submit", "--sweep", "CODE=0,3", "--array", "1-2", str(file), check=False)
    assert both.returncode == 2
    assert "give one of them" in both.stderr


def test_a_batch_script_finds_its_index(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('#!/bin/bash\n#SBATCH --array=5-6\necho "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID"\n')
    jobs = shared_cluster.run("submit", "--wait", "train.sh", cwd=tmp_path).stdout.split()
    assert [shared_cluster.run("logs", job).stdout for job in jobs] == [f"task {n} of {jobs[0]}\n" for n in (5, 6)]


@pytest.mark.parametrize(
    ("text", "indices", "most"),
    [
        ("0-3", [0, 1, 2, 3], 0),
        ("0-3%2", [0, 1, 2, 3], 2),
        ("7", [7], 0),
        ("9,1-2,10-20:5%1", [1, 2, 9, 10, 15, 20], 1),
    ],
)
def test_indices_are_read_as_slurm_reads_them(text: str, indices: list[int], most: int) -> None:
    assert parse_array(text) == (indices, most)


@pytest.mark.parametrize("text", ["", "3-1", "a", "1-", "1-3%", "1-3%0", "1,1", "0-5:0", "0-1000", "-1"])
def test_an_invalid_array_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="array"):
        parse_array(text)


def test_results_are_what_a_task_itself_wrote(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Metrics of an earlier run lie in the directory that is sent; a loss that is not a number is no JSON."""
    (tmp_path / "metrics.json").write_text('{"loss": 0.5}')
    script = "[ $CLUSTERD_ARRAY_TASK_ID = 0 ] || echo '{\"loss\": NaN}' > metrics.json"
    command = ("run", "-d", "--name", "nan", "--array", "0-1", "--", "sh", "-c", script)
    tasks = shared_cluster.run(*command, cwd=tmp_path).stdout.split()
    shared_cluster.run("wait", *tasks)
    text = shared_cluster.run("results", "nan", "--json").stdout
    assert "NaN" not in text
    assert [row["metrics"] for row in json.loads(text)] == [{}, {"loss": None}]
