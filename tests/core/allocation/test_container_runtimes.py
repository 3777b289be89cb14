"""Hosts with and without the runtime of a job's container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterd.core import events as e
from clusterd.core.allocation.requirements import misfit
from clusterd.types import HostId, JobState
from tests.core.conftest import Lab


def report(lab: Lab, host: str, runtimes: dict[str, str]) -> None:
    """The agent of a host connects again, with these runtimes."""
    known = lab.scheduler.state.hosts[HostId(host)].facts
    assert known is not None
    facts: Any = replace(known, runtimes=runtimes)
    lab.tell(e.HostChanged(**lab.at(), host=HostId(host), facts=facts))


def test_a_job_starts_where_its_runtime_is() -> None:
    lab = Lab()
    for name in "abc":
        lab.host(name, gpus=1)
    report(lab, "b", {"docker": "permission denied"})
    report(lab, "c", {"docker": "", "podman": ""})
    job, _ = lab.submit(container="docker:image")
    assert lab.attempt(job).hosts == (HostId("c"),)
    known = lab.scheduler.state
    assert misfit(known.jobs[job], known.hosts[HostId("a")]) == "a has no docker"
    refused = misfit(known.jobs[job], known.hosts[HostId("b")])
    assert refused == "docker on b cannot be used: permission denied"


def test_a_job_waits_until_a_host_has_its_runtime() -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(container="podman:image")
    waiting = lab.scheduler.state.jobs[job]
    assert waiting.state is JobState.QUEUED
    assert "asks for a container of podman, which no host can run (a has no podman)" in waiting.reason
    report(lab, "a", {"podman": ""})
    assert lab.attempt(job).hosts == (HostId("a"),)
