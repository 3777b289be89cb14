"""Migrations that a user requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from clusterd.core import events as e
from clusterd.daemon.access import Peer
from clusterd.daemon.api.migration import MigrationVerbs
from clusterd.errors import ClusterError
from clusterd.types import HostId, JobKind
from tests.core.conftest import Lab, facts
from tests.plans.test_reshard import gpt


def mixed_lab() -> tuple[Lab, str]:
    """Two A100 of one host and two H100 of another, and an elastic job on one of them."""
    lab = Lab()
    for host, name in (("a", "A100"), ("b", "H100")):
        lab.tell(e.HostAdded(**lab.at(), host=HostId(host)))
        found = facts(host, gpus=2)
        named = replace(found, devices=tuple(replace(device, name=name) for device in found.devices))
        lab.tell(e.HostConnected(**lab.at(), host=HostId(host), facts=named, attempts=()))
    job, _ = lab.submit(kind=JobKind.ELASTIC, user="u")
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={**gpt().to_dict(), "steps": 1000}, model="m"))
    lab.run(job)
    return lab, job


def asked(lab: Lab, job: str, plan: str, devices: str) -> dict[str, Any]:
    """Reply of `clusterd migrate --dry-run`."""
    by_hand = MigrationVerbs(
        cast(Any, SimpleNamespace(scheduler=lab.scheduler, state=lab.scheduler.state)), cast(Any, None), cast(Any, None)
    )
    peer = Peer(user="u", uid=1000, is_operator=False)
    return anyio.run(partial(by_hand.migrate, peer, job, plan=plan, devices=devices.split(), dry_run=True))


def test_tensors_are_not_cut_across_types_of_gpus() -> None:
    """Each shard draws the dropout of what all of them hold, and types draw by their number of multiprocessors."""
    lab, job = mixed_lab()
    with pytest.raises(ClusterError, match="cuts tensors across A100 and H100"):
        asked(lab, job, "tp=2", "a:gpu0 b:gpu0")
    with pytest.raises(ClusterError, match="A100 and H100"):
        asked(lab, job, "dp=2,tp=2", "a:gpu0 b:gpu0 a:gpu1 b:gpu1")


@pytest.mark.parametrize(
    ("plan", "devices"),
    [("tp=2", "b:gpu0 b:gpu1"), ("dp=2,tp=2", "a:gpu0 a:gpu1 b:gpu0 b:gpu1"), ("dp=2", "a:gpu0 b:gpu0")],
)
def test_replicas_may_be_on_several(plan: str, devices: str) -> None:
    lab, job = mixed_lab()
    assert asked(lab, job, plan, devices).job == job
