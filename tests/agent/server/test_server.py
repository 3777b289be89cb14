"""The agent process: one per directory, with a private socket, and files read by offset."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterd.agent.host.home import Home
from clusterd.agent.host.ports import Ports
from tests.agent.client import AgentClient, end_all, launch, processes_of, rank, start_attach, wait_until
from tests.agent.host.test_workdirs import tar_of

Connect = Callable[..., AgentClient]


def test_attaching_many_times_at_once_starts_one_agent(connect: Connect, tmp_path: Path) -> None:
    bridges = [start_attach(tmp_path / "agent") for _ in range(6)]
    for bridge in bridges:
        assert bridge.stdout is not None
        assert bridge.stdout.readline().startswith(b"clusterd-attached")
    agents = {connect().agent_pid}
    for bridge in bridges:
        bridge.communicate()

    def serving() -> set[int]:
        return {pid for pid in processes_of(tmp_path / "agent") if b"serve" in command_line(pid)}

    wait_until(lambda: serving() == agents, "those that came second to give up")


def test_whoever_has_hung_up_gets_no_agent(tmp_path: Path) -> None:
    """Regression: a host that was removed while it was connected to got an agent some moments later."""
    bridge = start_attach(tmp_path / "agent")
    assert bridge.stdin is not None and bridge.stdout is not None
    bridge.stdin.close()  # before Python has started
    assert bridge.stdout.read().startswith(b'clusterd-failed {"message": "the daemon has hung up"')
    bridge.stdout.close()
    assert bridge.wait() == 1
    assert processes_of(tmp_path / "agent") == [] and not Home(tmp_path / "agent").record.exists()


def command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_the_agent_and_its_directory_are_the_users_alone(agent: AgentClient) -> None:
    home = Home(agent.root)
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.socket.stat().st_mode) == 0o600


@pytest.mark.parametrize("length", [150, 80], ids=["of all sockets", "of those of fork servers alone"])
def test_a_short_place_for_sockets_goes_with_the_agent(tmp_path: Path, length: int) -> None:
    """The lock of a fork server stayed, and the directory below /tmp with it, for each agent there ever was."""
    root = tmp_path / ("x" * max(length - len(str(tmp_path)) - 1, 1))
    sockets = Home(root).sockets
    assert sockets.parent == Path("/tmp")
    agent = AgentClient(root)
    try:
        agent.hello()
        agent.launch(["true"])
        agent.event("rank_exited")
        assert list(sockets.glob("*.lock"))
        agent.ok("shutdown", force=False)
        wait_until(lambda: not sockets.exists(), "the directory of its sockets to be gone")
    finally:
        end_all(root)
        agent.close()


def test_removed_sockets_are_made_again(connect: Connect, tmp_path: Path) -> None:
    """Regression: after a broken connection the agent was unreachable, and a new one did not find its fork servers."""
    agent = connect()
    agent.launch(["sleep", "100"])
    home = Home(agent.root)
    shutil.rmtree(home.sockets)
    home.socket.unlink(missing_ok=True)
    again = connect(epoch=2)
    assert again.agent_pid == agent.agent_pid
    wait_until(lambda: list(home.sockets.glob("*.sock")), "the fork server to listen again")
    os.kill(again.agent_pid, signal.SIGKILL)
    last = connect(epoch=3)
    last.launch(["sleep", "100"], job="other")


def test_a_long_path_gets_a_short_socket(connect: Connect, tmp_path: Path) -> None:
    home = Home(tmp_path / ("x" * 100))
    assert len(str(home.socket)) < 100
    home.make()
    assert stat.S_IMODE(home.sockets.stat().st_mode) == 0o700
    home.sockets.rmdir()


def test_a_caller_that_speaks_nonsense_is_cut_off_and_nobody_else(agent: AgentClient) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(Home(agent.root).socket))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(10)
        assert stranger.recv(100) == b""
    assert agent.ok("facts")["hostname"]


def test_a_request_that_makes_no_sense_is_refused_and_the_next_one_answered(agent: AgentClient) -> None:
    assert agent.refused("launch", job="j")["kind"] == "request"
    assert agent.refused("teleport")["kind"] == "verb"
    assert agent.ok("facts")["hostname"]


def test_nothing_is_answered_before_hello(connect: Connect) -> None:
    assert connect(hello=False).refused("facts")["kind"] == "hello"


def test_another_protocol_is_refused_with_both_versions(connect: Connect) -> None:
    agent = connect(hello=False)
    refused = agent.refused("hello", **{**agent.identity(), "protocol": 99})
    assert refused == {"kind": "protocol", "message": "the agent speaks protocol 1, the daemon 99"}


def test_logs_are_pulled_by_offset_until_they_are_done(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", "echo first; while [ ! -e go ]; do sleep 0.02; done; echo second"])
    pull = {"job": "j", "attempt": 1, "rank": 0}
    wait_until(agent.log, "the first line")
    first = agent.ok("logs", **pull, offset=0, limit=3)
    assert first == {"data": b"fir", "offset": 3, "size": 6, "done": False}
    rest = agent.ok("logs", **pull, offset=3, limit=100)
    assert rest == {"data": b"st\n", "offset": 6, "size": 6, "done": False}
    (Home(agent.root).attempt("j", 1) / "work" / "go").touch()
    agent.event("rank_exited")
    assert agent.ok("logs", **pull, offset=6, limit=4) == {"data": b"seco", "offset": 10, "size": 13, "done": False}
    assert agent.ok("logs", **pull, offset=10, limit=4) == {"data": b"nd\n", "offset": 13, "size": 13, "done": True}
    assert agent.ok("logs", **pull, offset=99, limit=4) == {"data": b"", "offset": 99, "size": 13, "done": True}


def test_progress_is_reported_and_pulled(connect: Connect) -> None:
    agent = connect()
    script = (
        """echo '{"step":1,"loss":2.5,"time_s":0.1,"samples":16,"at_s":1.0,"plan":"dp=2"}' > ../steps.jsonl;"""
        """while [ ! -e go ]; do sleep 0.02; done;"""
        """printf '{"step":2,"loss":2.0,"time_s":0.2,"samples":16,"at_s":2.0,"plan":"dp=2"}\\n{"st' >> ../steps.jsonl"""
    )
    agent.launch(["sh", "-c", script])
    first = agent.event("progress")
    assert (first["step"], first["loss"], first["step_time_s"], first["samples"]) == (1, 2.5, 0.1, 16)
    (Home(agent.root).attempt("j", 1) / "work" / "go").touch()
    agent.event("rank_exited")
    # The last step is told before the end, and a line that is not written to its end is none.
    assert agent.event("progress")["step"] == 2
    pulled = agent.ok("steps", job="j", attempt=1, offset=0, limit=1 << 20)
    assert pulled["data"].count(b"\n") == 2
    assert pulled["done"]


def test_facts_describe_this_machine(agent: AgentClient) -> None:
    facts = agent.ok("facts")
    assert facts["cpu_cores"] >= 1
    assert 0 < facts["memory_available_bytes"] <= facts["memory_bytes"]
    assert {"interface": "lo", "address": "127.0.0.1"} in facts["addresses"]
    assert facts["disk_free_bytes"] > 0
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    """Leases of an agent without anything else of it."""
    opened = Ports(tmp_path / "ports.json")
    yield opened
    opened.close()


def test_a_port_is_leased_once_even_by_two_agents(agent: AgentClient, ports: Ports) -> None:
    leased = [agent.ok("port", job="j", attempt=1, generation=1)["port"] for _ in range(3)]
    assert len(set(leased)) == 3
    ports.begin_at(leased[0])
    assert ports.lease("k.1", 1) not in leased
    agent.ok("forget", job="j", attempt=1)


def test_leases_are_kept_over_the_agents_death(ports: Ports, tmp_path: Path) -> None:
    port = ports.lease("j.1", 1)
    ports.close()
    again = Ports(tmp_path / "ports.json")
    again.begin_at(port)
    assert again.lease("j.1", 1) != port
    again.release(lambda name, generation, _age_s: (name, generation) == ("j.1", 1))
    again.begin_at(port)
    assert again.lease("k.1", 1) == port
    again.close()


def test_a_port_in_use_is_not_leased(ports: Ports) -> None:
    free = ports.lease("j.1", 1)
    ports.release(lambda *_: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free))
        ports.begin_at(free)
        assert ports.lease("j.1", 1) != free


def test_a_snapshot_is_run_in_a_copy_of_its_own(agent: AgentClient, tmp_path: Path) -> None:
    digest, data = tar_of({"train.sh": b"cat data; echo changed > data; echo made > new"}, {"data": b"original\n"})
    assert agent.ok("snapshot_has", digest=digest) == {"have": False}
    assert agent.refused("launch", **launch(["sh", "train.sh"], snapshot=digest))["kind"] == "snapshot"
    half = len(data) // 2
    agent.ok("snapshot_put", digest=digest, offset=0, data=data[:half], last=False)
    agent.ok("snapshot_put", digest=digest, offset=half, data=data[half:], last=True)
    assert agent.ok("snapshot_has", digest=digest) == {"have": True}
    for job in ("first", "second"):
        agent.launch(["sh", "train.sh"], job=job, snapshot=digest)
        assert agent.event("rank_exited", job=job)["exit_code"] == 0
        assert agent.log(job=job) == "original\n"


def test_ranks_of_one_attempt_end_one_by_one(agent: AgentClient) -> None:
    agent.launch(
        ["sh", "-c", "[ $RANK = 0 ] || while [ ! -e go ]; do sleep 0.02; done"], ranks=[rank(0, 2), rank(1, 2)]
    )
    agent.event("rank_exited", rank=0)
    assert [r["state"] for r in agent.hello()["attempts"][0]["ranks"]] == ["exited", "running"]
    (Home(agent.root).attempt("j", 1) / "work" / "go").touch()
    agent.event("rank_exited", rank=1)
