"""Control groups: where an agent can make them, how it gets there, and the limits of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host import cgroups, checks
from tests.agent.client import AgentClient, rank

needs_groups = pytest.mark.skipif(cgroups.find_base() is None, reason="no control groups (version 2) can be made here")


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A directory with the files of a group that has both controllers."""
    for name in ("memory.max", "memory.swap.max", "memory.oom.group", "cpu.weight"):
        (tmp_path / name).write_text("max\n")
    return tmp_path


def test_a_job_gets_the_memory_that_it_asked_for_and_a_share_of_cores(group: Path) -> None:
    cgroups.limit(group, 64 << 20, 8)
    values = {file.name: file.read_text() for file in group.iterdir()}
    expected = {"memory.max": str(64 << 20), "memory.swap.max": "0", "memory.oom.group": "1", "cpu.weight": "80"}
    assert values == expected


def test_a_job_that_asked_for_no_memory_is_not_limited(group: Path) -> None:
    cgroups.limit(group, 0, 2000)
    assert (group / "memory.max").read_text() == "max\n"
    assert (group / "cpu.weight").read_text() == "10000"


def test_without_controllers_there_is_no_limit_and_no_error(tmp_path: Path) -> None:
    cgroups.limit(tmp_path, 64 << 20, 8)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_in_another_group_is_not_this_jobs(tmp_path: Path) -> None:
    """The group's own count decides, where there is one."""
    mine, others = tmp_path / "mine", tmp_path / "others"
    for directory, kills in ((mine, 1), (others, 0)):
        directory.mkdir()
        (directory / "memory.events").write_text(f"max 9\noom 1\noom_kill {kills}\noom_group_kill 0\n")
    assert cgroups.out_of_memory_kills(mine) == 1
    assert cgroups.out_of_memory_kills(others) == 0
    assert cgroups.out_of_memory_kills(tmp_path) is None


BUSCTL = """#!{python}
import sys
from pathlib import Path
unit, pid = next(word for word in sys.argv if word.endswith(".scope")), sys.argv[sys.argv.index("PIDs") + 3]
assert "Delegate" in sys.argv and "--user" in sys.argv
(Path({base!r}) / unit).mkdir()
(Path({base!r}) / unit / "cgroup.procs").write_text(pid)
"""

ENTER = """
import json, os, sys
from pathlib import Path
from clusterd.agent.host import cgroups
cgroups.LINGER = Path(sys.argv[1])
mounted, top = cgroups._mounted, cgroups._mounted()[0]
cgroups._mounted = lambda: (Path("/nonexistent"), mounted()[1])  # as for a user to whom the top does not belong
cgroups._is_writable = lambda group: group != top and group.is_dir()
print(cgroups.prepare())
print(Path("/proc/self/cgroup").read_text())
"""


@needs_groups
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as the service manager")
@pytest.mark.parametrize("lingers", [True, False])
def test_an_agent_of_a_user_that_lingers_asks_for_a_scope(tmp_path: Path, lingers: bool) -> None:
    """In a login session nothing is delegated, and a scope of a manager that ends with the login would end the jobs."""
    base = cgroups.find_base()
    assert base is not None
    busctl = tmp_path / "busctl"
    busctl.write_text(BUSCTL.format(python=sys.executable, base=str(base)))
    busctl.chmod(0o755)
    if lingers:
        (tmp_path / "root").touch()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ENTER, str(tmp_path)],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for scope in base.glob("clusterd-agent-*.scope"):
            cgroups.remove(scope)
    found, *lines = done.stdout.splitlines()
    if not lingers:
        assert found == "None"
        return
    assert found.endswith(".scope")
    # The agent has left the scope's own level: controllers cannot be enabled beside processes.
    assert any(line == f"0::/{Path(found).name}/{cgroups.OWN}" for line in lines)


def test_host_check_lists_the_enforced_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERD_CGROUPS", "0")
    assert checks.check({}, None).enforced is None


@pytest.mark.skipif(
    "memory" not in (cgroups.enforced() or ()), reason="the memory controller (version 2) is not to be had here"
)
def test_a_job_that_exceeds_its_memory_ends_with_that_reason_alone(connect: Callable[..., AgentClient]) -> None:
    agent = connect()
    agent.launch(["sleep", "1000"], job="other", memory_bytes=256 << 20)
    hungry = [sys.executable, "-c", "x = bytearray(1 << 30); print(len(x))"]
    agent.launch(hungry, memory_bytes=256 << 20, ranks=[rank()])
    assert agent.event("rank_exited")["reason"] == "oom"
    reports = {report["job"]: report["ranks"][0]["state"] for report in agent.hello(epoch=2)["attempts"]}
    assert reports["other"] == "running"
