"""A state restored from a backup, on hosts with records of later launches."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import Job
from clusterd.daemon.journal import codec
from clusterd.types import AttemptReport, HostId, JobId, RankReport
from tests.core.conftest import OK, Lab


def restored(lab: Lab) -> Lab:
    """A lab whose scheduler has the state of now, as after a backup; the first one goes on without it."""
    other = Lab()
    other.scheduler.state = deepcopy(lab.scheduler.state)
    other.now_s, other.jobs = lab.now_s, lab.jobs
    return other


def record(lab: Lab, job: JobId) -> Job:
    """The job as the daemon has it at a launch."""
    return deepcopy(lab.scheduler.state.jobs[job])


def report(job: Job, ended: bool = False, generation: int = 0) -> AttemptReport:
    attempt = job.attempts[-1]
    ranks = tuple(RankReport(rank=rank, end=OK if ended else None) for rank in attempt.ranks)
    return AttemptReport(job=job.id, attempt=attempt.number, generation=generation or attempt.generation, ranks=ranks)


def connect(lab: Lab, host: str, *reports: AttemptReport, adopted: tuple[Job, ...] = ()) -> list[d.Decision]:
    state = lab.scheduler.state
    facts: Any = state.hosts[HostId(host)].facts
    return lab.tell(e.HostConnected(**lab.at(), host=HostId(host), facts=facts, attempts=reports, adopted=adopted))


def start_again(lab: Lab) -> None:
    lab.now_s += 60.0
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1000))


def test_a_later_job_goes_on_with_its_devices_and_its_time_limit(lab: Lab) -> None:
    lab.host("a", gpus=2)
    old = restored(lab)
    job, _ = lab.submit(time_limit_s=3600.0)
    later = record(lab, job)
    start_again(old)
    decided = connect(old, "a", report(later), adopted=(later,))
    assert d.StopAttempt.match(decided, job=job) is None and d.LaunchAttempt.match(decided, job=job) is None
    assert old.state(job) == "running"
    assert old.scheduler.state.timers[Timer(TimerKind.LIMIT, job)] == later.attempts[-1].started_s + 3600.0
    assert len(old.scheduler.state.holders) == 1 and old.scheduler.state.hosts[HostId("a")].unusable is None
    old.finish(job)
    assert old.state(job) == "finished" and not old.scheduler.state.holders
    assert old.scheduler.state.hosts[HostId("a")].cores_used == 0


def test_devices_that_changed_hands_since_are_those_of_the_later_job(lab: Lab) -> None:
    """By the backup the first job runs; it has finished, and its devices run another one."""
    lab.host("a", gpus=1)
    first, _ = lab.submit()
    lab.run(first)
    old = restored(lab)
    before = record(lab, first)
    lab.finish(first)
    second, _ = lab.submit()
    later = record(lab, second)
    start_again(old)
    connect(old, "a", report(before, ended=True), report(later), adopted=(later,))
    assert old.state(first) == "finished", "its host has the record of its end"
    assert old.state(second) == "running"
    old.finish(second)
    assert not old.scheduler.state.holders and not old.scheduler.state.active


def test_a_job_of_the_backup_that_was_started_again_since(lab_with_two_hosts: Lab) -> None:
    """By the backup it runs its first attempt on one host; since then that host was lost, and it runs on the other."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(devices=4)
    lab.run(job)
    (first,) = lab.attempt(job).hosts
    other = ({"a", "b"} - {first}).pop()
    old = restored(lab)
    lab.tell(e.HostDisconnected(**lab.at(), host=first, why="power"))
    lab.fire(Timer(TimerKind.HOST_LOST, first))
    assert lab.attempt(job).number == 2
    later = record(lab, job)
    start_again(old)
    connect(old, other, report(later), adopted=(later,))
    assert old.attempt(job).number == 2 and old.attempt(job).hosts == (other,)
    assert {holder.host for holder in old.scheduler.state.holders.values()} == {other}
    assert old.scheduler.state.hosts[first].cores_used == 0
    connect(old, first, report(record(restored(old), job), generation=1))
    assert old.state(job) == "running"


def test_a_record_is_no_news_to_the_state_that_it_is_of(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    known = record(lab, job)
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=7, loss=1.0, step_time_s=1.0))
    connect(lab, "a", report(known), adopted=(known,))
    assert lab.scheduler.state.jobs[job].progress.step == 7


def test_a_job_of_two_hosts_of_which_one_is_no_member_waits_for_it(lab_with_two_hosts: Lab) -> None:
    """The second host was added after the backup: the job goes on, and is shown once the host is added again."""
    lab = lab_with_two_hosts
    old = Lab()
    old.host("a", gpus=4)
    job, _ = lab.submit(devices=8, nodes=2)
    later = record(lab, job)
    start_again(old)
    assert d.StopAttempt.match(connect(old, "a", report(later), adopted=(later,)), job=job) is None
    assert job not in old.scheduler.state.jobs and "runs job 1" in str(old.scheduler.state.hosts[HostId("a")].unusable)
    old.tell(e.HostAdded(**old.at(), host=HostId("b")))
    facts: Any = lab.scheduler.state.hosts[HostId("b")].facts
    old.tell(e.HostConnected(**old.at(), host=HostId("b"), facts=facts, attempts=(report(later),), adopted=(later,)))
    assert old.state(job) == "running" and old.scheduler.state.hosts[HostId("a")].unusable is None
    old.finish(job)
    assert old.state(job) == "finished"


def test_another_accounts_agent_cannot_hand_in_a_job(lab: Lab) -> None:
    lab.host("a", gpus=1)
    old = restored(lab)
    job, _ = lab.submit()
    later = record(lab, job)
    start_again(old)
    connect(old, "a")
    seen: dict[str, Any] = {"attempts": (report(later),), "adopted": (later,)}
    old.tell(e.AccountConnected(**old.at(), host=HostId("a"), account="eve", **seen))
    assert job not in old.scheduler.state.jobs


def test_an_adoption_is_the_same_in_a_replay(lab: Lab) -> None:
    lab.host("a", gpus=1)
    start = restored(lab).scheduler.state
    old = restored(lab)
    job, _ = lab.submit()
    later = record(lab, job)
    start_again(old)
    connect(old, "a", report(later), adopted=(later,))
    old.finish(job)
    again = Scheduler()
    again.state = start
    for event in old.log:
        kind = type(event).__name__
        again.handle(codec.event(kind, codec.encode(event)))
    assert again.state == old.scheduler.state
