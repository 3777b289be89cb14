"""Scenarios of a lab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.scheduler import HOST_LOST_AFTER_S, Scheduler
from clusterd.types import AttemptReport, HostId, JobId, JobState, RankEnd, RankReport, Reason, Resources
from tests.core.conftest import CRASH, OK, Lab


def test_a_job_that_fits_starts_at_once_and_says_where(lab_with_two_hosts: Lab) -> None:
    """Eight free GPUs and a job for two: one host has them."""
    job, decided = lab_with_two_hosts.submit(devices=2)
    launch = d.LaunchAttempt.match(decided, job=job, attempt=1)
    assert launch is not None
    assert launch.hosts == (HostId("a"),)
    assert launch.reason == "started on a"


def test_a_command_that_no_single_host_can_serve_waits_and_smaller_ones_pass(lab_with_two_hosts: Lab) -> None:
    """A four-GPU command waits for a whole host; a one-GPU command behind it takes a device of the other host."""
    lab = lab_with_two_hosts
    first, _ = lab.submit(devices=3)
    _second, _ = lab.submit(devices=3)
    wide, _ = lab.submit("wide", devices=4)
    small, decided = lab.submit("small", devices=1)
    assert lab.state(wide) == "queued"
    assert "waits for 4 free devices on one host" in lab.why(wide)
    passing = d.LaunchAttempt.match(decided, job=small)
    assert passing is not None and passing.hosts == (HostId("b"),), "not on the host that is reserved"
    assert lab.scheduler.state.reservation is not None and lab.scheduler.state.reservation.job == wide
    lab.run(first)
    decided = lab.finish(first)
    launch = d.LaunchAttempt.match(decided, job=wide)
    assert launch is not None and launch.hosts == (HostId("a"),)


def test_higher_priority_goes_first_and_equals_in_order_of_arrival(lab: Lab) -> None:
    """Three jobs for one GPU."""
    lab.host("a", gpus=1)
    running, _ = lab.submit("running")
    early, _ = lab.submit("early")
    late, _ = lab.submit("late")
    urgent, _ = lab.submit("urgent", priority=5)
    order = []
    for current in (running, urgent, early):
        lab.run(current)
        order.append(next(x.job for x in lab.finish(current) if isinstance(x, d.LaunchAttempt)))
    assert order == [urgent, early, late]


def test_a_long_queue_does_not_make_every_request_wait_for_a_pass(lab: Lab) -> None:
    """Two thousand queued jobs: what comes within 0.2 s of a pass is decided about once, by the next one."""
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    lab.run(running)
    spec = replace(lab.scheduler.state.jobs[running].spec, resources=Resources(devices=1))
    at = lab.at()
    lab.tell(*(e.JobSubmitted(**{**at, "id": e.EventId(n)}, job=JobId(str(n)), spec=spec) for n in range(2, 2002)))
    state = lab.scheduler.state
    assert lab.scheduler.proposed is not None and len(state.queue) == 2000, "the first of them did not wait"
    for n in range(2002, 2005):
        now_s = lab.now_s + 0.01 * (n - 2001)
        lab.tell(e.JobSubmitted(at_s=now_s, id=e.EventId(n), job=JobId(str(n)), spec=spec))
        assert lab.scheduler.proposed is None
    due_s = state.timers[Timer(TimerKind.PASS)]
    assert lab.now_s < due_s <= lab.now_s + 0.21
    assert lab.why(JobId("2004")) == "the scheduler has not looked at it yet"
    lab.tell(e.TimerFired(at_s=due_s, id=e.EventId(2005), timer=Timer(TimerKind.PASS)))
    assert lab.scheduler.proposed is not None and Timer(TimerKind.PASS) not in state.timers
    assert lab.why(JobId("2004")) == lab.why(JobId("2"))


def test_a_clock_that_was_set_back_puts_no_pass_off(lab: Lab) -> None:
    """The state's times may be those of another machine, from whose backup it comes."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    spec = lab.scheduler.state.jobs[job].spec
    at = lab.at()
    lab.tell(*(e.JobSubmitted(**{**at, "id": e.EventId(n)}, job=JobId(str(n)), spec=spec) for n in range(2, 1502)))
    lab.tell(e.JobSubmitted(at_s=lab.now_s - 500.0, id=e.EventId(1502), job=JobId("1502"), spec=spec))
    assert lab.scheduler.proposed is not None


def test_devices_are_free_only_when_the_agent_says_nothing_is_left(lab: Lab) -> None:
    """The rank exited, but a data loader may still hold the GPU's memory."""
    lab.host("a", gpus=1)
    first, _ = lab.submit()
    second, _ = lab.submit()
    lab.run(first)
    decided = lab.exit(first)
    assert d.StopAttempt.match(decided, job=first, host=HostId("a")) is not None
    assert d.LaunchAttempt.match(decided) is None
    assert d.LaunchAttempt.match(lab.stopped(first), job=second) is not None
    assert lab.state(first) == "finished"


def test_a_failed_rank_ends_the_attempt_everywhere_and_the_job_with_its_exit_code(lab_with_two_hosts: Lab) -> None:
    """Exit code 3 of a command is the job's."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(devices=2)
    lab.run(job)
    lab.exit(job, end=CRASH)
    lab.stopped(job)
    known = lab.scheduler.state.jobs[job]
    assert (known.state, known.exit_code) == (JobState.FAILED, 3)
    assert "exit code 3" in known.reason


def test_retries_are_for_failures_of_its_own(lab: Lab) -> None:
    """A flaky script with one retry gets exactly one."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(retries=1)
    for _ in range(2):
        lab.run(job)
        lab.exit(job, end=CRASH)
        lab.stopped(job)
    known = lab.scheduler.state.jobs[job]
    assert known.state is JobState.FAILED
    assert len(known.attempts) == 2


def test_retries_after_the_first_wait_ever_longer(lab: Lab) -> None:
    """A fault of a minute must not use up all retries in a second."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(retries=12)
    waited = []
    for _ in range(12):
        lab.run(job)
        lab.exit(job, end=CRASH)
        lab.stopped(job)
        began_s = lab.now_s
        if lab.state(job) == "queued":
            lab.now_s = lab.scheduler.state.timers[Timer(TimerKind.RETRY, job)]
            lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.RETRY, job)))
        assert lab.state(job) == "starting"
        waited.append(round(lab.now_s - began_s))
    assert waited[:4] == [0, 6, 11, 21] and waited[-1] == 301


def test_cancel_before_and_during(lab: Lab) -> None:
    """A queued job is gone at once; a running one when its ranks are."""
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    queued, _ = lab.submit()
    lab.run(running)
    lab.tell(e.JobCancelled(**lab.at(), job=queued, by="ada"))
    assert lab.state(queued) == "cancelled"
    decided = lab.tell(e.JobCancelled(**lab.at(), job=running, by="ada"))
    assert d.StopAttempt.match(decided, job=running) is not None
    assert lab.state(running) == "stopping"
    lab.stopped(running, RankReport(rank=0, end=RankEnd(reason=Reason.STOPPED)))
    assert lab.state(running) == "cancelled"
    assert lab.scheduler.state.holders == {}


def test_a_host_that_comes_back_in_time_costs_nothing(lab: Lab) -> None:
    """A switch reboots: the SSH connection is gone for a minute, the training is not."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="connection lost"))
    assert lab.state(job) == "running"
    report = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=None),))
    lab.connect("a", report)
    assert lab.state(job) == "running"
    assert len(lab.scheduler.state.jobs[job].attempts) == 1


def test_a_lost_host_sends_its_job_to_another_and_is_cleaned_when_it_returns(lab_with_two_hosts: Lab) -> None:
    """The power of host a fails for an hour."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(devices=4, hosts=())
    lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="no route"))
    lab.now_s += HOST_LOST_AFTER_S
    decided = lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.HOST_LOST, "a")))
    launch = d.LaunchAttempt.match(decided, job=job, attempt=2)
    assert launch is not None
    assert launch.hosts == (HostId("b"),)
    assert "a is lost" in (d.RequeueJob.match(decided, job=job) or decided[0]).reason
    old = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=None),))
    decided = lab.connect("a", old)
    assert d.StopAttempt.match(decided, host=HostId("a"), attempt=1) is not None
    other, decided = lab.submit(devices=4)
    assert d.LaunchAttempt.match(decided, job=other) is None, "a still runs the old attempt"
    decided = lab.tell(e.AttemptStopped(**lab.at(), job=job, attempt=1, generation=1, host=HostId("a"), ranks=()))
    assert d.LaunchAttempt.match(decided, job=other) is not None


def test_ranks_that_fail_for_lack_of_a_lost_peer_do_not_fail_the_job(lab: Lab) -> None:
    """Host b reboots under a job on both: the ranks on a die with exit code 1, which is not the job's fault."""
    lab.host("a", cpus=2)
    job, _ = lab.submit(devices=2)
    lab.run(job)
    attempt = lab.attempt(job)
    assert len(attempt.ranks) == 2
    lab.exit(job, rank=0, end=RankEnd(reason=Reason.EXIT, exit_code=1))
    decided = lab.stopped(job, RankReport(rank=1, end=RankEnd(reason=Reason.LOST)))
    assert lab.state(job) == "starting", "queued again, and started again at once"
    assert d.RequeueJob.match(decided, job=job) is not None


def test_a_job_that_is_lost_again_and_again_is_given_up(lab: Lab) -> None:
    """Something kills it every time without leaving a trace: five tries, each later, then a clear end."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    for _ in range(20):
        if lab.state(job) == "starting":
            lab.run(job)
            lab.exit(job, end=RankEnd(reason=Reason.LOST))
            lab.stopped(job)
        elif lab.state(job) == "queued":
            timer, at_s = next(iter(lab.scheduler.state.timers.items()))
            lab.now_s = at_s
            lab.tell(e.TimerFired(**lab.at(), timer=timer))
    assert lab.state(job) == "failed"
    assert "6 times in a row" in lab.why(job)


def test_the_time_limit_ends_a_job_with_124(lab: Lab) -> None:
    """Same exit code as timeout(1)."""
    lab.host("a", gpus=1)
    job, decided = lab.submit(time_limit_s=60.0)
    timer = d.SetTimer.match(decided)
    assert timer is not None
    lab.run(job)
    lab.now_s = timer.at_s
    lab.tell(e.TimerFired(**lab.at(), timer=timer.timer))
    lab.stopped(job, RankReport(rank=0, end=RankEnd(reason=Reason.STOPPED)))
    known = lab.scheduler.state.jobs[job]
    assert (known.state, known.exit_code) == (JobState.FAILED, 124)


def test_a_drained_host_gets_nothing_new(lab: Lab) -> None:
    """An operator drains the host because its fans are loud, to inspect it the next day."""
    lab.host("a", gpus=2)
    running, _ = lab.submit()
    lab.run(running)
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ada", why="fans"))
    waiting, decided = lab.submit()
    assert d.LaunchAttempt.match(decided) is None
    assert lab.state(running) == "running"
    decided = lab.tell(e.HostUndrained(**lab.at(), host=HostId("a")))
    assert d.LaunchAttempt.match(decided, job=waiting) is not None


def test_after_a_restart_nothing_is_placed_until_busy_hosts_were_heard(lab_with_two_hosts: Lab) -> None:
    """The daemon was killed; b is free, but a may have news that change everything."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(devices=1)
    lab.run(job)
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    lab.connect("b")
    new, decided = lab.submit("new", devices=1)
    assert d.LaunchAttempt.match(decided) is None
    assert "waits for a to report" in lab.why(new)
    report = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=OK),))
    decided = lab.connect("a", report)
    assert d.StopAttempt.match(decided, job=job) is not None
    assert d.LaunchAttempt.match(decided, job=new) is not None


def test_a_launch_cut_short_is_asked_for_again(lab: Lab) -> None:
    """kill -9 between the journal and the agent."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    decided = lab.connect("a")
    launch = d.LaunchAttempt.match(decided, job=job, attempt=1, generation=1)
    assert launch is not None


def test_gpus_asked_of_a_lab_without_any_say_what_there_is(lab: Lab) -> None:
    """A new user on a laptop copies the README's line with --gpus 2."""
    lab.host("a", cpus=4)
    job, _ = lab.submit(devices=2, device_kind="cuda")
    assert lab.why(job) == "asks for 2 GPUs, the cluster has 0; there are 4 CPU devices: submit with --devices 2"


def test_a_foreign_process_keeps_its_gpu(lab: Lab) -> None:
    """Somebody trains by hand on gpu0."""
    from dataclasses import replace

    from tests.core.conftest import facts

    lab.host("a", gpus=2)
    here = facts("a", gpus=2)
    used = replace(here, devices=(replace(here.devices[0], foreign="in use by bob (pid 1)"), here.devices[1]))
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=used))
    job, decided = lab.submit()
    launch = d.LaunchAttempt.match(decided, job=job)
    assert launch is not None
    assert launch.ranks[0].device == "a:gpu1"


def test_waiting_for_the_same_thing_is_said_once(lab: Lab) -> None:
    """Whoever asks why gets a history, not a flood."""
    lab.host("a", gpus=1)
    lab.submit()
    waiting, _ = lab.submit()
    for _ in range(10):
        lab.submit()
    assert len([x for x in lab.decisions if isinstance(x, d.HoldJob) and x.job == waiting]) == 1


def test_replay_gives_the_same_state(lab_with_two_hosts: Lab, replayed: Callable[[Lab], Scheduler]) -> None:
    """The journal is the state."""
    lab = lab_with_two_hosts
    jobs = [lab.submit(f"job{i}", devices=1 + i % 4)[0] for i in range(8)]
    for job in jobs[:3]:
        lab.run(job)
    lab.exit(jobs[0], end=CRASH)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("b"), why="cable"))
    assert replayed(lab).state == lab.scheduler.state


def test_a_cancel_may_cut_short_what_a_cancel_has_begun(lab: Lab) -> None:
    """A grace period of a day was waited for, whatever anybody did."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(grace_s=86400.0)
    lab.run(job)
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    assert [stop.grace_s for stop in decided if isinstance(stop, d.StopAttempt)] == [86400.0]
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann", now=True))
    assert [stop.grace_s for stop in decided if isinstance(stop, d.StopAttempt)] == [0.0]
    lab.stopped(job)
    assert lab.state(job) == "cancelled"
    assert d.StopAttempt.match(lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann", now=True)), job=job) is None


def test_a_cancel_at_once_is_one_stop_without_a_grace_period(lab: Lab) -> None:
    """Regression: the attempt was stopped with a grace period and without one at the same moment."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(grace_s=86400.0)
    lab.run(job)
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann", now=True))
    assert [stop.grace_s for stop in decided if isinstance(stop, d.StopAttempt)] == [0.0]
    decided = lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann", now=True))
    assert d.StopAttempt.match(decided, job=job) is None, "it is told already"


def test_a_cancel_at_once_is_one_where_its_host_was_away_too(lab: Lab) -> None:
    """Regression: the attempt got a grace period of a day when its host reconnected."""
    lab.host("a", gpus=1)
    job, _ = lab.submit(grace_s=86400.0)
    lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann", now=True))
    there = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=None),))
    decided = lab.connect("a", there)
    assert [stop.grace_s for stop in decided if isinstance(stop, d.StopAttempt)] == [0.0]


def test_a_cancel_while_the_time_limit_ends_a_job_does_not_make_it_a_cancelled_one(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=60.0)
    lab.run(job)
    lab.fire(Timer(TimerKind.LIMIT, job))
    lab.tell(e.JobCancelled(**lab.at(), job=job, by="ann"))
    lab.stopped(job)
    assert lab.state(job) == "failed" and "time limit" in lab.why(job)
