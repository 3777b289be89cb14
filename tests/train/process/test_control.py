"""Control channel between a rank and its agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_double import HostAgent, Network

from clusterd.train.process import control
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[HostAgent]:
    agent = HostAgent("here", tmp_path, Network())
    yield agent
    agent.close()


def test_a_rank_that_fails_at_once_is_heard_before_it_ends(agent: HostAgent) -> None:
    """Some failures occur before the rank is connected."""
    line = Control(Context(control_socket=str(agent.path), generation=1))
    line.start()
    line.report_failure("plan", "checkpoints cannot be written")
    said = [message["message"] for _, _, message in agent.heard if message.get("verb") == "failed"]
    assert said == ["checkpoints cannot be written"]
    line.close()


@pytest.mark.parametrize("socket", ["", "gone.sock"])
def test_a_rank_that_nobody_hears_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: str
) -> None:
    monkeypatch.setattr(control, "FAILURE_REPORT_S", 0.1)
    line = Control(Context(control_socket=socket and str(tmp_path / socket)))
    line.start()
    line.report_failure("plan", "checkpoints cannot be written")
    line.close()
