"""Daemons must prove their cluster's key to an agent; ranks speak for themselves only."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterd import protocol
from clusterd.agent.host.home import Home
from tests.agent.client import AgentClient, rank

Connect = Callable[..., AgentClient]


class Process:
    """A process of a job that talks to one of the agent's sockets."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._decoder = protocol.Decoder()

    def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The reply; {} where the agent hung up."""
        self._socket.sendall(protocol.encode({"id": 1, "verb": verb, **arguments}))
        while data := self._socket.recv(1 << 16):
            for message in self._decoder.feed(data):
                if message.get("id") == 1:
                    return message
        return {}

    def event(self, name: object, **fields: Any) -> None:
        self._socket.sendall(protocol.encode({"event": name, **fields}))

    def close(self) -> None:
        self._socket.close()


def place(agent: AgentClient, job: str, number: int = 0) -> dict[str, Any]:
    """Contents of the rank file."""
    values: dict[str, Any] = json.loads((Home(agent.root).attempt(job, 1) / f"rank-{number}.json").read_text())
    return values


def as_rank(agent: AgentClient, job: str, number: int = 0, token_of: int | None = None) -> tuple[Process, Any]:
    """A process of that rank, and the reply to its hello."""
    mine = place(agent, job, number)
    process = Process(Path(mine["control_socket"]))
    token = place(agent, job, number if token_of is None else token_of)["token"]
    named = {name: mine[name] for name in ("job", "attempt", "generation", "rank")}
    return process, process.request("rank_hello", **named, token=token)


def running(agent: AgentClient) -> dict[str, str]:
    return {report["job"]: report["ranks"][0]["state"] for report in agent.hello()["attempts"]}


@pytest.mark.parametrize("socket_of", ["ranks", "daemons"])
def test_a_job_cannot_stop_another_job_or_lock_the_daemon_out(agent: AgentClient, socket_of: str) -> None:
    """Regression: a job sent a hello with a huge epoch, could stop other jobs, and locked the real daemon out."""
    agent.launch(["sleep", "100"], job="victim")
    path = Path(place(agent, "victim")["control_socket"]) if socket_of == "ranks" else Home(agent.root).socket
    stop = {"job": "victim", "attempt": 1, "generation": 1, "grace_s": 0.0, "reason": "x"}
    hello = {"protocol": protocol.VERSION, "daemon": "test", "epoch": 1 << 40}
    for greeting in ({}, hello, {**hello, "proof": "0" * 64}):
        process = Process(path)
        if greeting:
            assert "error" in process.request("hello", **greeting)
        assert "error" in process.request("stop", **stop)
        assert "error" in process.request("shutdown", force=True)
        process.close()
    assert running(agent) == {"victim": "running"}


def test_a_rank_speaks_for_itself_only(agent: AgentClient) -> None:
    """A rank's token is valid for that rank only; segments and migrations of other jobs are refused."""
    agent.launch(["sleep", "100"], job="mine", ranks=[rank(0, 2), rank(1, 2)])
    agent.launch(["sleep", "100"], job="other")
    process, wrong = as_rank(agent, "mine", 0, token_of=1)
    assert wrong["error"]["kind"] == "token"
    assert process.request("stop", job="other", attempt=1, generation=1)["error"]["kind"] == "hello"
    process.close()
    process, right = as_rank(agent, "mine")
    assert right["ok"] == {}
    source = {"name": "other.1.g1.snap0.0", "address": ["127.0.0.1", 1], "ranges": [], "offset": 0, "source": 0}
    for verb, arguments in (
        ("segment", {"name": "other.1.2.out0", "bytes": 10}),
        ("publish", {"name": "other.1.2.out0"}),
        ("segments", {"move": "other.1.2"}),
        ("fetch", {"move": "other.1.2", "name": "mine.1.2.in", "bytes": 10, "sources": []}),
        ("fetch", {"move": "mine.1.2", "name": "mine.1.2.in", "bytes": 10, "sources": [source]}),
    ):
        assert process.request(verb, **arguments)["error"]["kind"] == "foreign", verb
    assert process.request("stop", job="other", attempt=1, generation=1)["error"]["kind"] == "verb"
    assert "ok" in process.request("segment", name="mine.1.2.out0", bytes=10)
    process.close()


@pytest.mark.parametrize(
    ("verb", "arguments", "field"),
    [
        ("segment", {"name": 7, "bytes": 10}, "segment.name is int, not str"),
        ("publish", {"name": "mine.1.2.out0", "meta": []}, "publish.meta is list, not a map"),
        (
            "fetch",
            {"move": "mine.1.2", "name": "mine.1.2.in", "bytes": 1, "sources": [{}]},
            "sources[0].name is absent",
        ),
        ("segments", {}, "segments.move is absent"),
        ("rank_hello", {"job": "mine"}, "rank_hello.attempt is absent"),
    ],
)
def test_a_malformed_request_of_a_rank_is_refused_by_its_field(
    agent: AgentClient, verb: str, arguments: dict[str, Any], field: str
) -> None:
    agent.launch(["sleep", "100"], job="mine")
    process, _ = as_rank(agent, "mine")
    refused = process.request(verb, **arguments)["error"]
    assert (refused["kind"], field in refused["message"]) == ("request", True), refused
    process.event({})
    process.event("said", said="stop everything")
    assert "ok" in process.request("segment", name="mine.1.2.out0", bytes=10)
    process.close()
    lines = [line for line in Home(agent.root).log.read_text().splitlines() if "rank 0 of mine.1" in line]
    assert len(lines) == 2 and lines[1].endswith("said.said is str, not a map"), lines
    assert "Traceback" not in Home(agent.root).log.read_text()


def test_a_proof_is_good_for_one_hello(connect: Connect) -> None:
    """Whoever saw one go by cannot show it again, or for another epoch."""
    agent = connect(hello=False)
    seen = agent.identity()
    assert agent.refused("hello", **{**seen, "epoch": 2})["kind"] == "key"
    assert agent.refused("hello", **seen)["kind"] == "key"
    assert agent.hello()["attempts"] == []


def test_a_daemon_of_another_key_is_refused_and_told_what_to_do(connect: Connect) -> None:
    agent = connect()
    other = connect(hello=False)
    refused = other.refused("hello", **other.identity(key="another"))
    assert refused["kind"] == "key"
    assert f"`kill {agent.agent_pid}`" in refused["message"]


def test_the_key_is_in_no_file_argument_or_environment(agent: AgentClient) -> None:
    key = agent.key.encode()
    agent.launch(["sleep", "100"])
    proc = Path(f"/proc/{agent.agent_pid}")
    assert key not in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    assert not [file for file in agent.root.rglob("*") if file.is_file() and key in file.read_bytes()]


def test_an_agent_that_died_gets_the_key_again(connect: Connect) -> None:
    agent = connect()
    agent.launch(["sleep", "100"])
    agent.kill_agent()
    assert running(connect()) == {"j": "running"}


def test_an_implausible_epoch_is_refused(connect: Connect) -> None:
    """One of a daemon whose state is damaged would shut all later ones out; a restored one counts in seconds."""
    agent = connect(epoch=3)
    refused = agent.refused("hello", **agent.identity(epoch=1 << 40))
    assert refused["kind"] == "epoch"
    assert "the newest here is 3" in refused["message"]
    agent.hello(epoch=4)
    agent.hello(epoch=int(time.time()))
    agent.hello(epoch=int(time.time()) + 1)


def test_a_superseded_daemon_is_told_at_once(connect: Connect) -> None:
    old = connect(epoch=1)
    connect(epoch=2)
    assert old.event("superseded")["by"] == 2


def test_a_newer_connection_of_a_daemon_ends_the_one_before(connect: Connect) -> None:
    """After a partition TCP may bring a launch over a connection that its daemon gave up: it must start nothing."""
    old, other = connect(), connect(hello=False)
    other.hello(daemon="of another cluster")
    new = connect()
    with pytest.raises((AssertionError, BrokenPipeError)):
        old.launch(["sleep", "100"])
    assert new.hello()["attempts"] == []
    other.ok("facts")


def test_a_rank_of_an_agent_before_sockets_apart_reaches_its_successor(agent: AgentClient) -> None:
    """Such a rank knows only the path of the single socket that agents used to have."""
    agent.launch(["sleep", "100"])
    assert place(agent, "j")["control_socket"] == str(agent.root / "agent.sock")
    process, answer = as_rank(agent, "j")
    process.close()
    assert "ok" in answer
