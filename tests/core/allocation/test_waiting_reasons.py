"""Reasons of waiting name events that can happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import HostFacts, HostId, JobId, JobKind, JobSpec, Resources
from tests.core.conftest import GIB, Lab
from tests.core.placement.test_mixed_devices import MixedLab
from tests.core.placement.test_mixed_devices import known as known_of
from tests.core.policies.test_default import known


def submit(lab: Lab, **resources: Any) -> JobId:
    """A job of a model that is fastest on all eight GPUs of a host."""
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    job = JobId("1")
    spec = JobSpec(name="net", kind=JobKind.ELASTIC, command=("x",), resources=Resources(**resources))
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 1000}
    lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=shape, model="net"))
    return job


@pytest.mark.parametrize(
    ("beside", "devices"),
    [({"cpus": 2}, 8), ({"cpus": 13}, 4), ({"memory_bytes": 100 * GIB}, 2), ({"memory_bytes": 60 * GIB}, 4)],
)
def test_a_size_for_which_cores_or_memory_lack_is_not_waited_for(
    lab: Lab, beside: dict[str, int], devices: int
) -> None:
    """Eight devices are free, and never more than some of them with that much beside each."""
    lab.host("a", gpus=8, cores=64)
    job = submit(lab, devices=1, **beside)
    assert len(lab.attempt(job).devices) == devices


def test_devices_of_hosts_that_a_job_may_not_have_are_not_waited_for(lab: Lab) -> None:
    lab.host("a", gpus=4)
    lab.host("b", gpus=8)
    job = submit(lab, devices=1, hosts=(HostId("a"),))
    assert {str(device) for device in lab.attempt(job).devices} == {f"a:gpu{i}" for i in range(4)}


@pytest.mark.parametrize("restriction", [{"hosts": (HostId("old0"),)}, {"cpus": 40}])
def test_a_faster_type_that_a_job_may_not_have_is_not_waited_for(restriction: dict[str, Any]) -> None:
    """Those hosts are excluded for the job, or lack cores: it gets one slow device."""
    lab = MixedLab({"new": [2], "old": [1]})
    lab.tell(e.HostConnected(**lab.at(), host=HostId("new0"), facts=_of_few_cores(lab, "new0")))
    job, _ = lab.net("net", 1000, **restriction)
    assert lab.state(job) == "starting", lab.why(job)
    assert lab.attempt(job).hosts == (HostId("old0"),)


def test_a_promise_is_of_a_shape_that_there_is() -> None:
    """The speed estimate for four devices on one host comes from a host that is gone."""
    lab = MixedLab({"new": [2, 2]}, known_of({"new": [4, 2, 2]}))
    job, _ = lab.net("net", 1000, devices=4, guaranteed=True)
    assert lab.state(job) == "starting", lab.why(job)
    assert len(lab.attempt(job).devices) == 4


def _of_few_cores(lab: MixedLab, host: str) -> HostFacts:
    facts = lab.scheduler.state.hosts[HostId(host)].facts
    assert facts is not None
    return replace(facts, cpu_cores=32)


def test_a_job_says_of_each_host_why_it_waits_for_it(lab: Lab) -> None:
    """Regression: the message said that no host was usable, without naming hosts and reasons."""
    for name in "abcde":
        lab.host(name, gpus=1)
        lab.tell(e.HostDrained(**lab.at(), host=HostId(name)))
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("b"), why="no route"))
    job, _ = lab.submit()
    assert lab.why(job) == "waits for a host: a is drained, b is unreachable, c is drained and 2 more are no better"


@pytest.mark.parametrize("kind", [JobKind.CHECKPOINTABLE, JobKind.COMMAND])
def test_a_job_gets_no_fewer_devices_than_it_asks_for(lab: Lab, kind: JobKind) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=1)
    job, decided = lab.submit(devices=4, kind=kind)
    assert d.LaunchAttempt.match(decided) is None
    assert lab.state(job) == "queued"
    decided = lab.host("c", gpus=4)
    launch = d.LaunchAttempt.match(decided)
    assert launch is not None and {rank.host for rank in launch.ranks} == {HostId("c")}
    assert len(lab.attempt(job).devices) == 4
