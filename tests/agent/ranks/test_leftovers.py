"""Daemons that a job left behind, without its session and its environment, end before its devices are free."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host import cgroups, processes
from clusterd.agent.host.home import Home
from tests.agent.client import AgentClient, groups_of, launch, wait_until
from tests.agent.conftest import STAND_IN

ESCAPE = """
import os, resource, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if sys.argv[1] == "cgroup":  # removes the mark, so that the group alone has to find it
            resource.setrlimit(10, (1, 1))
        script = "trap '' TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.1; done"
        os.execve("/bin/sh", ["sh", "-c", script], {})
    os._exit(0)
"""
"""Python that leaves a daemon behind: in its own session, re-parented, without environment, deaf to SIGTERM."""

WAITS = "\nimport time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"

Open = Callable[..., AgentClient]


@pytest.fixture(params=["cgroup", "mark"])
def way(request: pytest.FixtureRequest) -> str:
    """Method by which the agent finds left-over processes on this host."""
    way = str(request.param)
    if way == "cgroup" and cgroups.find_base() is None:
        pytest.skip("this user cannot make control groups (version 2) here")
    return way


@pytest.fixture
def connect_to(connect: Open, way: str) -> Open:
    """As `connect`, to an agent that uses this way."""

    def open_one(**more: Any) -> AgentClient:
        env = {"CLUSTERD_CGROUPS": "0" if way == "mark" else "", "PYTHONPATH": str(STAND_IN)}
        return connect(env={**env, "CLUSTERD_PRELOAD": "preloaded_standin"}, **more)

    return open_one


def alive(pid: int) -> bool:
    found = processes.stat(pid)
    return found is not None and found.state not in "ZX"


def escaped(agent: AgentClient, job: str = "j") -> int:
    """Pid of the daemon that the job left behind, which is in no session of the job any more and has no variables."""
    file = Home(agent.root).attempt(job, 1) / "work" / "pid"
    pid = int(wait_until(lambda: file.exists() and file.read_text(), "the daemon to start"))
    assert alive(pid)
    assert b"CLUSTERD" not in processes.environment(pid)
    return pid


def go(agent: AgentClient, job: str = "j") -> None:
    (Home(agent.root).attempt(job, 1) / "work" / "go").touch()


def python(way: str, script: str) -> list[str]:
    return [sys.executable, "-c", script, way]


def test_a_daemon_ends_before_the_end_of_its_job_is_reported(connect_to: Open, way: str) -> None:
    agent = connect_to()
    agent.launch(python(way, ESCAPE + WAITS))
    left = escaped(agent)
    go(agent)
    assert agent.event("rank_exited")["exit_code"] == 0
    assert not alive(left)


def test_a_shell_line_with_setsid_and_an_empty_environment(connect_to: Open) -> None:
    agent = connect_to()
    agent.launch(["sh", "-c", "setsid env -i sh -c 'echo $$ > pid.new; mv pid.new pid; exec sleep 1000' &\n"
                  "while [ ! -e go ]; do sleep 0.02; done"])  # fmt: skip
    left = escaped(agent)
    go(agent)
    agent.event("rank_exited")
    assert not alive(left)


def test_cancel_ends_it_and_no_other_jobs(connect_to: Open, way: str) -> None:
    """Both jobs have the same fork server, to which their orphans are re-parented."""
    agent = connect_to()
    for job in ("j", "other"):
        agent.launch(python(way, ESCAPE + WAITS), job=job)
    left, others = escaped(agent), escaped(agent, "other")
    assert left in agent.stop()["swept"]
    assert not alive(left)
    assert alive(others)
    agent.stop("other")
    assert not alive(others)


def test_an_elastic_rank_in_a_fork(connect_to: Open, way: str, tmp_path: Path) -> None:
    agent = connect_to()
    (tmp_path / "train.py").write_text(ESCAPE + WAITS)
    agent.launch(["python", str(tmp_path / "train.py"), way], kind="elastic")
    left = escaped(agent)
    agent.stop()
    assert not alive(left)


def test_a_command_beside_a_rank(connect_to: Open, way: str) -> None:
    agent = connect_to()
    agent.launch(["sleep", "1000"])
    asked = {"job": "j", "attempt": 1, "generation": 1, "rank": 0, "secrets": {}, "screen": None}
    agent.ok("terminal_open", argv=python(way, ESCAPE), **asked)
    left = escaped(agent)
    agent.stop()
    assert not alive(left)


def test_the_next_agent_ends_it_after_the_agent_died_before_the_sweep(connect_to: Open, way: str) -> None:
    agent = connect_to()
    agent.launch(python(way, ESCAPE + WAITS))
    left = escaped(agent)
    agent.kill_agent()
    go(agent)
    record = Home(agent.root).attempt("j", 1) / "rank-0.state.json"
    wait_until(lambda: '"exited"' in record.read_text(), "the exit to be recorded")
    agent = connect_to()
    wait_until(lambda: not alive(left), "the sweep")


@pytest.mark.slow_after(1)
def test_the_loss_of_a_rank_is_not_reported_before(connect_to: Open, way: str) -> None:
    """The fork server is killed, then the rank: nothing but the record on disk names the rank's group."""
    agent = connect_to()
    pid = agent.launch(python(way, ESCAPE + WAITS))["ranks"][0]["pid"]
    left = escaped(agent)
    server = processes.stat(pid)
    assert server is not None
    os.kill(server.parent, signal.SIGKILL)
    agent.kill_agent()
    agent = connect_to()
    os.kill(pid, signal.SIGKILL)
    assert agent.event("rank_exited")["reason"] == "lost"
    assert not alive(left)


@pytest.mark.skipif(cgroups.find_base() is None, reason="this user cannot make control groups (version 2) here")
def test_each_generation_has_a_group_until_it_ends(connect: Open) -> None:
    agent = connect()
    identity = agent.hello()["agent"]
    agent.ok("launch", **launch(["sleep", "1000"]))
    agent.ok("launch", **launch(["sleep", "1000"], generation=2))
    assert len(groups_of(identity)) == 2
    agent.stop()
    assert [cgroups.is_populated(group) for group in groups_of(identity)] == [True]
    agent.stop(generation=2)
    assert groups_of(identity) == []
