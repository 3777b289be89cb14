"""The agent's memory stays bounded, whatever its peers send or leave unread."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterd import protocol
from tests.agent.client import AgentClient
from tests.agent.server.test_authentication import place

Connect = Callable[..., AgentClient]

MEBIBYTE = 1 << 20


def peak_bytes(pid: int) -> int:
    """Most memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def send_until_blocked(connection: socket.socket, data: bytes, most: int, quiet_s: float = 3.0) -> int:
    """Send `data` over and over until the peer takes no more, or has taken `most` bytes; returns how many it took."""
    connection.setblocking(False)
    sent = 0
    view = memoryview(data)
    while sent < most and select.select([], [connection], [], quiet_s)[1]:
        try:
            sent += connection.send(view[sent % len(data) :][: most - sent])
        except BlockingIOError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
    return sent


@pytest.mark.slow
def test_a_chatty_rank_and_a_daemon_that_does_not_read(agent: AgentClient) -> None:
    """Regression: the agent's memory grew to gigabytes and was never freed."""
    agent.launch(["sleep", "100"])
    before = peak_bytes(agent.agent_pid)
    mine = place(agent, "j")
    hello = {name: mine[name] for name in ("job", "attempt", "generation", "rank", "token")}
    said = protocol.encode({"event": "said", "said": {"what": "failed", "id": "x", "why": "x" * 100_000}})
    with socket.socket(socket.AF_UNIX) as chatty:
        chatty.connect(mine["control_socket"])
        chatty.sendall(protocol.encode({"verb": "rank_hello", **hello}))
        taken = send_until_blocked(chatty, said, 400 * MEBIBYTE)
    assert peak_bytes(agent.agent_pid) - before < 64 * MEBIBYTE, f"{taken} bytes were taken"
    assert agent.ok("facts")["hostname"]


def test_ranks_that_send_half_of_large_frames(agent: AgentClient) -> None:
    agent.launch(["sleep", "100"])
    before = peak_bytes(agent.agent_pid)
    mine = place(agent, "j")
    hello = {name: mine[name] for name in ("job", "attempt", "generation", "rank", "token")}
    half = protocol.encode({"verb": "publish", "name": "j.1.2.out0", "meta": {"x": bytes(7 * MEBIBYTE)}})[:-1]
    opened = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for connection in opened:
            connection.connect(mine["control_socket"])
            connection.sendall(protocol.encode({"verb": "rank_hello", **hello}))
        for connection in opened:
            connection.setblocking(False)
            sent = 0
            # Those beyond the budget are not read from.
            while sent < len(half) and select.select([], [connection], [], 0.1)[1]:
                sent += connection.send(half[sent : sent + MEBIBYTE])
        assert peak_bytes(agent.agent_pid) - before < 96 * MEBIBYTE
        assert agent.ok("facts")["hostname"]
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.slow
def test_a_daemon_that_asks_for_much_and_reads_late(agent: AgentClient) -> None:
    """All answers come in the end, and wait on the disk until then."""
    agent.launch(["sh", "-c", f"head -c {4 * MEBIBYTE} /dev/zero"])
    agent.event("rank_exited")
    before = peak_bytes(agent.agent_pid)
    pull = {"job": "j", "attempt": 1, "rank": 0, "offset": 0, "limit": 4 * MEBIBYTE}
    numbers = [agent.send("logs", **pull) for _ in range(24)]
    for number in numbers:
        assert len(agent.reply(number)["ok"]["data"]) == 4 * MEBIBYTE
    assert peak_bytes(agent.agent_pid) - before < 64 * MEBIBYTE


def test_peers_that_do_not_say_who_they_are(agent: AgentClient) -> None:
    """A large frame is not taken from them, and the oldest of many give way."""
    sockets = [Path(place_of) for place_of in (agent.root / "daemon.sock", agent.root / "agent.sock")]
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(30)
            stranger.connect(str(path))
            stranger.sendall((8192).to_bytes(4, "big") + b"x" * 100)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
    opened = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for connection in opened:
            connection.connect(str(sockets[0]))
        opened[0].settimeout(30)
        assert opened[0].recv(1) == b""
        assert agent.hello()["attempts"] == []
    finally:
        for connection in opened:
            connection.close()
