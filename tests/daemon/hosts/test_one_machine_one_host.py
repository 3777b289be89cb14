"""One machine is one host, whatever names reach it."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.daemon.hosts.links import AgentOwners, agent_identity
from clusterd.errors import HostError
from clusterd.protocol.agent import HelloReply
from clusterd.types import HostId
from tests.core.conftest import Lab, facts

A, B = HostId("a"), HostId("b")


def hello(agent: str = "x", boot: str = "boot", machine: str | None = "boot/1") -> HelloReply:
    """Reply of an agent; those of earlier versions name no machine."""
    return HelloReply(agent, "1", boot, 0.0, {}, (), machine=machine or "")


def test_an_agent_is_one_hosts_until_that_is_removed() -> None:
    agents = AgentOwners([])
    agents.claim(A, agent_identity(hello()))
    agents.claim(A, agent_identity(hello()))
    with pytest.raises(HostError, match=r"it is a under another name \(its agent answers\): clusterd host remove b"):
        agents.claim(B, agent_identity(hello()))
    agents.release(A)
    agents.claim(B, agent_identity(hello()))


def test_an_account_s_agent_is_one_hosts_too() -> None:
    """Two machines may have separate directories of the daemon's account, and one home of everybody else's."""
    agents = AgentOwners([])
    agents.claim(A, agent_identity(hello()))
    agents.claim(B, agent_identity(hello(agent="y")))
    agents.claim(A, agent_identity(hello(agent="z")), "ann")
    with pytest.raises(HostError, match="the agent of ann has one directory with a's: give one of them an agent_home"):
        agents.claim(B, agent_identity(hello(agent="z")), "ann")
    agents.release(A)
    agents.claim(B, agent_identity(hello(agent="z")), "ann")
    agents.claim(A, agent_identity(hello()))


@pytest.mark.parametrize(
    "other",
    [
        hello(agent="y"),  # two users, or two hosts inside one machine
        hello(boot="other", machine="other/1"),  # a cloned home
        hello(machine="boot/2"),  # a container of the same kernel, made from the same image
        hello(boot="other", machine=None),
    ],
)
def test_two_machines_are_never_taken_for_one(other: dict[str, Any]) -> None:
    agents = AgentOwners([])
    agents.claim(A, agent_identity(hello()))
    agents.claim(B, agent_identity(other))


def test_a_name_that_leads_elsewhere_now_leaves_its_machine_to_others() -> None:
    agents = AgentOwners([])
    agents.claim(A, agent_identity(hello()))
    agents.claim(A, agent_identity(hello(agent="y")))
    agents.claim(B, agent_identity(hello()))


def test_the_next_daemon_knows_whose_agent_is_whose() -> None:
    """Else the first to connect would have it, and end what the other runs there."""
    lab = Lab()
    for name in (A, B):
        lab.tell(e.HostAdded(**lab.at(), host=name))
    lab.tell(e.HostConnected(**lab.at(), host=B, facts=facts("b"), agent=agent_identity(hello())))
    known: list[Host] = list(lab.scheduler.state.hosts.values())
    with pytest.raises(HostError, match="it is b under another name"):
        AgentOwners(known).claim(A, agent_identity(hello()))
