"""The daemon's memory stays bounded, whatever its clients send or leave unread."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from clusterd import protocol
from clusterd.core.state import State
from clusterd.daemon.access import Access, Peer
from clusterd.daemon.api import memory
from clusterd.daemon.api.server import Server
from clusterd.errors import UsageError
from tests.agent.server.test_memory_limits import MEBIBYTE, peak_bytes, send_until_blocked
from tests.conftest import RunningCluster

SPEC = {"name": "x", "command": ["true"], "env": {f"LARGE{n}": "x" * 100_000 for n in range(5)}}


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Socket paths are at most 108 bytes long."""
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/tmp") as name:
        yield Path(name)


def connected(cluster: RunningCluster, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.settimeout(30)
    client.connect(str(cluster.socket))
    return client


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("length", "clients"), [(63 * MEBIBYTE, 6), (MEBIBYTE, 100)], ids=["beyond what a request may have", "within it"]
)
def test_large_requests_that_are_sent_by_half(cluster: RunningCluster, length: int, clients: int) -> None:
    """40 of them took the daemon to gigabytes."""
    cluster.start()
    before = peak_bytes(cluster.pid)
    with ExitStack() as stack:
        for _ in range(clients):
            client = connected(cluster, stack)
            client.sendall(length.to_bytes(4, "big"))
            send_until_blocked(client, b"x" * MEBIBYTE, length - MEBIBYTE // 8, quiet_s=0.1)
        assert cluster.call("status")["jobs"] == {}
        assert peak_bytes(cluster.pid) - before < 64 * MEBIBYTE


@pytest.mark.slow
def test_answers_that_nobody_reads(cluster: RunningCluster) -> None:
    """Three connections with 500 large answers each took 1.5 GB."""
    cluster.start()
    job = cluster.call("submit", spec=SPEC, secrets={})["id"]
    cluster.call("job", job=job)
    before = peak_bytes(cluster.pid)
    with ExitStack() as stack:
        for _ in range(3):
            client = connected(cluster, stack)
            send_until_blocked(client, protocol.encode({"id": 1, "verb": "job", "job": job}), 30_000)
        assert cluster.call("job", job=job)["id"] == job
        assert peak_bytes(cluster.pid) - before < 128 * MEBIBYTE


@pytest.mark.anyio
async def test_requests_of_who_does_not_read_wait_as_bytes(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each waited as a task; given up, they and their answers were kept until the collector came by."""
    made = 0
    collected = anyio.Event()

    async def status(peer: Peer) -> str:
        nonlocal made
        made += 1
        return "x" * 600_000 if made > 1 else ""

    monkeypatch.setattr(memory, "LOST_BYTES_MAX", 0)
    monkeypatch.setattr(memory, "COLLECT_AFTER_S", 0.0)
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=collected.set))
    server = Server(short_directory / "s", None, Access(State), {"status": status, "hello": hello}, {})
    async with anyio.create_task_group() as tasks, await server.listen() as listener:
        tasks.start_soon(server.serve, listener)
        async with await anyio.connect_unix(short_directory / "s") as deaf:
            for number in range(400):
                await deaf.send(protocol.encode({"id": number, "verb": "status"}))
            async with await anyio.connect_unix(short_directory / "s") as other:
                for number in range(200):
                    await other.send(protocol.encode({"id": number, "verb": "hello"}))
                    assert b"here" in await other.receive()
            assert made < 5
            assert len(asyncio.all_tasks()) < 50
        await collected.wait()
        tasks.cancel_scope.cancel()


async def hello(peer: Peer) -> str:
    return "here"


@pytest.mark.slow
def test_many_large_answers_are_read_by_a_client_that_reads(cluster: RunningCluster) -> None:
    """However many it asked for at once."""
    cluster.start()
    job = cluster.call("submit", spec=SPEC, secrets={})["id"]
    with cluster.client() as client:
        answers = client.call_many("job", ({"job": job} for _ in range(600)))
    assert len(answers) == 600 and all(row["spec"]["env"] == SPEC["env"] for row in answers[:3])


def test_a_request_that_is_too_long_is_refused_in_words(cluster: RunningCluster) -> None:
    cluster.start()
    with pytest.raises(UsageError, match=r"submit: a request of 2000\d+ bytes is longer than 1114112"):
        cluster.call("submit", spec={**SPEC, "env": {"LARGE": "x" * 2_000_000}}, secrets={})
    assert cluster.call("status")["jobs"] == {}
