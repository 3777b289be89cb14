"""Changes of what a submitted job asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.queueing.dependencies import awaits
from clusterd.core.queueing.edits import described, refused_now
from clusterd.plans.plan import Plan
from clusterd.types import JobId
from tests.core.conftest import Lab


def edit(lab: Lab, job: JobId, **changes: Any) -> list[d.Decision]:
    """Apply an edit as the verb does, with the public names of resources."""
    spec = lab.scheduler.state.jobs[job].spec
    resources = replace(spec.resources, **changes.pop("resources", {}))
    after = replace(spec, **changes, resources=resources)
    return lab.tell(e.JobEdited(**lab.at(), job=job, spec=after, what=described(spec, after), by="ann"))


def test_a_queued_job_that_asks_for_less_starts(lab: Lab) -> None:
    lab.host("a", gpus=2)
    first, _ = lab.submit("first")
    lab.run(first)
    wide, _ = lab.submit("wide", devices=2)
    assert lab.state(wide) == "queued"
    edit(lab, wide, resources={"devices": 1})
    assert lab.state(wide) == "starting"
    assert len(lab.attempt(wide).devices) == 1


def test_a_new_request_gives_up_the_reservation_of_the_old_one(lab: Lab) -> None:
    lab.host("a", gpus=2)
    long, _ = lab.submit("long")
    lab.run(long)
    wide, _ = lab.submit("wide", devices=2)
    narrow, _ = lab.submit("narrow")
    assert lab.scheduler.state.reservation is not None
    assert lab.state(narrow) == "queued"
    edit(lab, wide, after=(long,))
    assert lab.state(narrow) == "starting"


def test_a_higher_priority_goes_first(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    lab.run(running)
    first, _ = lab.submit("first")
    second, _ = lab.submit("second")
    edit(lab, second, priority=5)
    lab.finish(running)
    assert (lab.state(first), lab.state(second)) == ("queued", "starting")


def test_a_running_job_is_ended_by_its_new_time_limit(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=3600.0)
    lab.run(job)
    timer = Timer(TimerKind.LIMIT, job)
    started_s = lab.attempt(job).started_s
    edit(lab, job, time_limit_s=7200.0)
    assert lab.scheduler.state.timers[timer] == started_s + 7200.0
    edit(lab, job, time_limit_s=None)
    assert timer not in lab.scheduler.state.timers
    edit(lab, job, time_limit_s=600.0)
    lab.fire(timer)
    assert lab.state(job) == "stopping"
    assert lab.why(job) == "its time limit of 10m00s is over"


def test_devices_of_a_job_that_has_started_stay(lab: Lab) -> None:
    lab.host("a", gpus=2)
    job, _ = lab.submit()
    spec = lab.scheduler.state.jobs[job].spec
    wider = replace(spec, name="other", priority=3, resources=replace(spec.resources, devices=2))
    assert refused_now(lab.scheduler.state.jobs[job], wider) == ["name", "devices"]
    edit(lab, job, resources={"devices": 2})
    assert lab.scheduler.state.jobs[job].spec == spec


def test_no_change_of_a_running_job_goes_unnoticed(lab: Lab) -> None:
    """Regression: jobs beside it, and plans, changed without a word, since only some keys were compared."""
    lab.host("a", gpus=2)
    job, _ = lab.submit()
    lab.run(job)
    spec = lab.scheduler.state.jobs[job].spec
    changed = replace(spec, preemptible=True, resources=replace(spec.resources, share=2, plans=(Plan(dp=2),)))
    assert refused_now(lab.scheduler.state.jobs[job], changed) == ["preemptible", "share", "plans"]
    assert "share 1 -> 2" in described(spec, changed)


def test_an_edit_is_told_in_words(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit(time_limit_s=3600.0)
    spec = lab.scheduler.state.jobs[job].spec
    resources = replace(spec.resources, devices=2, kind="cuda", device_name="a100")
    after = replace(spec, name="new", time_limit_s=None, resources=resources)
    assert described(spec, after) == "name job -> new, time 1h00m -> none, devices 1 -> 2 GPUs, gpu_type any -> a100"


def test_jobs_do_not_wait_for_each_other(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit()
    first, _ = lab.submit("first")
    second, _ = lab.submit("second", after=(first,))
    third, _ = lab.submit("third", after=(JobId(f"{second}:any"),))
    state = lab.scheduler.state
    assert awaits(replace(state.jobs[first].spec, after=(third,)), first, state.jobs) == "third (4)"
    assert awaits(replace(state.jobs[first].spec, after=(running,)), first, state.jobs) is None


def test_an_edit_is_replayed(lab: Lab, replayed: Any) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)
    edit(lab, job, time_limit_s=60.0, priority=2)
    assert replayed(lab).state == lab.scheduler.state
