"""Commands and shells that share a device with others of their kind."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import DeviceId, HostId, JobId
from tests.core.conftest import Lab

GPU = DeviceId("a:gpu0")


def devices(lab: Lab, *jobs: JobId) -> list[str]:
    return [lab.attempt(job).devices[0] for job in jobs]


def end(lab: Lab, job: JobId) -> None:
    lab.run(job)
    lab.finish(job)


def test_a_job_joins_a_shared_device_before_it_takes_a_free_one(lab: Lab) -> None:
    lab.host("a", gpus=2)
    jobs = [lab.submit(f"small{n}", share=2)[0] for n in range(4)]
    assert devices(lab, *jobs) == ["a:gpu0", "a:gpu0", "a:gpu1", "a:gpu1"]
    late, _ = lab.submit("late", share=2)
    assert lab.state(late) == "queued"
    end(lab, jobs[0])
    assert devices(lab, late) == ["a:gpu0"], "the place of the one that ended, though it was the holder"


def test_the_device_is_free_when_the_last_of_them_has_ended(lab: Lab) -> None:
    lab.host("a", gpus=1)
    first, second = lab.submit("first", share=3)[0], lab.submit("second", share=3)[0]
    whole, _ = lab.submit("whole")
    assert lab.scheduler.state.jobs_on(GPU) == [first, second]
    end(lab, first)
    assert lab.state(whole) == "queued"
    assert lab.scheduler.state.holders[GPU].job == second
    end(lab, second)
    assert devices(lab, whole) == ["a:gpu0"]


def test_the_least_of_their_limits_counts(lab: Lab) -> None:
    """A job that shares with one more is on no device with two others, whichever of them came first."""
    lab.host("a", gpus=1)
    for name, share in (("two", 2), ("four", 4)):
        lab.submit(name, share=share)
    third, _ = lab.submit("third", share=4)
    assert lab.state(third) == "queued"
    lab.host("b", gpus=1)
    assert devices(lab, third) == ["b:gpu0"]
    picky, _ = lab.submit("picky", share=2)
    assert devices(lab, picky) == ["b:gpu0"]


def test_who_does_not_say_so_shares_with_nobody(lab: Lab) -> None:
    lab.host("a", gpus=1)
    lab.submit("alone")
    assert lab.state(lab.submit("sharing", share=8)[0]) == "queued"


def test_nobody_joins_a_device_for_longer_than_the_first_waiting_job_is_promised(lab: Lab) -> None:
    """Else a stream of small jobs would keep the device for ever."""
    lab.host("a", gpus=1)
    small, _ = lab.submit("small", share=2, time_limit_s=600.0)
    lab.run(small)
    whole, _ = lab.submit("whole")
    assert lab.scheduler.state.reservation is not None and lab.scheduler.state.reservation.job == whole
    long, _ = lab.submit("long", share=2, time_limit_s=3600.0)
    short, _ = lab.submit("short", share=2, time_limit_s=60.0)
    assert lab.state(long) == "queued"
    assert devices(lab, short) == ["a:gpu0"]
    end(lab, short)
    lab.fire(Timer(TimerKind.LIMIT, small))
    lab.exit(small)
    lab.stopped(small)
    assert devices(lab, whole) == ["a:gpu0"]


def test_cores_and_memory_beside_the_device_are_booked_for_each(lab: Lab) -> None:
    lab.host("a", gpus=1, cores=8)
    first, second = (lab.submit(name, share=4, cpus=3)[0] for name in ("first", "second"))
    third, _ = lab.submit("third", share=4, cpus=3)
    assert devices(lab, first, second) == ["a:gpu0", "a:gpu0"]
    assert lab.state(third) == "queued"


def test_a_lost_host_ends_all_that_shared_its_device(lab: Lab) -> None:
    lab.host("a", gpus=1)
    jobs = [lab.submit(name, share=2)[0] for name in ("first", "second")]
    for job in jobs:
        lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="no route"))
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    assert {lab.state(job) for job in jobs} <= {"queued", "failed"}
    assert not lab.scheduler.state.holders and not lab.scheduler.state.sharers
