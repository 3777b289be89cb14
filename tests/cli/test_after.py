"""Dependent jobs from the command line."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunningCluster


def test_one_after_the_other(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"until [ -e {ready} ]; do sleep 0.05; done"
    command = ("run", "-d", "--no-snapshot", "--name", "prepare", "--", "sh", "-c", script)
    first = shared_cluster.run(*command).stdout.strip()
    file = tmp_path / "train.toml"
    file.write_text('name = "train"\ncommand = ["true"]\nafter = ["prepare"]\n')
    message = shared_cluster.run("submit", "--dry-run", str(file)).stdout
    assert f"train would be queued: waits for prepare ({first}, " in message
    second = shared_cluster.run("submit", str(file)).stdout.strip()
    last = shared_cluster.run("run", "-d", "--after", "train", "--after", first, "--no-snapshot", "--", "true").stdout
    assert f"waits for prepare ({first}, " in shared_cluster.run("why", "train").stdout
    assert f"after      {second}, {first}" in shared_cluster.run("show", last.strip()).stdout
    ready.touch()
    shared_cluster.run("wait", last.strip())
    ended = [shared_cluster.job(job)["ended_s"] for job in (first, second, last.strip())]
    assert ended == sorted(ended)


def test_events_that_end_a_history(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    answer = shared_cluster.run("run", "--after", "nosuch", "--", "true", check=False)
    assert answer.returncode == 2
    assert "there is no job 'nosuch'" in answer.stderr
    command = ("run", "-d", "--no-snapshot", "--name", "broken", "--", "false")
    job = shared_cluster.run(*command).stdout.strip()
    shared_cluster.run("wait", job, check=False)
    answer = shared_cluster.run("run", "--after", "broken", "--", "true", check=False)
    assert answer.returncode == 1
    assert f"job {job} (broken) is failed: nothing can start after it" in answer.stderr
    file = tmp_path / "job.toml"
    file.write_text('command = ["true"]\nafter = "broken"\n')
    answer = shared_cluster.run("submit", str(file), check=False)
    assert answer.returncode == 2
    assert "after is 'broken'; it must be a list" in answer.stderr


def test_who_waits_for_a_job_in_vain_is_told(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    command = ("run", "-d", "--no-snapshot", "--name", "slow", "--", "sleep", "1000")
    first = shared_cluster.run(*command).stdout.strip()
    late = shared_cluster.run("run", "-d", "--after", "slow", "--no-snapshot", "--", "true").stdout.strip()
    shared_cluster.run("cancel", "slow")
    answer = shared_cluster.run("wait", late, check=False)
    assert answer.returncode == 1
    assert f"failed: it was to start after slow ({first}), which was cancelled" in answer.stderr


def test_stages_of_a_script_are_jobs_in_a_chain(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['CLUSTERD_STAGE'])\n")
    file = tmp_path / "net.toml"
    file.write_text('command = ["python3", "train.py"]\nstages = ["pretrain", "finetune"]\n')
    jobs = shared_cluster.run("submit", "--wait", str(file)).stdout.split()
    assert [shared_cluster.run("logs", job).stdout for job in jobs] == ["pretrain\n", "finetune\n"]
    assert [shared_cluster.job(job)["name"] for job in jobs] == ["net-pretrain", "net-finetune"]
    assert f"after      {jobs[0]}" in shared_cluster.run("show", jobs[1]).stdout
    for options in (("--stages", "a,a"), ("--stages", "a,,b"), ("--sweep", "N=1,2")):
        assert shared_cluster.run("submit", *options, str(file), check=False).returncode == 2


def test_an_array_is_awaited_whole(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    cluster = shared_cluster
    run = ("run", "-d", "--no-snapshot")
    wait = ("--", "sh", "-c", f"until [ -e {tmp_path}/$CLUSTERD_ARRAY_TASK_ID ]; do sleep 0.05; done")
    tasks = cluster.run(*run, "--name", "prep", "--array", "0-2", *wait).stdout.split()
    by_id = cluster.run(*run, "--after", tasks[0], "--name", "by-id", "--", "true").stdout.strip()
    shown = {text: cluster.run(*run, "--after", text, "--", "true").stdout.strip() for text in ("prep", "prep_[01]")}
    first = cluster.run(*run, "--after", f"{tasks[0]}_0", "--", "true").stdout.strip()
    script = "#!/bin/sh\n#SBATCH --array=1-2 --dependency=aftercorr:{}\ntrue\n"
    (tmp_path / "corr.sh").write_text(script.format(tasks[0]))
    each = cluster.run("submit", "corr.sh", cwd=tmp_path).stdout.split()
    (tmp_path / "0").touch()
    cluster.run("wait", first)
    assert f"waits for prep_1 ({tasks[1]}, running) and prep_2 ({tasks[2]}, " in cluster.run("why", by_id).stdout
    assert cluster.job(shown["prep_[01]"])["reason"] == f"waits for prep_1 ({tasks[1]}, running)"
    (tmp_path / "1").touch()
    cluster.run("wait", shown["prep_[01]"], f"{each[0]}_1")
    assert {cluster.job(job)["state"] for job in (by_id, shown["prep"], each[1])} == {"queued"}
    (tmp_path / "2").touch()
    cluster.run("wait", by_id, shown["prep"], each[1])
    for after, why in (("nosuch_*", "no job of yours matches"), (f"{tasks[0]}:corr", "is no task of an array")):
        refused = cluster.run(*run, "--after", after, "--", "true", check=False)
        assert refused.returncode == 2 and why in refused.stderr


def test_a_singleton_waits_for_earlier_jobs_of_its_name(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    cluster = shared_cluster
    run = ("run", "-d", "--no-snapshot", "--after", "singleton", "--name")
    first = cluster.run(*run, "night", "--", "sleep", "1000").stdout.strip()
    other = cluster.run(*run, "day", "--", "true").stdout.strip()
    second = cluster.run(*run, "night", "--", "true").stdout.strip()
    cluster.run("wait", other)
    assert cluster.job(second)["reason"] == f"waits for night ({first}, running)"
    cluster.run("cancel", first)
    cluster.run("wait", second)
