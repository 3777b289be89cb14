"""The HTTP server itself, with peers that hold their connections."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus

import anyio
import pytest

from clusterd.daemon.web.pages import ADDRESS, CONNECTIONS_MAX, Answer, HttpServer, Request

pytestmark = pytest.mark.anyio

LARGE = 6 << 20
"""More than the kernel takes for a peer with a small buffer that does not read."""


async def answer(request: Request) -> Answer:
    return Answer(HTTPStatus.OK, b"x" * LARGE if request.path == ("large",) else b"here")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


async def held(port: int, sent: bytes) -> socket.socket:
    """A connection that sends so much, and reads nothing."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.setblocking(False)
    await asyncio.get_running_loop().sock_connect(peer, (ADDRESS, port))
    peer.send(sent)
    return peer


async def get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(ADDRESS, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_held_connections_do_not_starve_the_pages(sent: bytes) -> None:
    """Regression: 64 of them, silent, slow or without interest in the answer, had everybody else refused."""
    server = HttpServer(free_port())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, answer)
        while server.trouble:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        peers = [await held(server.port, sent) for _ in range(CONNECTIONS_MAX)]
        for _ in range(3):
            assert (await get(server.port, "/")).endswith(b"\r\n\r\nhere")
        for peer in peers:
            peer.close()
        tasks.cancel_scope.cancel()
