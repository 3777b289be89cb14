"""Jobs under accounts of their owners: hosts without a login, lost agents, and reports by account."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import AttemptReport, HostId, JobId, RankReport
from tests.core.conftest import Lab, facts


def log_in(lab: Lab, host: str, account: str, *reports: AttemptReport) -> list[d.Decision]:
    return lab.tell(e.AccountConnected(**lab.at(), host=HostId(host), account=account, attempts=reports))


def refuse(lab: Lab, host: str, account: str, why: str = "no login") -> list[d.Decision]:
    return lab.tell(e.AccountDisconnected(**lab.at(), host=HostId(host), account=account, why=why))


def running(lab: Lab, account: str, **what: object) -> JobId:
    job, _ = lab.submit(account=account, **what)
    lab.run(job)
    return job


def report(lab: Lab, job: JobId) -> AttemptReport:
    attempt = lab.attempt(job)
    ranks = tuple(RankReport(rank=rank, end=None) for rank in attempt.ranks)
    return AttemptReport(job=job, attempt=attempt.number, generation=attempt.generation, ranks=ranks)


def test_a_host_is_offered_once_its_owner_s_agent_answers(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    job, _ = lab.submit(account="ann")
    own, _ = lab.submit()
    assert (lab.state(job), lab.state(own)) == ("queued", "starting")
    refuse(lab, "a", "ann", "ann has no login on a")
    assert lab.scheduler.state.jobs[job].failures.excluded_hosts == {
        "a": "ann has no login on a",
        "b": "the agent of ann is not connected yet",
    }
    log_in(lab, "b", "bob")
    assert lab.state(job) == "queued"
    log_in(lab, "b", "ann")
    assert lab.state(job) == "starting"
    assert lab.attempt(job).hosts == ("b",)


def test_a_login_survives_what_admits_a_host_again(lab_with_two_hosts: Lab) -> None:
    """Hosts that return, or that an operator has cleaned, are tried again, but not without a login."""
    lab = lab_with_two_hosts
    job, _ = lab.submit(account="ann")
    lab.connect("a")
    lab.tell(e.HostUndrained(**lab.at(), host=HostId("b"), by="op"))
    lab.host("c", gpus=4)
    assert lab.state(job) == "queued"
    assert set(lab.scheduler.state.jobs[job].failures.excluded_hosts) == {"a", "b", "c"}
    assert lab.why(job).endswith("the hosts that it may use have 0 GPUs and 0 CPU devices")  # the cluster has others
    lab.tell(e.HostRemoved(**lab.at(), host=HostId("c")))
    assert set(lab.scheduler.state.jobs[job].failures.excluded_hosts) == {"a", "b"}


def test_reports_settle_the_attempts_of_their_account_alone(lab: Lab) -> None:
    lab.host("a", gpus=4)
    log_in(lab, "a", "ann")
    log_in(lab, "a", "bob")
    ann, bob, own = running(lab, "ann"), running(lab, "bob"), running(lab, "")
    mine = report(lab, own)
    lab.connect("a", mine)  # the daemon's own agent knows nothing of the others
    assert [lab.state(job) for job in (ann, bob, own)] == ["running"] * 3
    log_in(lab, "a", "ann")  # and ann's agent knows nothing of ann's job any more
    assert [lab.state(job) for job in (bob, own)] == ["running"] * 2
    assert lab.state(ann) != "running"


def test_an_agent_that_returns_in_time_costs_nothing(lab: Lab) -> None:
    lab.host("a", gpus=1)
    log_in(lab, "a", "ann")
    job = running(lab, "ann")
    refuse(lab, "a", "ann", "its agent was killed")
    assert Timer(TimerKind.ACCOUNT_LOST, "a ann") in lab.scheduler.state.timers
    log_in(lab, "a", "ann", report(lab, job))
    assert lab.state(job) == "running"
    assert Timer(TimerKind.ACCOUNT_LOST, "a ann") not in lab.scheduler.state.timers


def test_ranks_of_a_lost_agent_are_given_up_and_their_devices_left_out(lab_with_two_hosts: Lab) -> None:
    lab = lab_with_two_hosts
    log_in(lab, "a", "ann")
    log_in(lab, "b", "ann")
    job = running(lab, "ann", devices=4)
    host = str(lab.attempt(job).hosts[0])
    refuse(lab, host, "ann", "its quota is full")
    lab.fire(Timer(TimerKind.ACCOUNT_LOST, f"{host} ann"))
    state = lab.scheduler.state
    lost = state.jobs[job].attempts[0]
    assert lost.state.value == "ended"
    assert "its quota is full" in lost.stop.why
    assert all(device.foreign for device in state.hosts[HostId(host)].devices), "its ranks may still run there"
    later = state.jobs[job].not_before_s
    lab.fire(Timer(TimerKind.RETRY, job))
    assert lab.now_s >= later
    assert lab.attempt(job).hosts == ({"a": "b", "b": "a"}[host],)


def test_a_restarted_daemon_waits_for_the_agents_of_accounts(lab: Lab) -> None:
    lab.host("a", gpus=2)
    log_in(lab, "a", "ann")
    job = running(lab, "ann")
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    lab.tell(e.HostConnected(**lab.at(), host=HostId("a"), facts=facts("a", gpus=2)))
    assert lab.state(job) == "running"
    waits, _ = lab.submit(account="ann")
    assert lab.state(waits) == "queued"
    log_in(lab, "a", "ann", report(lab, job))
    assert (lab.state(job), lab.state(waits)) == ("running", "starting")


def test_a_lost_host_takes_the_jobs_of_all_accounts(lab: Lab) -> None:
    lab.host("a", gpus=2)
    log_in(lab, "a", "ann")
    job = running(lab, "ann")
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="no route"))
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    attempt = lab.scheduler.state.jobs[job].attempts[0]
    assert attempt.state.value == "ended"
    assert "a is lost" in attempt.stop.why


def test_devices_of_a_lost_host_wait_for_the_accounts_whose_ranks_were_there(lab: Lab) -> None:
    """The host is back before the account's agent: its ranks may still run."""
    lab.host("a", gpus=2)
    log_in(lab, "a", "ann")
    job = running(lab, "ann", devices=1)
    held, lost = lab.attempt(job).devices, report(lab, job)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    refuse(lab, "a", "ann", "cable")
    lab.fire(Timer(TimerKind.HOST_LOST, "a"))
    lab.connect("a")
    other, _ = lab.submit("other", devices=1)
    assert lab.attempt(other).devices != held
    third, _ = lab.submit("third", devices=1)
    assert lab.state(third) == "queued"
    log_in(lab, "a", "ann", lost)
    assert lab.state(third) == "queued", "its ranks are there, and are stopped"
    log_in(lab, "a", "ann")
    assert lab.attempt(third).devices == held
