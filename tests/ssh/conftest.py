"""Hosts inside the test: real SSH servers on loopback with real agents; nothing of them remains."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.hostkeys import HostKeys
from tests.agent.client import end_all
from tests.ssh.servers import Server


@pytest.fixture
def anyio_backend() -> str:
    """The daemon's."""
    return "asyncio"


@pytest.fixture
def keys(tmp_path: Path) -> HostKeys:
    """An empty set of trusted host keys."""
    return HostKeys(tmp_path / "config" / "known_hosts")


@pytest.fixture
def dialer(keys: HostKeys) -> Dialer:
    """Dials as the daemon does."""
    return Dialer(keys)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., Server]]:
    """Starts SSH servers."""
    started: list[Server] = []

    async def start(name: str, **more: object) -> Server:
        server = Server(name, tmp_path / name)
        await server.start(**more)
        started.append(server)
        return server

    yield start  # type: ignore[misc]
    for server in started:
        await server.stop()


@pytest.fixture
def agent_homes() -> Iterator[list[Path]]:
    """Agent directories whose processes end with the test."""
    homes: list[Path] = []
    yield homes
    for home in homes:
        end_all(home)


@pytest.fixture
async def host(tmp_path: Path, agent_homes: list[Path]) -> AsyncIterator[EmbeddedHost]:
    """A started embedded host, its agent not yet."""
    embedded = EmbeddedHost("gpu01", tmp_path / "gpu01")
    agent_homes.append(embedded.agent_home)
    await embedded.start()
    yield embedded
    await embedded.stop()
