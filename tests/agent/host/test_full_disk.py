"""A job that fills its host's disk loses no other job's exit code, and can be stopped."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd.agent.host import processes
from clusterd.agent.host.home import Home
from clusterd.agent.host.ports import Ports
from clusterd.agent.server import attach
from tests.agent.client import AgentClient, end_all, rank, wait_until

Connect = Callable[..., AgentClient]

UNTIL_GO = ["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit $CODE"]


def fill_disk(pid: int, full: bool = True) -> None:
    """Whatever this process writes to a file, its own log too, fails; what it started before is not concerned."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def fork_server(pid: int) -> int:
    found = processes.stat(pid)
    assert found is not None
    return found.parent


def test_ends_that_cannot_be_written_are_told_to_this_agent_and_the_next_and_written_later(connect: Connect) -> None:
    agent = connect()
    pids = {
        job: agent.launch(UNTIL_GO, job=job, env={"CODE": code})["ranks"][0]["pid"]
        for job, code in (("first", "3"), ("second", "5"), ("third", "7"))
    }
    home, server = Home(agent.root), fork_server(pids["first"])
    fill_disk(server)
    for job, code in (("first", 3), ("second", 5)):
        (home.attempt(job, 1) / "work" / "go").touch()
        end = agent.event("rank_exited", job=job)
        assert (end["exit_code"], end["reason"]) == (code, "exit")
    agent.kill_agent()
    (home.attempt("third", 1) / "work" / "go").touch()
    wait_until(lambda: processes.stat(pids["third"]) is None, "the third to be waited for")

    agent = connect()

    def exit_codes() -> dict[str, int]:
        ranks = {report["job"]: report["ranks"][0] for report in agent.hello()["attempts"]}
        return {job: rank["exit_code"] for job, rank in ranks.items() if rank["state"] == "exited"}

    wait_until(lambda: exit_codes() == {"first": 3, "second": 5, "third": 7}, "all ends to be known")
    fill_disk(server, full=False)
    for job in pids:
        record = home.attempt(job, 1) / "rank-0.state.json"
        wait_until(lambda file=record: '"exited"' in file.read_text(), "the end to be written down")


def test_an_end_that_cannot_be_written_keeps_its_fork_server(connect: Connect) -> None:
    """Until there is room; and not for an attempt that was forgotten."""
    agent = connect()
    pid = agent.launch(UNTIL_GO, env={"CODE": "3"})["ranks"][0]["pid"]
    server = fork_server(pid)
    fill_disk(server)
    (Home(agent.root).attempt("j", 1) / "work" / "go").touch()
    agent.event("rank_exited")
    agent.ok("shutdown", force=False)
    wait_until(lambda: not attach.held(Home(agent.root)), "the agent to end")
    again = connect()
    wait_until(lambda: again.hello()["attempts"][0]["ranks"][0]["exit_code"] == 3, "the end to be known")
    again.ok("forget", job="j", attempt=1)
    again.ok("shutdown", force=False)
    wait_until(lambda: (s := processes.stat(server)) is None or s.state in "ZX", "the fork server to end")


def test_a_job_is_stopped_though_its_stop_cannot_be_written(agent: AgentClient) -> None:
    """The end is reported as a stop, not as an unexplained signal."""
    agent.launch(["sleep", "100"])
    fill_disk(agent.agent_pid)
    [report] = agent.stop()["ranks"]
    assert (report["state"], report["signal"], report["reason"]) == ("exited", signal.SIGTERM, "stopped")
    assert agent.event("rank_exited")["reason"] == "stopped"


def test_a_rank_that_ended_before_an_unwritable_stop_keeps_its_reason(agent: AgentClient) -> None:
    """One of two ranks failed: that is why the other one is stopped."""
    agent.launch(["sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 100"], ranks=[rank(0, 2), rank(1, 2)])
    agent.event("rank_exited", rank=1)
    fill_disk(agent.agent_pid)
    assert [r["reason"] for r in agent.stop()["ranks"]] == ["stopped", "exit"]


def test_any_request_that_fails_for_it_is_answered(agent: AgentClient) -> None:
    """The log in which the agent says more is on the same disk."""
    fill_disk(agent.agent_pid)
    assert agent.refused("port", job="j", attempt=1, generation=1)["kind"] == "host"
    agent.ok("facts")


def test_a_daemon_that_was_started_again_finds_its_jobs_on_a_host_without_room(connect: Connect) -> None:
    """The record of the leading daemon cannot be written; the agent still has it in memory."""
    first = connect(epoch=1)
    first.launch(["sleep", "100"])
    fill_disk(first.agent_pid)
    second = connect(hello=False)
    assert [attempt["job"] for attempt in second.hello(epoch=2)["attempts"]] == ["j"]
    third = connect(hello=False)
    assert third.refused("hello", **third.identity(epoch=1))["kind"] == "stale"


def test_a_port_is_given_back_though_that_cannot_be_written(tmp_path: Path) -> None:
    """The agent looks after ports once a second; it would end."""
    (tmp_path / "home").mkdir()
    ports = Ports(tmp_path / "home" / "ports.json")
    port = ports.lease("j.1", 1)
    (tmp_path / "home" / "ports.json").unlink()
    (tmp_path / "home").rmdir()
    ports.release(lambda *_: True)
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0clusterd-port-{port}")
    ports.close()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk: needs root")
@pytest.mark.parametrize("is_attached", [True, False])
def test_the_end_of_a_rank_that_filled_the_disk_names_it(connect: Connect, tmp_path: Path, is_attached: bool) -> None:
    """Regression: a command whose log found no room succeeded, or was "killed by signal 13", with an empty log."""
    (tmp_path / "agent").mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", tmp_path / "agent"], check=True)
    try:
        agent = connect()
        agent.launch(["sh", "-c", "cat /dev/zero > big; echo more"], is_attached=is_attached)
        end = agent.event("rank_exited")
        assert end["exit_code"] != 0, "its output is lost"
        assert end["message"].startswith("no space left on the disk of ")
    finally:
        end_all(tmp_path / "agent")
        subprocess.run(["umount", "-l", tmp_path / "agent"], check=True)
