"""A dependent job starts when its predecessors finished, and never if one cannot."""

from __future__ import annotations

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.types import JobKind
from tests.core.conftest import CRASH, Lab


def test_it_starts_when_all_before_it_have_finished(lab: Lab) -> None:
    lab.host("a", gpus=4)
    first, _ = lab.submit("prepare")
    second, _ = lab.submit("tokenise")
    third, _ = lab.submit("train", after=(first, second))
    assert lab.state(third) == "queued"
    assert lab.why(third) == "waits for prepare (1, starting) and tokenise (2, starting)"
    for job in (first, second):
        lab.run(job)
    lab.finish(first)
    assert lab.why(third) == "waits for tokenise (2, running)"
    decided = lab.finish(second)
    assert d.LaunchAttempt.match(decided, job=third)


def test_who_waits_for_another_keeps_nobody_waiting(lab: Lab) -> None:
    """First in the queue, by priority; its devices are not kept free for it."""
    lab.host("a", gpus=2)
    first, _ = lab.submit("prepare")
    lab.submit("train", devices=2, priority=9, after=(first,))
    other, decided = lab.submit("other")
    assert d.LaunchAttempt.match(decided, job=other)


def test_what_comes_after_a_job_that_failed_ends_with_it(lab: Lab) -> None:
    """With all that comes after that, in whatever order they are queued."""
    lab.host("a", gpus=1)
    first, _ = lab.submit("prepare")
    second, _ = lab.submit("train", after=(first,))
    third, _ = lab.submit("evaluate", after=(second,))
    lab.run(first)
    lab.exit(first, end=CRASH)
    lab.stopped(first)
    assert [lab.state(job) for job in (first, second, third)] == ["failed"] * 3
    assert lab.why(second) == "it was to start after prepare (1), which failed"
    assert lab.why(third) == "it was to start after train (2), which failed"


def test_a_job_that_is_tried_again_has_not_failed(lab: Lab) -> None:
    lab.host("a", gpus=1)
    first, _ = lab.submit("prepare", retries=1)
    second, _ = lab.submit("train", after=(first,))
    lab.run(first)
    lab.exit(first, end=CRASH)
    lab.stopped(first)
    assert lab.state(second) == "queued"
    lab.run(first)
    assert d.LaunchAttempt.match(lab.finish(first), job=second)


def test_what_comes_after_a_cancelled_job_ends_too(lab: Lab) -> None:
    first, _ = lab.submit("prepare")
    second, _ = lab.submit("train", after=(first,))
    lab.tell(e.JobCancelled(**lab.at(), job=first, by="ann"))
    assert lab.state(second) == "failed"
    assert lab.why(second) == "it was to start after prepare (1), which was cancelled"


def test_a_model_is_not_described_before_its_turn(lab: Lab) -> None:
    """The script may need files that the other job produces."""
    lab.host("a", gpus=2)
    first, _ = lab.submit("prepare")
    second, decided = lab.submit("train", kind=JobKind.ELASTIC, after=(first,))
    assert d.DescribeModel.match(decided, job=second) is None
    lab.run(first)
    assert d.DescribeModel.match(lab.finish(first), job=second)
