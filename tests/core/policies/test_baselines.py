"""Published policies in a daemon leave running jobs alone that they know nothing of."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.policies import POLICIES
from clusterd.core.policies.gavel import Gavel
from clusterd.core.scheduler import Scheduler
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobId, JobKind, JobSpec, Resources
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import progress, running
from tests.core.placement.test_mixed_devices import MixedLab

ROUNDS = 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_whose_speed_nobody_knows_is_left_to_run(policy: str) -> None:
    for elastic in (True, False):
        lab = Lab()
        lab.scheduler = Scheduler(POLICIES[policy]())
        lab.host("a", gpus=4)
        job = running(lab, devices=2) if elastic else _checkpointable(lab)
        for _ in range(ROUNDS):
            lab.now_s += 61.0
            lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
        assert lab.state(job) == "running"
        assert len(lab.scheduler.state.jobs[job].attempts) == 1


@pytest.mark.parametrize("is_drained", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_on_the_only_host_of_a_type_runs_on_while_that_is_away(policy: str, is_drained: bool) -> None:
    """The policy raised, and the daemon ended; so did a simulation with such a drain."""
    lab = MixedLab({"new": [2], "old": [2]})
    lab.scheduler.policy = POLICIES[policy]()
    job, _ = lab.net("net", 100_000, devices=2, plan=Plan(dp=2))
    lab.progress(job, 1)
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    assert lab.state(job) == "running"
    host = HostId(lab.attempt(job).hosts[0])
    if is_drained:
        lab.tell(e.HostDrained(**lab.at(), host=host))
    else:
        lab.tell(e.HostDisconnected(**lab.at(), host=host, why="cable"))
    lab.net("other", 100_000, devices=2, plan=Plan(dp=2))
    assert is_drained or lab.state(job) == "running"  # from a drained host it may be taken


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drained_host_is_left_whoever_decides(policy: str) -> None:
    """Draining is a person's wish, of which published policies know nothing: jobs stayed to their end."""
    for elastic in (True, False):
        lab = Lab()
        lab.scheduler = Scheduler(POLICIES[policy]())
        lab.host("a", gpus=2)
        job = running(lab, devices=2) if elastic else _checkpointable(lab)
        if elastic:
            progress(lab, job, 5)
        lab.host("b", gpus=2)
        decided = lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann"))
        if elastic:
            begun = d.StartMigration.match(decided, job=job)
            assert begun is not None and {place.host for place in begun.new_ranks} == {"b"}
        else:
            assert d.StopAttempt.match(decided, job=job)
        assert "a is drained" in lab.why(job)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_known_speed_leaves_a_drained_host(policy: str) -> None:
    lab = MixedLab({"new": [2, 2, 2]})
    lab.scheduler.policy = POLICIES[policy]()
    job, _ = lab.net("net", 100_000, devices=2, plan=Plan(dp=2))
    lab.progress(job, 1)
    host = HostId(lab.attempt(job).hosts[0])
    lab.now_s += 100.0
    decided = lab.tell(e.HostDrained(**lab.at(), host=host, by="ann"))
    lab.now_s += 61.0
    decided += lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    begun = d.StartMigration.match(decided, job=job)
    assert begun is not None and host not in {place.host for place in begun.new_ranks}
    assert f"{host} is drained" in begun.reason


def _checkpointable(lab: Lab) -> JobId:
    job = JobId("1")
    resources = Resources(devices=2, kind="cuda", plans=(Plan(dp=2),))
    spec = JobSpec(name="saves", kind=JobKind.CHECKPOINTABLE, command=("train",), resources=resources)
    lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))
    lab.run(job)
    return job


@pytest.mark.parametrize("policy", ["fifo", "srtf", "tiresias"])
def test_a_job_that_waits_for_its_survivors_is_not_moved_meanwhile(policy: str) -> None:
    lab, job = _to_be_moved(policy)
    attempt = lab.attempt(job)
    lab.tell(e.RankOrphaned(**lab.at(), job=job, attempt=attempt.number, generation=attempt.generation, rank=0, step=1))
    _leave(lab)
    assert attempt.migration is None


@pytest.mark.parametrize("policy", ["fifo", "srtf", "tiresias"])
def test_a_move_that_failed_is_not_tried_again_at_once(policy: str) -> None:
    """Regression: a hundred migrations to a lost host failed within one second."""
    lab, job = _to_be_moved(policy)
    _leave(lab)
    attempt = lab.attempt(job)
    new = attempt.migration
    assert new is not None, lab.why(job)
    who: dict[str, Any] = {"job": job, "attempt": attempt.number, "generation": new.generation}
    lab.tell(e.MigrationFailed(**lab.at(), **who, phase="prepare", why="no memory"))
    for host in {place.host for place in new.places}:
        lab.tell(e.AttemptStopped(**lab.at(), **who, host=host))
    assert attempt.migration is None
    lab.now_s += 30.0
    lab.fire(Timer(TimerKind.SETTLE, job))
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    assert attempt.migration is not None


def _leave(lab: MixedLab) -> None:
    """The job's host is drained, and the other is not any more."""
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("new0")), e.HostDrained(**lab.at(), host=HostId("old0")))
    lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))


def _to_be_moved(policy: str) -> tuple[MixedLab, JobId]:
    """A job that trains, and a policy that would move it off a drained host."""
    lab = MixedLab({"new": [2], "old": [2]})
    lab.scheduler.policy = POLICIES[policy]()
    lab.tell(e.HostDrained(**lab.at(), host=HostId("new0")))
    job, _ = lab.net("net", 100_000, devices=2, plan=Plan(dp=2))
    lab.progress(job, 1)
    return lab, job


@pytest.mark.parametrize("by_s", [0.0, 3600.0, -3600.0])
def test_time_on_a_type_is_what_passed_whatever_the_clock_says(by_s: float) -> None:
    """Gavel took an hour for received on that type, or for given back."""
    lab, policy = MixedLab({"new": [2]}), Gavel()
    lab.scheduler.policy = policy
    job, _ = lab.net("net", 100_000, devices=2, plan=Plan(dp=2))
    lab.progress(job, 1)
    lab.fire(Timer(TimerKind.ROUND))
    before_s, began_s = _received_s(policy, job), lab.now_s
    lab.now_s += by_s
    lab.tell(e.ClockSet(**lab.at(), by_s=by_s))
    lab.fire(Timer(TimerKind.ROUND))
    assert _received_s(policy, job) - before_s == pytest.approx(lab.now_s - began_s - by_s)


def _received_s(policy: Gavel, job: JobId) -> float:
    return sum(policy._received.get(job, {}).values())
