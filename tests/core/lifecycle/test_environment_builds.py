"""The build of a job's environment, as a phase of the job."""

from __future__ import annotations

from typing import Any

from clusterd.core import events as e
from clusterd.projection import job_row
from clusterd.types import HostId, JobId, JobState
from tests.core.conftest import Lab


def build(lab: Lab, job: JobId, host: str, kind: Any = e.EnvironmentBuildStarted, **more: Any) -> None:
    attempt = lab.attempt(job)
    lab.tell(kind(**lab.at(), job=job, attempt=attempt.number, generation=1, host=HostId(host), **more))


def test_a_job_says_where_its_environment_is_built_until_that_is_done() -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(requirements="requirements.txt")
    build(lab, job, "a")
    build(lab, job, "a")  # asked again after the daemon restarted: it builds since the first
    row = job_row(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert row.state == "starting"
    assert row.reason.startswith("building its environment on a since ")
    assert row.building == {"a": lab.now_s - 1.0}
    build(lab, job, "a", e.EnvironmentBuilt, seconds=40.0)
    lab.run(job)
    row = job_row(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert row.building == {}
    assert "building" not in row.reason
    assert lab.attempt(job).build_times_s == {"a": 40.0}


def test_a_build_that_is_over_with_its_attempt_is_not_shown() -> None:
    """A failed build ends the job, whatever it may retry; reports that come late change nothing."""
    lab = Lab()
    lab.host("a", gpus=1)
    lab.host("b", gpus=1)
    job, _ = lab.submit(requirements="requirements.txt", retries=3)
    attempt = lab.attempt(job)
    build(lab, job, attempt.hosts[0])
    why = {"host": attempt.hosts[0], "why": "no compiler", "is_infrastructure": False, "is_permanent": True}
    lab.tell(e.LaunchFailed(**lab.at(), job=job, attempt=1, generation=1, **why))
    build(lab, job, attempt.hosts[0])
    lab.stopped(job)
    known = lab.scheduler.state.jobs[job]
    assert known.state is JobState.FAILED
    assert "no compiler" in known.reason
    assert job_row(known, lab.scheduler.state).building == {}
