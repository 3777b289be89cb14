"""Pauses that do not reach all hosts of a command."""

from __future__ import annotations

from signal import SIGCONT, SIGSTOP
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from clusterd.core.events import Event
from clusterd.daemon.access import Peer
from clusterd.daemon.api.queue import QueueVerbs
from clusterd.errors import ClusterError
from clusterd.ssh.host import AgentRefused
from tests.core.conftest import Lab


class Paused:
    """A command on two hosts, of which the second one answers with `error`, and the signals that the first one got."""

    def __init__(self, error: ClusterError) -> None:
        self.lab, self.sent = Lab(), list[int]()
        self.error: ClusterError | None = error
        for host in ("a", "b"):
            self.lab.host(host, gpus=1)
        self.job, _ = self.lab.submit(nodes=2, devices=2, user="u")
        self.lab.run(self.job)
        engine = SimpleNamespace(scheduler=self.lab.scheduler, state=self.lab.scheduler.state, post=self._post)
        hosts = SimpleNamespace(request=self._request)
        self._verbs = QueueVerbs(cast(Any, engine), cast(Any, hosts), *(cast(Any, None),) * 3)

    async def _request(self, host: str, signal: Any) -> None:
        if host == "b" and self.error is not None:
            raise self.error
        if host == "a":
            self.sent.append(signal.number)

    async def _post(self, event: Event) -> None:
        self.lab.tell(event)

    def call(self, verb: str) -> None:
        """The user's request."""
        anyio.run(getattr(self._verbs, verb), Peer(user="u", uid=1000, is_operator=False), self.job)


def test_a_pause_that_one_host_does_not_hear_of_can_be_undone() -> None:
    """Regression: processes of the other host stood still, the job counted as running, and unpause refused."""
    paused = Paused(ClusterError("b does not answer"))
    with pytest.raises(ClusterError, match=rf"b does not answer: clusterd unpause {paused.job} lets it go on"):
        paused.call("pause")
    assert paused.lab.attempt(paused.job).paused_by == "u"
    paused.error = None
    paused.call("unpause")
    assert paused.sent == [SIGSTOP, SIGCONT]
    assert paused.lab.attempt(paused.job).paused_by is None


def test_a_pause_that_one_agent_refuses_is_none() -> None:
    """As one of an older version: it could not let the job go on either."""
    paused = Paused(AgentRefused("verb", "this agent knows no 'signal'"))
    with pytest.raises(AgentRefused, match="knows no 'signal'"):
        paused.call("pause")
    assert paused.sent == [SIGSTOP, SIGCONT]
    assert paused.lab.attempt(paused.job).paused_by is None
