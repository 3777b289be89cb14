"""Jobs that ask for labels of hosts and for a compute capability of GPUs."""

from __future__ import annotations

import pytest

from clusterd.core.allocation.requirements import misfit, unsatisfiable
from clusterd.core.view import View
from clusterd.types import HostId, JobId
from clusterd.units import has_capability, parse_capability
from tests.core.conftest import Lab


@pytest.fixture
def mixed(lab: Lab) -> Lab:
    """An old host, and a new one with NVLink."""
    lab.host("old", gpus=2, capability="7.5", labels=("rack=a",))
    lab.host("new", gpus=2, capability="9.0", labels=("rack=a", "nvlink"))
    return lab


def hosts_of(lab: Lab, job: JobId) -> set[str]:
    return {str(host) for host in lab.attempt(job).hosts}


def refusal(lab: Lab, job: JobId) -> str | None:
    return unsatisfiable(lab.scheduler.state.jobs[job], View(lab.scheduler.state, lab.now_s))


def test_a_job_runs_on_gpus_of_the_capability_that_it_asks_for(mixed: Lab) -> None:
    jobs = [mixed.submit(f"job{n}", compute_capability=">=8.0", device_kind="cuda")[0] for n in range(3)]
    assert [hosts_of(mixed, job) for job in jobs[:2]] == [{"new"}, {"new"}]
    assert mixed.state(jobs[2]) == "queued", "though the old host is free"
    old, _ = mixed.submit("old", compute_capability="<8")
    assert hosts_of(mixed, old) == {"old"}


def test_a_job_runs_on_hosts_with_all_its_labels(mixed: Lab) -> None:
    jobs = [mixed.submit(f"job{n}", constraint=("nvlink", "rack=a"))[0] for n in range(3)]
    assert [hosts_of(mixed, job) for job in jobs[:2]] == [{"new"}, {"new"}]
    assert mixed.state(jobs[2]) == "queued"
    cores, _ = mixed.submit("cores", devices=0, constraint=("nvlink",))
    assert hosts_of(mixed, cores) == {"new"}


def test_what_no_host_has_is_refused_with_what_there_is(mixed: Lab) -> None:
    job, _ = mixed.submit(compute_capability=">=10", device_kind="cuda")
    assert refusal(mixed, job) == (
        "asks for 1 GPU with compute capability >=10, the cluster has 0; there are cuda (7.5), cuda (9.0)"
    )
    job, _ = mixed.submit(constraint=("infiniband",))
    assert refusal(mixed, job) == ("asks for hosts labelled infiniband; there are old (rack=a), new (rack=a, nvlink)")
    job, _ = mixed.submit(devices=3, constraint=("nvlink",))
    assert refusal(mixed, job) == "asks for 3 devices on hosts labelled nvlink, these have 2 GPUs and 0 CPU devices"


def test_hosts_that_do_not_fit_are_named(mixed: Lab) -> None:
    hosts = mixed.scheduler.state.hosts
    job = mixed.scheduler.state.jobs[mixed.submit(constraint=("nvlink",))[0]]
    assert [misfit(job, host) for host in hosts.values()] == ["old lacks the label nvlink: it has rack=a", None]
    job = mixed.scheduler.state.jobs[mixed.submit(compute_capability=">=8.0", device_kind="cuda")[0]]
    assert misfit(job, hosts[HostId("old")]) == (
        "old has 2 x cuda (80.0 GiB, 7.5): 1 GPU with compute capability >=8.0 are asked for"
    )


def test_a_gpu_of_unknown_capability_meets_no_condition(lab: Lab) -> None:
    """Agents of the previous version do not report the compute capability."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(compute_capability=">=3.0", device_kind="cuda")
    assert lab.state(job) == "queued"
    assert "there are cuda (not reported)" in (refusal(lab, job) or "")


@pytest.mark.parametrize(
    ("there", "conditions", "holds"),
    [
        ("8.0", ">=8.0", True), ("8.6", "8", True), ("7.5", "8.0", False), ("12.0", ">=9.0", True),
        ("8.9", ">=8.0,<8.9", False), ("8.6", ">=8.0,<8.9", True), ("9.0", "==9.0", True), ("", ">=1", False),
        ("", "", True), ("8.0", ">8.0", False), ("8.0", "<=8.0", True),
    ],
)  # fmt: skip
def test_conditions_compare_versions(there: str, conditions: str, holds: bool) -> None:
    assert has_capability(there, conditions) is holds


@pytest.mark.parametrize("text", ["sm_80", ">=", ">=8.0.1", "8,", "=>8", "٨"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it as in >=8\.0"):
        parse_capability(text)
