"""Pauses that do not reach all hosts of a command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from clusterd.core.events import Event
from clusterd.daemon.access import Peer
from clusterd.daemon.api.queue import QueueVerbs
from clusterd.errors import ClusterError
from tests.core.conftest import Lab


def test_a_pause_that_one_host_does_not_hear_of_can_be_undone() -> None:
    """Regression: processes of the other host stood still, the job counted as running, and unpause refused."""
    lab = Lab()
    for host in ("a", "b"):
        lab.host(host, gpus=1)
    job, _ = lab.submit(nodes=2, devices=2, user="u")
    lab.run(job)
    sent: list[tuple[str, int]] = []
    deaf = {"b"}

    async def request(host: str, signal: Any) -> None:
        if host in deaf:
            raise ClusterError(f"{host} does not answer")
        sent.append((host, signal.number))

    async def post(event: Event) -> None:
        lab.tell(event)

    engine = SimpleNamespace(scheduler=lab.scheduler, post=post)
    verbs = QueueVerbs(cast(Any, engine), cast(Any, SimpleNamespace(request=request)), *(cast(Any, None),) * 3)
    peer = Peer(user="u", uid=1000, is_operator=False)
    with pytest.raises(ClusterError, match=rf"b does not answer: clusterd unpause {job} lets it go on"):
        anyio.run(verbs.pause, peer, job)
    deaf.clear()
    anyio.run(verbs.unpause, peer, job)
    assert [(host, number) for host, number in sent if host == "a"] == [("a", 19), ("a", 18)]
    assert lab.attempt(job).paused_by is None
