"""Resolution of a name that several jobs have."""

from __future__ import annotations

import pytest

from clusterd.core.queueing.admission import find_job, find_own_job
from clusterd.errors import ClusterError, UsageError
from tests.core.conftest import Lab


@pytest.fixture
def lab(lab: Lab) -> Lab:
    """Jobs called train: 1 of ann, over; 2 of ann, running; 3 of bob, running. And 4, trainer, of ann."""
    lab.host("a", gpus=4)
    for name, user in (("train", "ann"), ("train", "ann"), ("train", "bob"), ("trainer", "ann")):
        job, _ = lab.submit(name, user=user)
        lab.run(job)
        if job == "1":
            lab.finish(job)
    return lab


@pytest.mark.parametrize(
    ("text", "user", "meant"),
    [
        ("train", "ann", "2"),  # not the one that is over, nor the newer one of somebody else
        ("train", "bob", "3"),
        ("3", "eve", "3"),
        ("1", "ann", "1"),
        ("traine", "ann", "4"),
        ("tra", "bob", "3"),  # all of bob's that begin so have one name
    ],
)
def test_ones_own_job_comes_first_then_one_that_is_not_over(lab: Lab, text: str, user: str, meant: str) -> None:
    assert find_job(lab.scheduler.state, text, user).id == meant


def test_of_jobs_that_are_all_over_the_newest_is_meant(lab: Lab) -> None:
    lab.finish(find_job(lab.scheduler.state, "2", "ann").id)
    assert find_job(lab.scheduler.state, "train", "ann").id == "2"


def test_several_names_are_several_jobs(lab: Lab) -> None:
    with pytest.raises(UsageError, match="could be train, trainer"):
        find_job(lab.scheduler.state, "tra", "ann")


@pytest.mark.parametrize("text", ["train", "trainer", "tra"])
def test_a_name_never_means_somebody_elses_job(lab: Lab, text: str) -> None:
    """Regression: `logs NAME` of who has no job of that name printed the newest one of another person."""
    with pytest.raises(UsageError, match=r"not yours: if it is meant, give its id|no job 'tra' of yours"):
        find_job(lab.scheduler.state, text, "eve")


def test_an_operator_names_somebody_elses_job_by_its_id(lab: Lab) -> None:
    """A bare name that two have must not end the work of the wrong one."""
    state = lab.scheduler.state
    with pytest.raises(UsageError, match=r"train is bob's, not yours: if it is meant, give its id, 3"):
        find_own_job(state, "train", "root", is_operator=True)
    assert find_own_job(state, "3", "root", is_operator=True).id == "3"
    assert find_own_job(state, "train", "bob", is_operator=False).id == "3"
    with pytest.raises(ClusterError, match="is bob's: ask them"):
        find_own_job(state, "3", "ann", is_operator=False)


def test_the_beginning_of_a_name_ends_no_job(lab: Lab) -> None:
    """Regression: `cancel train`, of a job that was not there, ended train2."""
    state = lab.scheduler.state
    assert find_own_job(state, "traine", "ann", is_operator=False).id == "4"
    with pytest.raises(UsageError, match=r"no job 'traine' of yours, but trainer: .* its whole name, or its id, 4"):
        find_own_job(state, "traine", "ann", is_operator=False, ends=True)
    for text in ("trainer", "4"):
        assert find_own_job(state, text, "ann", is_operator=False, ends=True).id == "4"
