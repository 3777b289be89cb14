"""Builds of Python environments by one agent."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import processes
from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import write_json
from clusterd.agent.ranks import environments
from clusterd.agent.ranks.environments import Environments, recipe_of
from clusterd.protocol.requests import BuildEnvironment
from tests.agent.client import AgentClient, end_all, wait_until
from tests.local_package import wait_for_file, write_package


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workdir whose requirements name a package that takes until `work/gate` is there."""
    directory = tmp_path / "work"
    write_package(directory / "pkg", before=wait_for_file(directory / "gate"))
    (directory / "requirements.txt").write_text("./pkg\n")
    return directory


def wanted(work: Path, job: str = "j", **more: Any) -> dict[str, Any]:
    ask = {"requirements": "requirements.txt", "python": sys.executable, "workdir": str(work)}
    return {"job": job, "attempt": 1, "generation": 1, **ask, **more}


def builds(work: Path) -> int:
    """Builds of the package so far."""
    begun = work / "gate.begun"
    return len(begun.read_text().splitlines()) if begun.exists() else 0


def test_attempts_that_want_the_same_wait_for_one_build(agent: AgentClient, work: Path) -> None:
    """And it goes on when one of them is cancelled."""
    first = agent.send("build_environment", **wanted(work, "first"))
    second = agent.send("build_environment", **wanted(work, "second"))
    # The package's own build comes after a virtual environment is made and pip started: both wait for it by then.
    wait_until(lambda: builds(work), "the build to begin")
    assert agent.ok("build_environment", **wanted(work, "third", only_look=True))["python"] == ""
    agent.stop("first")
    assert agent.reply(first)["error"]["kind"] == "stale"
    (work / "gate").touch()
    python = agent.reply(second)["ok"]["python"]
    assert os.access(python, os.X_OK)
    assert builds(work) == 1
    assert agent.ok("build_environment", **wanted(work, "third")) == {"python": python, "seconds": 0.0}


@pytest.mark.slow
def test_a_build_whose_agent_was_killed_is_begun_anew(connect: Any, work: Path, tmp_path: Path) -> None:
    """The processes of the first are gone then, and nothing of it is used."""
    agent = connect()
    agent.send("build_environment", **wanted(work))
    wait_until(lambda: builds(work), "the build to begin")
    identity = agent.ok("facts")  # it answers while it builds
    assert identity["boot_id"] == processes.boot_id()
    tag = next(iter(tag for tag in processes.tags("") if "/environment-" in tag))
    before = set(processes.of_attempt(tag))
    os.kill(agent.agent_pid, signal.SIGKILL)
    again = connect(epoch=2)
    wait_until(lambda: not before & set(processes.of_attempt(tag)), "the processes of the first build to end")
    number = again.send("build_environment", **wanted(work))
    wait_until(lambda: builds(work) == 2, "the second build")
    (work / "gate").touch()
    assert os.access(again.reply(number)["ok"]["python"], os.X_OK)


@pytest.mark.slow
def test_an_agent_that_ends_leaves_no_build(connect: Any, work: Path, tmp_path: Path) -> None:
    agent = connect()
    agent.send("build_environment", **wanted(work))
    wait_until(lambda: builds(work), "the build to begin")
    tags = [tag for tag in processes.tags("") if "/environment-" in tag]
    agent.ok("shutdown")
    wait_until(lambda: not any(processes.of_attempt(tag) for tag in tags), "the build to end")
    end_all(tmp_path / "agent")


def key(work: Path, **more: Any) -> str:
    return recipe_of(BuildEnvironment(**wanted(work, **more)), None).key


def test_everything_that_decides_the_content_is_in_the_key(work: Path) -> None:
    """And nothing else, or each submission would build anew."""
    first = key(work)
    (work / "train.py").write_text("print()\n")
    (work / "pkg" / "build").mkdir()
    (work / "pkg" / "build" / "left.py").touch()
    assert key(work, job="other", env={"LR": "1"}, secrets={"TOKEN": "x"}) == first
    assert key(work, env={"PIP_INDEX_URL": "https://index.example"}) != first
    (work / "pkg" / "greeter.py").write_text("GREETING = 'other'\n")
    second = key(work)
    assert second != first
    (work / "base.txt").write_text("numpy==1.0\n")
    (work / "requirements.txt").write_text("-r base.txt\n./pkg\n")
    third = key(work)
    (work / "base.txt").write_text("numpy==1.1\n")
    assert len({first, second, third, key(work)}) == 4


@pytest.mark.parametrize(
    "line", ["numpy", "pkg==1.0  # ./pkg", "a @ https://example.org/a.whl", "--index-url https://x/y/"]
)
def test_names_and_urls_are_no_local_packages(work: Path, line: str) -> None:
    (work / "requirements.txt").write_text(f"{line}\n")
    before = key(work)
    (work / "pkg" / "greeter.py").write_text("other\n")
    assert key(work) == before


def test_an_interpreter_that_does_not_run_is_the_hosts_fault(work: Path, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(Refused, match=r"does not run on this host: no such library") as refused:
        key(work, python=str(broken))
    assert refused.value.kind == "environment"


def test_a_file_outside_of_the_workdir_is_refused(work: Path) -> None:
    (work / "link.txt").symlink_to("/etc/passwd")
    for name in ("link.txt", "../work/../../etc/passwd", "absent.txt"):
        with pytest.raises(Refused, match=r"is not in the workdir of the job"):
            key(work, requirements=name)


def pretend(directory: Path, name: str, idle_s: float, size_bytes: int = 1) -> Path:
    """An environment that was last used some time ago."""
    python = directory / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    write_json(directory / f"{name}.json", {"bytes": size_bytes})
    for path in (directory / name, directory / f"{name}.json"):
        os.utime(path, (time.time() - idle_s,) * 2)
    return python


def test_unused_environments_are_removed_by_age_and_beyond_the_size_by_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one in use, and never the file of somebody else."""
    day_s = 86400.0
    monkeypatch.setattr(environments, "TOTAL_BYTES_MAX", 10)
    running = pretend(tmp_path, "a" * 16, 30 * day_s, 8)
    pretend(tmp_path, "b" * 16, 15 * day_s)
    pretend(tmp_path, "c" * 16, 3 * day_s, 4)
    pretend(tmp_path, "d" * 16, 2 * day_s, 1)
    pretend(tmp_path, "e" * 16, 60.0, 1)
    (tmp_path / "notes.txt").touch()
    kept = Environments(tmp_path, str)
    kept.clean([running])
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".json") == [
        "a" * 16, "d" * 16, "e" * 16, "notes.txt",
    ]  # fmt: skip
    kept.clean([])  # its use was noted: it is recent now
    assert (tmp_path / ("a" * 16)).exists()
