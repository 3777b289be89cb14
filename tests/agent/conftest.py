"""Agents that live for one test; nothing of them remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import AgentClient, end_all

STAND_IN = Path(__file__).parent / "standin"
"""A directory with a module to be preloaded in place of torch: it loads in no time."""


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., AgentClient]]:
    """Opens connections to this test's agent; the first starts it."""
    root = tmp_path / "agent"
    opened: list[AgentClient] = []

    def open_one(hello: bool = True, epoch: int = 1, **more: Any) -> AgentClient:
        client = AgentClient(root, **more)
        opened.append(client)
        if hello:
            client.hello(epoch)
        return client

    yield open_one
    end_all(root)
    for client in opened:
        client.close()


@pytest.fixture
def agent(connect: Callable[..., AgentClient]) -> AgentClient:
    """A connected agent that has nothing to do yet."""
    return connect()


@pytest.fixture
def standin_agent(connect: Callable[..., AgentClient]) -> AgentClient:
    """A connected agent whose fork servers import `preloaded_standin` in place of torch."""
    return connect(env={"CLUSTERD_PRELOAD": "preloaded_standin", "PYTHONPATH": str(STAND_IN)})
