"""Tasks of an array: how many run at once, and what names mean them."""

from __future__ import annotations

import pytest

from clusterd.core import events as e
from clusterd.core.queueing import admission
from clusterd.core.queueing.arrays import tasks_of
from clusterd.errors import UsageError
from clusterd.types import ArrayTask, JobId
from tests.core.conftest import CRASH, Lab


def submit_array(lab: Lab, name: str, count: int, most: int) -> list[JobId]:
    first = JobId(str(lab.jobs + 1))
    return [
        lab.submit(f"{name}_{index}", array=ArrayTask(id=first, name=name, index=index, most=most))[0]
        for index in range(count)
    ]


def test_at_most_so_many_tasks_run_at_once(lab: Lab) -> None:
    lab.host("a", gpus=8)
    tasks = submit_array(lab, "net", 5, most=2)
    assert [lab.state(job) for job in tasks] == ["starting"] * 2 + ["queued"] * 3
    assert lab.why(tasks[2]) == "waits for its array: at most 2 of the tasks of net run at once"
    other, _ = lab.submit("other")
    assert lab.state(other) == "starting", "others are not held up"
    lab.run(tasks[0])
    lab.finish(tasks[0])
    assert [lab.state(job) for job in tasks] == ["finished", "starting", "starting", "queued", "queued"]


def test_a_task_that_backs_off_or_is_held_leaves_its_place(lab: Lab) -> None:
    lab.host("a", gpus=8)
    tasks = submit_array(lab, "net", 3, most=1)
    lab.run(tasks[0])
    lab.tell(e.JobHeld(**lab.at(), job=tasks[1], by="ann"))
    lab.exit(tasks[0], end=CRASH)
    lab.stopped(tasks[0])
    assert [lab.state(job) for job in tasks] == ["failed", "queued", "starting"]


def test_the_limit_holds_when_all_tasks_come_at_once(lab: Lab) -> None:
    lab.host("a", gpus=8)
    blocker, _ = lab.submit("blocker", devices=8)
    lab.run(blocker)
    tasks = submit_array(lab, "net", 8, most=3)
    lab.finish(blocker)
    assert [lab.state(job) for job in tasks].count("starting") == 3


def test_tasks_are_found_by_index_and_by_name(lab: Lab) -> None:
    lab.host("a", gpus=1)
    older = submit_array(lab, "net", 2, most=0)
    newer = submit_array(lab, "net", 3, most=0)
    state = lab.scheduler.state
    assert admission.find_job(state, f"{newer[0]}_2", "").id == newer[2]
    assert admission.find_job(state, "net_2", "").id == newer[2]
    assert [job.id for job in tasks_of(state.jobs.values(), "net", "")] == newer
    assert [job.id for job in tasks_of(state.jobs.values(), f"{older[0]}_*", "")] == older
    assert tasks_of(state.jobs.values(), "none", "") == []


def test_nobody_adds_a_task_to_an_array_that_is_not_theirs(lab: Lab) -> None:
    lab.host("a", gpus=1)
    first, _ = submit_array(lab, "net", 2, most=0)
    alone, _ = lab.submit("net")
    state, user = lab.scheduler.state, lab.scheduler.state.jobs[first].spec.user
    admission.refuse_other_array(state, ArrayTask(id=first, name="net", index=2, most=0), user)
    for array, name, by in (
        (first, "net", "mallory"),
        (first, "other", user),
        (alone, "net", user),
        ("99", "net", user),
    ):
        with pytest.raises(UsageError, match=f"there is no array {array} .* of yours"):
            admission.refuse_other_array(state, ArrayTask(id=JobId(array), name=name, index=2, most=0), by)
