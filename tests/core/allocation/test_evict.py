"""Jobs shrink for a queued job only where that lets it start."""

from __future__ import annotations

import pytest

from clusterd.core import events as e
from clusterd.types import DeviceId, HostId, JobId, JobKind
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import SHAPE, move, progress, running


def settled(lab: Lab, job: JobId) -> None:
    """A pass a while later, with nothing under way."""
    lab.now_s += 60.0
    progress(lab, job, lab.scheduler.state.jobs[job].progress.step + 1)


def test_a_command_is_made_room_for_on_one_host(lab: Lab) -> None:
    """Free devices were counted over all hosts: two of its four were elsewhere, and it waited for ever."""
    lab.host("a", gpus=4)
    lab.host("b", gpus=4)
    victim = running(lab, devices=4)
    other, _ = lab.submit(devices=2)
    lab.run(other)
    first = lab.attempt(victim).hosts[0]
    claimant, _ = lab.submit("urgent", devices=3, guaranteed=True)
    shrink = lab.attempt(victim).migration
    assert shrink is not None and len(shrink.ranks) == 2, "it moves to what is free on the other host"
    move(lab, victim)
    assert lab.state(claimant) == "starting"
    assert {rank.place.host for rank in lab.attempt(claimant).ranks.values()} == {first}


def test_nobody_shrinks_for_a_command_that_no_host_can_serve_yet(lab: Lab) -> None:
    """Each job keeps a device: a whole host is not to be had while one runs on each."""
    lab.host("a", gpus=4)
    lab.host("b", gpus=4)
    jobs = [running(lab, devices=4), running(lab, devices=4)]
    claimant, _ = lab.submit("urgent", devices=4, guaranteed=True)
    assert [lab.attempt(job).migration for job in jobs] == [None, None]
    assert "waits for 4 free devices on one host" in lab.why(claimant)


def test_nobody_shrinks_on_a_host_that_the_job_may_not_use(lab: Lab) -> None:
    lab.host("a", gpus=4)
    lab.host("b", gpus=2)
    victim = running(lab, devices=4)
    other, _ = lab.submit(devices=2, hosts=(HostId("b"),))
    lab.run(other)
    lab.submit("urgent", devices=2, guaranteed=True, hosts=(HostId("b"),))
    assert lab.attempt(victim).migration is None


def test_a_job_on_two_hosts_leaves_the_one_that_is_wanted(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    victim = running(lab, devices=4)
    claimant, _ = lab.submit("urgent", devices=2, guaranteed=True, hosts=(HostId("a"),))
    move(lab, victim)
    assert {rank.place.host for rank in lab.attempt(victim).ranks.values()} == {"b"}
    assert lab.state(claimant) == "starting"


def test_devices_that_come_free_anyway_are_waited_for(lab: Lab) -> None:
    """A job that is being stopped frees what is wanted: nobody shrinks for that beside it."""
    lab.host("a", gpus=4)
    victim = running(lab, devices=2)
    other, _ = lab.submit(devices=2)
    lab.run(other)
    lab.tell(e.JobCancelled(**lab.at(), job=other, by="ann"))
    claimant, _ = lab.submit("urgent", devices=2, guaranteed=True)
    assert lab.attempt(victim).migration is None
    lab.stopped(other)
    assert lab.state(claimant) == "starting"


@pytest.mark.parametrize("cancelled", [1, 2])
def test_a_shared_device_comes_free_when_the_last_of_its_jobs_leaves(lab: Lab, cancelled: int) -> None:
    lab.host("a", gpus=3)
    victim = running(lab, devices=2)
    sharers = [lab.submit(f"small{n}", share=2)[0] for n in range(2)]
    for job in sharers:
        lab.run(job)
    for job in sharers[:cancelled]:
        lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    lab.submit("urgent", devices=1, guaranteed=True)
    assert (lab.attempt(victim).migration is None) == (cancelled == 2)


@pytest.mark.parametrize("kind", [JobKind.COMMAND, JobKind.ELASTIC])
def test_the_lowest_priority_yields_wherever_it_sits(lab: Lab, kind: JobKind) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    dear = running(lab, devices=2, priority=5, hosts=(HostId("a"),))
    cheap = running(lab, devices=2, hosts=(HostId("b"),))
    lab.submit("urgent", devices=1, priority=9, kind=kind)
    if kind is JobKind.ELASTIC:
        lab.tell(e.ModelDescribed(**lab.at(), job=JobId("3"), shape=SHAPE, model="m"))
    assert lab.attempt(dear).migration is None
    shrink = lab.attempt(cheap).migration
    assert shrink is not None and shrink.ranks[0].place.device in (DeviceId("b:gpu0"), DeviceId("b:gpu1"))


def test_of_many_commands_alike_each_is_told_what_it_waits_for(lab: Lab) -> None:
    """One is looked at for all: a sweep of thousands must not hold up every submit."""
    lab.host("a", gpus=2)
    first, *waiting = [lab.submit(devices=2)[0] for _ in range(4)]
    small, _ = lab.submit(devices=1)
    assert {lab.why(job) for job in waiting} == {"waits for 2 free devices on one host (with their cores and memory)"}
    lab.run(first)
    lab.finish(first)
    assert [lab.state(job) for job in waiting] == ["starting", "queued", "queued"]
    lab.run(waiting[0])
    lab.finish(waiting[0])
    assert [lab.state(job) for job in (*waiting, small)] == ["finished", "starting", "queued", "queued"]
