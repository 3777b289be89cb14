"""Dependent jobs from the command line."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunningCluster


def test_one_after_the_other(local_cluster: RunningCluster, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"until [ -e {ready} ]; do sleep 0.05; done"
    local_cluster.run("run", "-d", "--no-snapshot", "--name", "prepare", "--", "sh", "-c", script)
    file = tmp_path / "train.toml"
    file.write_text('name = "train"\ncommand = ["true"]\nafter = ["prepare"]\n')
    message = local_cluster.run("submit", "--dry-run", str(file)).stdout
    assert "train would be queued behind 0 jobs: waits for prepare (1, " in message
    local_cluster.run("submit", str(file))
    last = local_cluster.run("run", "-d", "--after", "train", "--after", "1", "--no-snapshot", "--", "true").stdout
    assert "waits for prepare (1, " in local_cluster.run("why", "train").stdout
    assert "after      2, 1" in local_cluster.run("show", last.strip()).stdout
    ready.touch()
    local_cluster.run("wait", last.strip())
    ended = [local_cluster.job(job)["ended_s"] for job in ("1", "2", "3")]
    assert ended == sorted(ended)


def test_events_that_end_a_history(local_cluster: RunningCluster, tmp_path: Path) -> None:
    answer = local_cluster.run("run", "--after", "nosuch", "--", "true", check=False)
    assert answer.returncode == 2
    assert "there is no job 'nosuch'" in answer.stderr
    local_cluster.run("run", "--no-snapshot", "--name", "broken", "--", "false", check=False)
    answer = local_cluster.run("run", "--after", "broken", "--", "true", check=False)
    assert answer.returncode == 1
    assert "job 1 (broken) is failed: nothing can start after it" in answer.stderr
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\nafter = "broken"\n')
    answer = local_cluster.run("submit", str(file), check=False)
    assert answer.returncode == 2
    assert "after is 'broken'; it must be a list" in answer.stderr


def test_who_waits_for_a_job_in_vain_is_told(local_cluster: RunningCluster, tmp_path: Path) -> None:
    local_cluster.run("run", "-d", "--no-snapshot", "--name", "slow", "--", "sleep", "1000")
    late = local_cluster.run("run", "-d", "--after", "slow", "--no-snapshot", "--", "true").stdout.strip()
    local_cluster.run("cancel", "slow")
    answer = local_cluster.run("wait", late, check=False)
    assert answer.returncode == 1
    assert "failed: it was to start after slow (1), which was cancelled" in answer.stderr


def test_stages_of_a_script_are_jobs_in_a_chain(local_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['CLUSTERD_STAGE'])\n")
    file = tmp_path / "net.toml"
    file.write_text('command = ["python3", "train.py"]\nstages = ["pretrain", "finetune"]\n')
    jobs = local_cluster.run("submit", "--wait", str(file)).stdout.split()
    assert [local_cluster.run("logs", job).stdout for job in jobs] == ["pretrain\n", "finetune\n"]
    assert [local_cluster.job(job)["name"] for job in jobs] == ["net-pretrain", "net-finetune"]
    assert f"after      {jobs[0]}" in local_cluster.run("show", jobs[1]).stdout
    for options in (("--stages", "a,a"), ("--stages", "a,,b"), ("--sweep", "N=1,2")):
        assert local_cluster.run("submit", *options, str(file), check=False).returncode == 2
