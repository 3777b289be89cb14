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


def test_show_says_which_commit_ran_with_which_versions(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """A file that differs from the commit, or is in none, makes it dirty; what git ignores is not sent."""
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / ".gitignore").write_text("data\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "data").touch()
    commit = git(tmp_path, "rev-parse", "HEAD")
    command = ["run", "--python", sys.executable, "--", "python", "train.py"]
    for index, expected in enumerate([commit, f"{commit}-dirty"], 1):
        local_cluster.run(*command, cwd=tmp_path)
        (tmp_path / "new.py").touch()
        shown = local_cluster.run("show", str(index)).stdout
        assert f"  commit     {expected}\n" in shown
        assert f"python {platform.python_version()}, torch {torch.__version__}" in shown
    row = json.loads(local_cluster.run("show", "1", "-o", "json").stdout)
    (found,) = row["attempts"][0]["versions"].values()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["interpreter"] == sys.executable
    assert row["spec"]["commit"] == commit
    local_cluster.run("run", "--no-snapshot", "--", "true", cwd=tmp_path)
    assert f"{commit}-dirty" in local_cluster.run("show", "3").stdout


def test_a_workdir_outside_of_git_and_a_broken_python_are_no_obstacle(
    local_cluster: RunningCluster, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    local_cluster.run("run", "--env", f"PATH={tmp_path}:/usr/bin:/bin", "--", "true", cwd=tmp_path)
    row = local_cluster.job("1")
    assert row["spec"]["commit"] == ""
    assert row["attempts"][0]["versions"] == {}
