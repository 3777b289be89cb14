"""hold, release, requeue, conditions of `after`, and exit codes that queue a job again."""

from __future__ import annotations

import pytest

from clusterd.core import events as e
from clusterd.core.queueing import admission
from clusterd.errors import ClusterError, UsageError
from clusterd.types import JobId, JobSpec, RankEnd, Reason
from tests.core.conftest import CRASH, OK, Lab


def test_a_held_job_lets_others_pass_until_it_is_released(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    held, _ = lab.submit("held")
    other, _ = lab.submit("other")
    lab.tell(e.JobHeld(**lab.at(), job=held, by="ann"))
    assert lab.why(held) == f"held by ann: clusterd release {held} lets it start"
    lab.run(running)
    lab.finish(running)
    assert (lab.state(held), lab.state(other)) == ("queued", "starting")
    lab.run(other)
    lab.finish(other)
    assert lab.state(held) == "queued"
    lab.tell(e.JobReleased(**lab.at(), job=held, by="ann"))
    assert lab.state(held) == "starting"


def test_a_job_that_ran_before_says_who_holds_it_and_no_more(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.tell(e.JobRequeued(**lab.at(), job=job, by="ann", hold=True))
    lab.stopped(job)
    assert lab.why(job) == f"held by ann: clusterd release {job} lets it start"


def test_a_held_job_gives_up_its_reservation(lab: Lab) -> None:
    lab.host("a", gpus=2)
    long, _ = lab.submit("long")
    lab.run(long)
    wide, _ = lab.submit("wide", devices=2)
    narrow, _ = lab.submit("narrow")
    assert lab.state(narrow) == "queued"
    lab.tell(e.JobHeld(**lab.at(), job=wide, by="ann"))
    assert lab.state(narrow) == "starting"


@pytest.mark.parametrize("hold", [False, True])
def test_a_requeued_command_starts_over(lab: Lab, hold: bool) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    lab.tell(e.JobRequeued(**lab.at(), job=job, by="ann", hold=hold))
    assert lab.state(job) == "stopping"
    lab.stopped(job)
    assert lab.state(job) == ("queued" if hold else "starting")
    if hold:
        lab.tell(e.JobReleased(**lab.at(), job=job, by="ann"))
    assert lab.attempt(job).number == 2


@pytest.mark.parametrize(
    ("condition", "end", "state"),
    [
        ("", OK, "starting"),
        ("", CRASH, "failed"),
        (":any", OK, "starting"),
        (":any", CRASH, "starting"),
        (":failed", OK, "failed"),
        (":failed", CRASH, "starting"),
    ],
)
def test_a_job_starts_after_the_end_that_it_waits_for(lab: Lab, condition: str, end: RankEnd, state: str) -> None:
    lab.host("a", gpus=1)
    first, _ = lab.submit("first")
    lab.run(first)
    second, _ = lab.submit("second", after=(JobId(f"{first}{condition}"),))
    assert "waits for first" in lab.why(second)
    lab.exit(first, end=end)
    lab.stopped(first)
    assert lab.state(second) == state


def test_conditions_are_checked_at_submit(lab: Lab) -> None:
    lab.host("a", gpus=1)
    first, _ = lab.submit("first")

    def find_awaited(text: str) -> tuple[JobId, ...]:
        spec = JobSpec(name="next", command=("true",), after=(JobId(text),))
        return admission.find_awaited(lab.scheduler.state, spec, "")

    assert find_awaited("first:any") == (f"{first}:any",)
    assert find_awaited("first:ok") == (first,)
    with pytest.raises(UsageError, match="'soon' is no condition; there are ok, failed, any, corr"):
        find_awaited("first:soon")
    lab.run(first)
    lab.exit(first, end=CRASH)
    lab.stopped(first)
    assert find_awaited("first:failed") == (f"{first}:failed",)
    with pytest.raises(ClusterError, match="nothing can start after it"):
        find_awaited("first")


def test_an_exit_code_of_retry_on_queues_the_job_again(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(retry_on=(75,))
    for _ in range(3):
        lab.run(job)
        lab.exit(job, end=RankEnd(reason=Reason.EXIT, exit_code=75))
        lab.stopped(job)
        if lab.state(job) == "queued":
            lab.fire(e.Timer(e.TimerKind.RETRY, job))
        assert lab.state(job) == "starting"
    lab.run(job)
    lab.exit(job, end=CRASH)
    lab.stopped(job)
    assert lab.state(job) == "failed"
