"""Hosts are removed while in use, twice, or before they are mentioned again."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import HostId, HostState, JobKind
from tests.core.conftest import Lab

A, B = HostId("a"), HostId("b")


def test_a_host_that_was_given_work_meanwhile_stays(lab_with_two_hosts: Lab) -> None:
    """The removal was requested while the host was idle; the restarted daemon completes it once the host is free."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(hosts=(A,))
    lab.tell(e.HostRemoved(**lab.at(), host=A))
    lab.run(job)
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    assert lab.scheduler.state.hosts[A].state is HostState.CONNECTING
    lab.finish(job)
    assert lab.state(job) == "finished"
    lab.tell(e.HostRemoved(**lab.at(), host=A))
    assert list(lab.scheduler.state.hosts) == [B]


def test_a_state_without_a_host_in_use_recovers(lab_with_two_hosts: Lab) -> None:
    """States of earlier versions lack the host: it is declared lost like any other, and the job is requeued."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(devices=2)
    lab.run(job)
    assert lab.attempt(job).hosts == (A,)
    del lab.scheduler.state.hosts[A]
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    lab.connect("b")
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    assert lab.attempt(job).hosts == (B,)
    lab.tell(e.HostRemoved(**lab.at(), host=A))
    assert list(lab.scheduler.state.hosts) == [B]


def test_a_model_that_was_to_be_told_there_is_told_elsewhere(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    _, decided = lab.submit(kind=JobKind.ELASTIC)
    assert [x.host for x in decided if isinstance(x, d.DescribeModel)] == [A]
    decided = lab.tell(e.HostRemoved(**lab.at(), host=A))
    assert [x.host for x in decided if isinstance(x, d.DescribeModel)] == [B]


@pytest.mark.parametrize(
    ("kind", "what"), [(e.HostRemoved, {}), (e.HostDrained, {"why": "fans", "by": "ann"}), (e.HostUndrained, {})]
)
def test_what_is_said_of_a_host_that_is_gone_is_nothing(
    lab_with_two_hosts: Lab, kind: type[Any], what: dict[str, str]
) -> None:
    """Two take it out at once, or one takes it out while another drains it."""
    lab = lab_with_two_hosts
    lab.tell(e.HostRemoved(**lab.at(), host=A), kind(**lab.at(), host=A, **what))
    job, _ = lab.submit()
    assert lab.attempt(job).hosts == (B,)
