"""Plans that a user pinned a job to last as long as it runs under them, and are never set by accident."""

from __future__ import annotations

import pytest

from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import DeviceId, HostId, JobId, JobKind
from tests.core.conftest import Lab
from tests.core.lifecycle.test_plans_out_of_memory import MODEL, OOM, need
from tests.core.lifecycle.test_trials import learned, move, progress, propose, running
from tests.core.placement.test_mixed_devices import MixedLab

PINNED = Plan(tp=4)


def pinned(lab: Lab) -> JobId:
    """A job that was moved from dp=4 on host a to its pinned plan, there."""
    lab.host("a", gpus=4)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=PINNED, pin=True, by="ann"))
    move(lab, job)
    assert lab.attempt(job).plan == lab.scheduler.state.jobs[job].pinned == PINNED
    return job


def _gpus(host: str) -> list[DeviceId]:
    return [DeviceId(f"{host}:gpu{number}") for number in range(4)]


def fail_move(lab: Lab, job: JobId) -> None:
    """The one that it is in."""
    what = {"job": job, "attempt": 1, "generation": lab.attempt(job).migration.generation}
    lab.tell(e.MigrationFailed(**lab.at(), **what, phase="prepare", why="no room"))


def lose(lab: Lab, host: str) -> None:
    """The host is declared lost."""
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId(host), why="power"))
    lab.now_s = lab.scheduler.state.timers[Timer(TimerKind.HOST_LOST, host)]
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.HOST_LOST, host)))


def test_a_pin_to_a_plan_that_the_job_could_not_be_moved_to_is_none(lab: Lab) -> None:
    """Otherwise the job would stay under the old plan because of a pin that nobody requested."""
    lab.host("a", gpus=4)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=PINNED, pin=True, by="ann"))
    fail_move(lab, job)
    assert lab.scheduler.state.jobs[job].pinned is None
    assert "dp=4 goes on; it is no longer pinned to tp=4" in lab.why(job)


def test_a_pin_to_a_place_that_the_job_could_not_be_moved_to_is_none(lab: Lab) -> None:
    """Under the plan that it has: it would be kept where it was not wanted."""
    lab.host("a", gpus=4)
    lab.host("b", gpus=4)
    job = running(lab)
    there = tuple(device for host in "ab" if HostId(host) not in lab.attempt(job).hosts for device in _gpus(host))
    lab.tell(e.MigrationRequested(**lab.at(), job=job, devices=there, pin=True, by="ann"))
    fail_move(lab, job)
    assert lab.scheduler.state.jobs[job].pinned is None
    assert "dp=4 goes on; it is no longer pinned to dp=4" in lab.why(job)


def test_a_pinned_job_that_could_not_leave_a_drained_host_is_pinned_as_before(lab: Lab) -> None:
    """The move was not its user's, the pin is."""
    job = pinned(lab)
    lab.host("b", gpus=4)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    fail_move(lab, job)
    assert lab.scheduler.state.jobs[job].pinned == PINNED


def test_a_move_without_a_pin_that_fails_speaks_of_none(lab: Lab) -> None:
    lab.host("a", gpus=4)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=PINNED, by="ann"))
    fail_move(lab, job)
    assert lab.why(job) == "the migration to tp=4 failed (prepare: no room); dp=4 goes on"


def test_a_move_that_is_refused_pins_nothing(lab: Lab) -> None:
    job = pinned(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=8), pin=True, by="ann"))
    assert lab.scheduler.state.jobs[job].pinned == PINNED


def test_a_pinned_job_whose_host_is_lost_starts_under_its_plan(lab: Lab) -> None:
    job = pinned(lab)
    lab.host("b", gpus=4)
    lose(lab, "a")
    assert lab.attempt(job).hosts == (HostId("b"),)
    assert lab.attempt(job).plan == lab.scheduler.state.jobs[job].pinned == PINNED


def test_a_pinned_job_that_leaves_a_drained_host_for_fewer_devices_is_pinned_no_more(lab: Lab) -> None:
    """The user did not choose the resulting plan, so the job may grow again."""
    job = pinned(lab)
    lab.host("b", gpus=2)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    assert lab.attempt(job).migration is not None
    move(lab, job)
    assert len(lab.attempt(job).devices) == 2
    assert lab.scheduler.state.jobs[job].pinned is None
    assert "it is no longer pinned to tp=4" in lab.why(job)


def test_a_job_that_is_pinned_to_the_plan_that_is_tried_on_it_stays_there(lab: Lab) -> None:
    """The trials are over and another plan is faster; the devices that the trial left idle are returned."""
    lab.host("a", gpus=4)
    job = running(lab)
    propose(lab, job, Plan(tp=2))
    move(lab, job)
    progress(lab, job, 10)
    learned(lab, dp4=0.5, tp4=1.0)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(tp=2), pin=True, by="ann"))
    lab.submit(devices=4)
    assert lab.scheduler.state.jobs[job].pinned == lab.attempt(job).plan == Plan(tp=2)
    assert lab.attempt(job).migration is None
    assert len([holder for holder in lab.scheduler.state.holders.values() if holder.job == job]) == 2


def test_a_trial_that_was_thought_of_before_a_pin_is_not_made(lab: Lab) -> None:
    job = pinned(lab)
    propose(lab, job, Plan(dp=4))
    assert lab.scheduler.state.jobs[job].pinned == PINNED
    assert lab.attempt(job).migration is None and not lab.scheduler.state.jobs[job].trials.is_running


def test_a_job_that_is_on_its_way_elsewhere_is_not_pinned_where_it_was(lab: Lab) -> None:
    """Regression: the user was told that the job stays, and then it was migrated."""
    lab.host("a", gpus=4)
    job = running(lab)
    propose(lab, job, Plan(tp=2))
    assert lab.attempt(job).migration is not None
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=4), pin=True, by="ann"))
    assert lab.scheduler.state.jobs[job].pinned is None
    assert "is being moved already" in lab.why(job)


def test_a_pinned_job_of_which_a_faster_plan_is_known_keeps_its_own(lab: Lab) -> None:
    """Holds when it leaves a drained host, and when it restarts after its host is lost."""
    job = pinned(lab)
    learned(lab, dp4=0.5, tp4=1.0)
    lab.host("b", gpus=4)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
    assert lab.attempt(job).migration is not None, lab.why(job)
    move(lab, job)
    assert (lab.attempt(job).hosts, lab.attempt(job).plan) == ((HostId("b"),), PINNED)
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("a"), by="ann"))
    lose(lab, "b")
    assert (lab.attempt(job).hosts, lab.attempt(job).plan) == ((HostId("a"),), PINNED)
    assert lab.scheduler.state.jobs[job].pinned == PINNED


def test_a_pinned_job_takes_slower_devices_for_its_plan_where_the_faster_are_away() -> None:
    """Otherwise the job would wait for the faster devices for ever, since its pin admits no smaller plan."""
    lab = MixedLab({"new": [4], "old": [2, 2]})
    lab.tell(e.HostDrained(**lab.at(), host=HostId("new0")))
    job, _ = lab.net("net", 1000, devices=4)
    lab.progress(job, 10)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=4), pin=True, by="ann"))
    assert lab.scheduler.state.jobs[job].pinned == Plan(dp=4)
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("new0")))
    lab.submit(devices=3, hosts=(HostId("new0"),))
    for host in ("old2", "old3"):
        lab.typed_host(host, "old", 2)
    for host in ("old0", "old1"):
        lose(lab, host)
    assert lab.state(job) == "starting", lab.why(job)
    assert lab.attempt(job).hosts == (HostId("old2"), HostId("old3"))


def test_a_pin_that_cannot_be_any_more_does_not_fail_the_job(lab: Lab) -> None:
    """The pinned plan runs out of memory at a restart; another plan needs less."""
    large = Plan(dp=4, zero=1)
    lab.host("a", gpus=4)
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=4)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={**MODEL.to_dict(), "steps": 1000}, model="m"))
    lab.run(job)
    progress(lab, job, 5)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=large, pin=True, by="ann"))
    move(lab, job)
    lab.host("b", gpus=4)
    lose(lab, "a")
    lab.run(job)
    assert lab.attempt(job).plan == large
    lab.exit(job, end=OOM)
    lab.stopped(job)
    assert lab.state(job) == "starting", lab.why(job)
    assert need(lab.attempt(job).plan) < need(large)
    assert "it is no longer pinned to dp=4,zero=1" in lab.why(job)


def test_a_pinned_job_whose_move_to_another_plan_fails_is_pinned_as_before(lab: Lab) -> None:
    """The pin was not removed by the user."""
    job = pinned(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    fail_move(lab, job)
    assert lab.attempt(job).plan == lab.scheduler.state.jobs[job].pinned == PINNED
    assert "not pinned" not in lab.why(job)


def test_a_job_that_was_unpinned_while_it_moved_stays_so(lab: Lab) -> None:
    job = pinned(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    lab.tell(e.JobUnpinned(**lab.at(), job=job, by="ann"))
    fail_move(lab, job)
    assert lab.scheduler.state.jobs[job].pinned is None


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=6)])
def test_a_pinned_job_starts_again_on_as_many_devices_as_its_plan_has(lab: Lab, plan: Plan) -> None:
    """The job asked for four devices and was pinned to fewer, or to more."""
    lab.host("a", gpus=6)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=plan, pin=True, by="ann"))
    move(lab, job)
    lab.host("b", gpus=6)
    lose(lab, "a")
    assert lab.attempt(job).plan == lab.scheduler.state.jobs[job].pinned == plan


def test_a_pin_to_more_devices_than_are_left_is_over(lab: Lab) -> None:
    """Else it would wait for ever."""
    lab.host("a", gpus=6)
    job = running(lab)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=6), pin=True, by="ann"))
    move(lab, job)
    lab.host("b", gpus=4)
    lose(lab, "a")
    assert len(lab.attempt(job).devices) == 4
    assert "it is no longer pinned to dp=6" in lab.why(job)
