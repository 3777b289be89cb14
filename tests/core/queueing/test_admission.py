"""Hosts that a job may use, by its request and by what they have, for starts and migrations alike."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import events as e
from clusterd.core.booked import Booked
from clusterd.core.queueing.admission import find_devices
from clusterd.errors import UsageError
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobKind
from clusterd.units import compact_devices
from tests.core.conftest import GIB, Lab
from tests.core.lifecycle.test_trials import running


def test_a_drain_does_not_take_a_job_where_it_may_not_be(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    job = running(lab, devices=2, hosts=(HostId("a"),))
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), why="a fan"))
    assert lab.attempt(job).migration is None
    assert lab.why(job) == "a is drained (a fan): it stays there until devices are free elsewhere, or its end"
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("a")))
    assert "drained" not in lab.why(job)


@pytest.mark.parametrize("what", [{"memory_bytes": 200 * GIB}, {"cpus": 30}])
def test_a_drain_does_not_crowd_a_host(lab: Lab, what: dict[str, int]) -> None:
    """Two jobs that each want most of a host's memory, or cores, do not run on one."""
    lab.host("a", gpus=4)
    job = running(lab, devices=2, **what)
    lab.host("b", gpus=4)
    other, _ = lab.submit(devices=1, hosts=(HostId("b"),), **what)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), why="a fan"))
    assert lab.attempt(job).migration is None
    lab.finish(other)
    assert {place.host for place in lab.attempt(job).migration.places} == {"b"}


def test_after_a_loss_a_job_goes_on_where_it_may_be(lab: Lab) -> None:
    for host in ("a", "b", "c"):
        lab.host(host, gpus=2)
    job = running(lab, devices=4, hosts=(HostId("a"), HostId("b")))
    lab.attempt(job).plan = Plan(dp=4)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("b"), why="no answer"))
    for rank in (0, 1):
        lab.tell(e.RankOrphaned(**lab.at(), job=job, attempt=1, generation=1, rank=rank, step=5))
    assert {place.host for place in lab.attempt(job).migration.places} == {"a"}


def test_a_move_by_hand_goes_where_the_job_may_be(lab: Lab) -> None:
    lab.host("a", gpus=1)
    lab.host("b", gpus=2)
    job = running(lab, devices=1, hosts=(HostId("a"),))
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    assert lab.attempt(job).migration is None
    assert "needs 2 devices, 1 are given or free for it" in lab.why(job)


def test_a_job_for_any_devices_takes_the_cpu_devices_of_a_host_with_gpus(lab: Lab) -> None:
    """Two GPUs are too few; their cores and memory are no less free for that."""
    lab.host("a", gpus=2, cpus=4, cores=4)
    job, _ = lab.submit(devices=4)
    assert lab.state(job) == "starting"
    assert {str(device) for device in lab.attempt(job).devices} == {f"a:cpu{i}" for i in range(4)}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"devices": 5}, "asks for 5 devices, the cluster has 2 GPUs and 4 CPU devices"),
        ({"devices": 0, "cpus": 400}, "needs 400 CPU cores; no host has that much: at most 32 CPU cores"),
        ({"devices": 0, "memory_bytes": 900 * GIB}, "needs 1 CPU core and 900 GiB of memory; no host has that much"),
        ({"devices": 2, "cpus": 50}, "needs 25 CPU cores beside each of 2 devices; no host has that much"),
        ({"devices": 0, "cpus": 40, "nodes": 2}, "needs 20 CPU cores; fewer than 2 hosts have that much: at most 32"),
    ],
)
def test_what_no_host_can_ever_serve_is_said(lab: Lab, what: dict[str, int], why: str) -> None:
    lab.host("a", gpus=2, cpus=4)
    job, _ = lab.submit(**what)
    assert lab.state(job) == "queued"
    assert why in lab.why(job)


def test_a_command_without_devices_takes_cores_and_memory_of_each_of_its_nodes(lab: Lab) -> None:
    for host in ("a", "b", "c"):
        lab.host(host, gpus=0, cpus=0, cores=8)
    other, _ = lab.submit(devices=0, cpus=6, hosts=(HostId("a"),))
    pair, _ = lab.submit(devices=0, nodes=2, cpus=12, memory_bytes=8 * GIB)
    lab.run(other)
    lab.run(pair)
    assert lab.attempt(pair).booked == Booked({"b": 6, "c": 6}, {"b": 4 * GIB, "c": 4 * GIB})
    waits, _ = lab.submit(devices=0, nodes=3, cpus=9)
    assert lab.why(waits) == "waits for 3 free CPU cores on each of 3 hosts"
    lab.finish(other)
    lab.finish(pair)
    assert sorted(lab.attempt(waits).hosts) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"devices": 3, "hosts": "a"}, "asks for 3 devices, its hosts (a) have 2 GPUs and 0 CPU devices"),
        (
            {"devices": 3, "hosts": "ab"},
            "on one host (see --nodes); none of its hosts (a, b) has more than 2",
        ),
        ({"devices": 0, "cpus": 20, "hosts": "a"}, "needs 20 CPU cores; none of its hosts (a) has that much"),
    ],
)
def test_a_job_for_hosts_of_its_own_is_told_what_these_have(lab: Lab, what: dict[str, Any], why: str) -> None:
    """Regression: the message spoke of the cluster, in which another host has more devices."""
    for name, gpus, cores in (("a", 2, 8), ("b", 2, 8), ("c", 8, 64)):
        lab.host(name, gpus=gpus, cores=cores)
    job, _ = lab.submit(**{**what, "hosts": tuple(map(HostId, what["hosts"]))})
    assert why in lab.why(job)


def test_a_job_of_several_sizes_waits_for_the_least_on_any_hosts(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    other, _ = lab.submit(devices=2)
    plans = (Plan(dp=4), Plan(dp=3))
    job, _ = lab.submit(devices=4, plans=plans, kind=JobKind.CHECKPOINTABLE)
    assert lab.why(job) == "waits for 3 free devices (with their cores and memory)"
    lab.finish(other)
    assert lab.attempt(job).plan == Plan(dp=4)


def test_a_host_that_was_not_drained_is_not_in_use_again(lab: Lab) -> None:
    """Regression: `why` said so of every job there, in the place of the reason of its start."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    before = lab.why(job)
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("a"), by="ann"))
    assert lab.why(job) == before != ""
    told = []
    for kind in (e.HostDrained, e.HostUndrained):
        lab.tell(kind(**lab.at(), host=HostId("a"), by="ann"))
        told.append(lab.why(job))
    assert told == ["a is drained (by ann): it stays there until its end", before]


def test_devices_are_named_as_they_are_shown(lab: Lab) -> None:
    lab.host("a", gpus=6)
    devices = find_devices(lab.scheduler.state, "a")
    assert len(devices) == 6
    assert find_devices(lab.scheduler.state, compact_devices(devices)) == devices
    for text in ("a:gpu0-2,5", "a:0-2,5", "a:gpu0,1,2,gpu5"):
        assert find_devices(lab.scheduler.state, text) == ["a:gpu0", "a:gpu1", "a:gpu2", "a:gpu5"]
    for text, part in (("a:gpu9", "gpu9"), ("a:gpu4-6", "gpu4-6"), ("a:2-1", "2-1"), ("a:", None), ("a:x-y", "x-y")):
        if part is None:
            assert find_devices(lab.scheduler.state, text) == devices
            continue
        with pytest.raises(UsageError, match=f"a has no device '{part}': there are a:gpu0, a:gpu1"):
            find_devices(lab.scheduler.state, text)
    with pytest.raises(UsageError, match="there is no host 'b'"):
        find_devices(lab.scheduler.state, "b:gpu0")
