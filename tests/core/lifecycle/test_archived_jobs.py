"""Jobs that ended long ago leave the state, with what only they needed."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.performance_table import PerformanceTable
from clusterd.types import AttemptReport, HostId, JobId, JobKind, RankReport
from tests.core.conftest import OK, Lab

A = HostId("a")


def archive(lab: Lab, *jobs: str) -> None:
    lab.tell(e.JobsArchived(**lab.at(), jobs=tuple(map(JobId, jobs))))


def test_the_table_of_a_model_goes_with_its_last_job(lab: Lab) -> None:
    jobs = [lab.submit(kind=JobKind.ELASTIC)[0] for _ in range(2)]
    for job in jobs:
        lab.tell(e.ModelDescribed(**lab.at(), job=job, shape={}, model="m"))
    lab.tell(e.SpeedLearned(**lab.at(), model="m", table=PerformanceTable(())))
    for job in jobs:
        assert list(lab.scheduler.state.performance_tables) == ["m"]
        lab.tell(e.JobCancelled(**lab.at(), job=job))
        archive(lab, job)
    assert lab.scheduler.state.performance_tables == {}


def test_a_job_that_is_not_over_stays(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    waiting, _ = lab.submit()
    archive(lab, running, waiting, "99")
    assert list(lab.scheduler.state.jobs) == [running, waiting]


def test_an_agent_s_records_of_an_archived_job_need_nothing(lab: Lab) -> None:
    """It keeps them with the logs, and reports them at every connection; nothing is stopped or adopted."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.finish(job)
    archive(lab, job)
    assert lab.scheduler.state.jobs == {}
    ended = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=OK),))
    lab.tell(e.HostDisconnected(**lab.at(), host=A, why="cable"))
    assert lab.connect("a", ended) == []
    host = lab.scheduler.state.hosts[A]
    assert (host.unusable, host.orphans, host.unknown_attempts) == (None, {}, {})


def test_a_lost_host_may_still_run_ranks_of_it(lab: Lab) -> None:
    """The host comes back after weeks: what it runs of a job that ended elsewhere is stopped, not taken for new."""
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.tell(e.HostDisconnected(**lab.at(), host=A, why="cable"))
    lab.fire(e.Timer(e.TimerKind.HOST_LOST, A))
    lab.tell(e.JobCancelled(**lab.at(), job=job))
    assert lab.state(job) == "cancelled"
    archive(lab, job)
    assert list(lab.scheduler.state.jobs) == [job]
