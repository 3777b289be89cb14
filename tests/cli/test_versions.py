"""Versions of what ran, kept with each attempt."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

from tests.conftest import RunningCluster


def git(directory: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", "-C", str(directory), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_show_says_which_commit_ran_with_which_versions(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """A file that differs from the commit, or is in none, makes it dirty; what git ignores is not sent."""
    git(tmp_path, "init", "-q")
    # It runs until its versions are known: of one that ends before, none are shown.
    wait = f"while not os.path.exists({str(tmp_path / 'data')!r}):\n    time.sleep(0.05)\n"
    (tmp_path / "train.py").write_text(f"import os, time\n{wait}")
    (tmp_path / ".gitignore").write_text("data\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    command = ["--python", sys.executable, "--", "python", "train.py"]
    for name, expected in (("clean", commit), ("dirty", f"{commit}-dirty")):
        (tmp_path / "data").unlink(missing_ok=True)
        job = shared_cluster.run("run", "-d", "--name", name, *command, cwd=tmp_path).stdout.strip()
        shared_cluster.wait_for(job, lambda row: row["state"] == "running")
        (tmp_path / "data").touch()
        shared_cluster.wait_for(job, lambda row: row["ended_s"])
        (tmp_path / "new.py").touch()
        shown = shared_cluster.run("show", name).stdout
        assert f"  commit     {expected}\n" in shown
        assert f"python {platform.python_version()}, torch {torch.__version__}" in shown
    row = json.loads(shared_cluster.run("show", "clean", "-o", "json").stdout)
    (found,) = row["attempts"][0]["versions"].values()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["interpreter"] == sys.executable
    assert row["spec"]["commit"] == commit
    shared_cluster.run("run", "--name", "unsent", "--no-snapshot", "--", "true", cwd=tmp_path)
    assert f"{commit}-dirty" in shared_cluster.run("show", "unsent").stdout


def test_a_workdir_outside_of_git_and_a_broken_python_are_no_obstacle(
    shared_cluster: RunningCluster, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    shared_cluster.run(
        "run", "--name", "outside", "--env", f"PATH={tmp_path}:/usr/bin:/bin", "--", "true", cwd=tmp_path
    )
    row = shared_cluster.job("outside")
    assert row["spec"]["commit"] == ""
    assert row["attempts"][0]["versions"] == {}
