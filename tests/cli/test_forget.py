"""`clusterd forget` frees the disk space of jobs that are over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunningCluster

OUTPUT = "head -c 2000000 /dev/zero > out.bin; echo said"


def stored(cluster: RunningCluster, job: str) -> list[str]:
    """Whatever lies on the head node or a host of attempts of this job."""
    return sorted(str(path) for path in cluster.directory.rglob(f"attempts/{job}.*"))


@pytest.fixture(name="finished")
def finished_(shared_cluster: RunningCluster, tmp_path: Path) -> str:
    command = ("run", "--detach", "--name", "writes", "--", "sh", "-c", OUTPUT)
    job = shared_cluster.run(*command, cwd=tmp_path).stdout.strip()
    shared_cluster.run("wait", job)
    assert shared_cluster.run("logs", job).stdout == "said\n"
    return job


def test_nothing_is_left_of_a_job_but_its_line(shared_cluster: RunningCluster, finished: str) -> None:
    assert len(stored(shared_cluster, finished)) >= 2, "on its host and on the head node"
    answer = shared_cluster.run("forget", finished)
    assert "1 job forgotten, 1.9 MiB freed" in answer.stderr
    assert stored(shared_cluster, finished) == []
    assert "writes" in shared_cluster.run("ls", "--all").stdout
    gone = shared_cluster.run("logs", finished, check=False)
    assert gone.returncode == 1
    assert "it never started, or was forgotten" in gone.stderr
    assert "0 B freed" in shared_cluster.run("forget", finished).stderr, "once more does no harm"


def test_a_job_that_runs_is_not_forgotten(shared_cluster: RunningCluster) -> None:
    job = shared_cluster.run("run", "--detach", "--name", "runs", "--", "sleep", "60").stdout.strip()
    shared_cluster.wait_for(job, lambda row: row["state"] == "running")
    refused = shared_cluster.run("forget", job, check=False)
    assert refused.returncode == 1
    assert f"job {job} (runs) is running: nothing was deleted; clusterd cancel {job} ends it" in refused.stderr
    assert stored(shared_cluster, job)
    shared_cluster.run("cancel", "--wait", job)


def test_old_ones_are_named_before_they_go(shared_cluster: RunningCluster, finished: str) -> None:
    assert f"{finished} (writes), finished" in shared_cluster.run("forget", "--older", "0s", "--dry-run").stdout
    assert stored(shared_cluster, finished)
    assert "forgotten" in shared_cluster.run("forget", "--older", "1d").stderr
    assert stored(shared_cluster, finished), "it ended just now"
    shared_cluster.run("forget", "--older", "0s")
    assert stored(shared_cluster, finished) == []


@pytest.mark.parametrize("given", [(), ("1", "--older", "1d"), ("--older", "soon"), ("--older=-1d",), ("--older=-5",)])
def test_what_is_meant_has_to_be_said(cluster: RunningCluster, given: tuple[str, ...]) -> None:
    refused = cluster.run("forget", *given, check=False)
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) == 1
