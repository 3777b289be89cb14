"""Hosts that cannot start a job: it goes elsewhere, with a reason."""

from __future__ import annotations

from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.projection import unusable
from clusterd.types import HostId, JobId, JobKind, JobState, RankEnd, Reason
from tests.core.conftest import Lab

MISSING = "the interpreter ~/env/bin/python is not on this host"


def lab_of(hosts: str) -> Lab:
    """Each with one GPU."""
    lab = Lab()
    for host in hosts:
        lab.host(host, gpus=1)
    return lab


def refuse(lab: Lab, job: JobId, why: str = MISSING, is_permanent: bool = True) -> list[d.Decision]:
    """The host that the job was to start on says that it cannot; the attempt is over."""
    attempt = lab.attempt(job)
    lab.tell(
        e.LaunchFailed(
            **lab.at(), job=job, attempt=attempt.number, generation=1, host=attempt.hosts[0], why=why,
            is_infrastructure=True, is_permanent=is_permanent,
        )
    )  # fmt: skip
    return lab.stopped(job)


def place_of(lab: Lab, job: JobId) -> HostId:
    return lab.attempt(job).hosts[0]  # type: ignore[no-any-return]


def test_a_job_that_a_host_cannot_start_goes_to_another_at_once() -> None:
    lab = lab_of("abc")
    job, _ = lab.submit()
    first = place_of(lab, job)
    refuse(lab, job)
    second = place_of(lab, job)
    assert second != first
    refuse(lab, job)
    assert place_of(lab, job) not in (first, second)
    assert lab.scheduler.state.jobs[job].failures.of_hosts == 0


def test_what_no_host_can_start_fails_at_once_with_the_reason() -> None:
    lab = lab_of("ab")
    job, _ = lab.submit()
    refuse(lab, job)
    refuse(lab, job)
    assert lab.scheduler.state.jobs[job].state is JobState.FAILED
    assert MISSING in lab.scheduler.state.jobs[job].reason


def test_what_may_be_over_soon_is_tried_again() -> None:
    """A full disk on the only host; or a folder that is not there any more, where the job has trained before."""
    lab = lab_of("a")
    job, _ = lab.submit()
    refuse(lab, job, "no space left", is_permanent=False)
    refuse(lab, job, "no space left", is_permanent=False)
    assert lab.scheduler.state.jobs[job].state is JobState.QUEUED
    assert lab.scheduler.state.jobs[job].failures.of_hosts == 2


def test_who_needs_all_hosts_keeps_trying_them() -> None:
    """Leaving one out would have it wait for ever."""
    lab = lab_of("ab")
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=2)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 1000}
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=shape))
    assert len(lab.attempt(job).hosts) == 2
    refuse(lab, job, is_permanent=False)
    assert lab.scheduler.state.jobs[job].failures.excluded_hosts == {}
    assert lab.scheduler.state.jobs[job].failures.of_hosts == 1


def test_a_host_that_was_mended_is_tried_again() -> None:
    lab = lab_of("ab")
    job, _ = lab.submit()
    first = place_of(lab, job)
    refuse(lab, job)
    assert lab.scheduler.state.jobs[job].failures.excluded_hosts == {first: MISSING}
    lab.tell(e.HostDrained(**lab.at(), host=first, by="", why=""))
    lab.tell(e.HostUndrained(**lab.at(), host=first))
    assert lab.scheduler.state.jobs[job].failures.excluded_hosts == {}


FAULT = RankEnd(reason=Reason.DEVICE_FAULT, exit_code=93, message="the GPU failed: uncorrectable ECC error")


def fail_gpu(lab: Lab, job: JobId) -> str:
    """The GPU of a job's only rank fails; which one that was."""
    lab.run(job)
    (device,) = lab.attempt(job).devices
    lab.exit(job, end=FAULT)
    lab.stopped(job)
    return str(device)


def test_a_gpu_that_fails_is_left_out_for_every_job() -> None:
    """The failure does not count against the job, which has no retries; the host has another GPU."""
    lab = Lab()
    lab.host("a", gpus=2)
    job, _ = lab.submit()
    failed = fail_gpu(lab, job)
    (device,) = lab.attempt(job).devices
    assert device != failed
    other, _ = lab.submit()
    assert "waits for 1 free device" in lab.why(other), "only the one that failed is free"
    assert unusable(lab.scheduler.state.jobs[other], lab.scheduler.state, lab.now_s) == [
        f"{failed} is left out for 4m58s: the GPU failed: uncorrectable ECC error; "
        "clusterd host undrain a offers it again now"
    ]


def test_a_gpu_that_failed_is_tried_again_ever_later() -> None:
    lab = lab_of("a")
    job, _ = lab.submit()
    device = fail_gpu(lab, job)
    waits_s = []
    for _ in range(3):
        assert lab.scheduler.state.jobs[job].state is JobState.QUEUED
        timer = Timer(TimerKind.FAULT, device)
        waits_s.append(lab.scheduler.state.timers[timer] - lab.now_s)
        lab.fire(timer)
        fail_gpu(lab, job)
    assert [round(wait_s, -1) for wait_s in waits_s] == [300, 1200, 4800]


def test_a_gpu_is_offered_again_when_somebody_has_seen_to_its_host() -> None:
    lab = lab_of("a")
    job, _ = lab.submit()
    fail_gpu(lab, job)
    assert lab.state(job) == "queued"
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("a")))
    assert lab.attempt(job).number == 2
    fail_gpu(lab, job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="reboot"))
    known = lab.scheduler.state.hosts[HostId("a")].facts
    assert known is not None
    lab.tell(e.HostConnected(**lab.at(), host=HostId("a"), facts=replace(known, boot_id="another"), attempts=()))
    assert lab.scheduler.state.hosts[HostId("a")].faults == {}
    lab.fire(Timer(TimerKind.RETRY, job))
    assert lab.attempt(job).number == 3


def test_a_host_without_torch_is_left_out_as_long_as_others_may_have_it() -> None:
    lab = lab_of("ab")
    job, _ = lab.submit()
    lab.run(job)
    first = place_of(lab, job)
    lacks = RankEnd(reason=Reason.NO_TORCH, exit_code=97)
    lab.exit(job, end=lacks)
    lab.stopped(job)
    assert place_of(lab, job) != first
    lab.run(job)
    lab.exit(job, end=lacks)
    lab.stopped(job)
    assert lab.scheduler.state.jobs[job].state is JobState.FAILED
    assert "has no torch" in lab.scheduler.state.jobs[job].reason


def test_a_model_is_told_by_another_host_where_one_cannot() -> None:
    lab = lab_of("ab")
    job, decided = lab.submit(kind=JobKind.ELASTIC)
    first = d.DescribeModel.match(decided, job=job)
    assert first is not None
    again = d.DescribeModel.match(
        lab.tell(e.ModelNotDescribed(**lab.at(), job=job, why=MISSING, is_infrastructure=True)), job=job
    )
    assert again is not None and again.host != first.host


def test_a_gpu_with_fatal_errors_is_left_out_until_an_operator_clears_them_or_a_reboot() -> None:
    """Its driver reports them; another error later leaves it out again."""
    lab = lab_of("a")
    host = lab.scheduler.state.hosts[HostId("a")]
    assert host.facts is not None
    healthy = host.facts

    def report(fault: str, boot_id: str = healthy.boot_id) -> None:
        devices = tuple(replace(device, fault=fault) for device in healthy.devices)
        facts = replace(healthy, devices=devices, boot_id=boot_id)
        if boot_id == healthy.boot_id:
            lab.tell(e.HostChanged(**lab.at(), host=host.id, facts=facts))
        else:
            lab.tell(e.HostConnected(**lab.at(), host=host.id, facts=facts, attempts=()))

    report("XID 79 (it fell off the bus)")
    job, _ = lab.submit()
    assert lab.state(job) == "queued"
    [reason] = unusable(lab.scheduler.state.jobs[job], lab.scheduler.state, lab.now_s)
    assert "is left out: XID 79 (it fell off the bus); once it is reset, clusterd host undrain a offers it" in reason
    for _ in range(2):
        lab.tell(e.HostUndrained(**lab.at(), host=host.id))
        assert host.reported_faults == {}
    assert lab.state(job) != "queued"
    report("XID 79 (it fell off the bus) 2 times")
    assert [device.foreign for device in host.devices] == ["XID 79 (it fell off the bus) 2 times"]
    lab.tell(e.HostUndrained(**lab.at(), host=host.id))
    lab.tell(e.HostDisconnected(**lab.at(), host=host.id, why="reboot"))
    report("XID 79 (it fell off the bus) 2 times", boot_id="another")
    assert host.reported_faults  # of the new boot


def test_a_full_disk_costs_no_job_and_its_next_try_waits() -> None:
    """Regression: each job of the queue failed after six tries within two minutes."""
    lab = lab_of("a")
    job, _ = lab.submit()
    for number in range(1, 9):
        attempt = lab.attempt(job)
        assert attempt.number == number
        full = {"host": attempt.hosts[0], "why": "no space left on device", "is_full_disk": True}
        lab.tell(e.LaunchFailed(**lab.at(), job=job, attempt=number, generation=1, **full))
        lab.stopped(job)
        assert lab.state(job) == "queued"
        assert "no space left on device" in lab.why(job)
        assert lab.scheduler.state.timers[Timer(TimerKind.RETRY, job)] - lab.now_s == 300
        lab.fire(Timer(TimerKind.RETRY, job))
    lab.run(job)
    assert lab.state(job) == "running"


def test_a_model_is_learned_once_the_disk_has_room() -> None:
    lab = lab_of("a")
    job, _ = lab.submit(kind=JobKind.ELASTIC)
    for _ in range(8):
        lab.tell(e.ModelNotDescribed(**lab.at(), job=job, why="no room", is_infrastructure=True, is_full_disk=True))
        assert lab.state(job) == "queued"
        lab.fire(Timer(TimerKind.RETRY, job))
