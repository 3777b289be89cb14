"""``comment``: a text about a job that is shown, edited and searched."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterd.submission.batch_script import read_batch_script
from tests.conftest import RunningCluster


def test_a_comment_is_shown_edited_and_found(cluster: RunningCluster) -> None:
    cluster.start()
    file = cluster.directory / "job.toml"
    file.write_text(
        'command = ["true"]\nname = "night"\nworkdir = "empty"\ncomment = "ablation of the warm-up"\n'
        "wait_for_hosts = true\n[resources]\ngpus = 1\n"
    )
    (cluster.directory / "empty").mkdir()
    job = cluster.run("submit", str(file)).stdout.strip()
    other = ("--wait-for-hosts", "--gpus", "1", "--name", "plain", "--comment", "baseline", "--", "true")
    cluster.run("run", "-d", "--no-snapshot", *other)
    assert cluster.job(job)["comment"] == "ablation of the warm-up"
    assert "comment    ablation of the warm-up" in cluster.run("show", job).stdout
    listed = cluster.run("ls", "Ablation").stdout
    assert "night" in listed and "plain" not in listed
    told = cluster.run("edit", job, "comment=second try").stderr
    assert told == f"{job} (night): comment ablation of the warm-up -> second try\n"
    assert "night" not in cluster.run("ls", "ablation").stdout
    cluster.run("edit", job, "comment=none")
    assert cluster.job(job)["comment"] == ""


def test_a_comment_of_a_batch_script_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n#SBATCH --comment='second try'\ntrue\n")
    request, ignored = read_batch_script(script)
    assert (request.spec.comment, ignored) == ("second try", [])
