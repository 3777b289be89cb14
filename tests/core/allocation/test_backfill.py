"""Reservations: what is kept idle for the first waiting job, who passes it, and the start that is promised to it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.reservations import Reservation
from clusterd.plans.plan import Plan
from clusterd.projection import promise_row
from clusterd.types import HostId, JobId, JobKind
from tests.core.allocation.test_device_claims import HOUR, claim
from tests.core.allocation.test_fair_waiting import pass_time
from tests.core.conftest import GIB, Lab
from tests.core.drawn_queue import Choose, DrawnQueue
from tests.core.policies.test_default import known, progress, submit

EVENTS = 12
"""Of a drawn case."""


def run_case(choose: Choose[Any]) -> DrawnQueue:
    queue = DrawnQueue(choose)
    for _ in range(EVENTS):
        queue.step()
    assert queue.keeps_its_promise()
    return queue


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nobody_waits_in_vain_and_promises_stand(data: st.DataObject) -> None:
    """No device is idle while a waiting job could run on it to its known end without delaying the reserved job."""
    run_case(lambda options: data.draw(st.sampled_from(options)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seeds", [range(200), range(200, 10_000)], ids=["few", "many"])
def test_nobody_waits_in_vain_in_cases_by_seed(seeds: range) -> None:
    cases = [run_case(random.Random(seed).choice) for seed in seeds]
    assert sum(case.promises for case in cases) > len(seeds)
    assert sum(case.checks for case in cases) > 10 * len(seeds)


def reservation(lab: Lab) -> Reservation:
    found = lab.scheduler.state.reservation
    assert found is not None
    return found


def running(lab: Lab, name: str, **what: Any) -> JobId:
    job, _ = lab.submit(name, **what)
    lab.run(job)
    return job


def run_briefly(lab: Lab) -> None:
    """Let two jobs of ann run for a minute each: so long is expected of her next one."""
    for _ in range(2):
        brief = running(lab, "brief", user="ann")
        lab.now_s += 60.0
        lab.finish(brief)


def test_a_host_is_used_until_its_claim_begins(lab: Lab) -> None:
    """The wide job can start there only after the claim: short ones need not wait for it."""
    lab.host("local0", gpus=2)
    lab.host("local1", gpus=2)
    claim(lab, "local0:gpu0", "local0:gpu1", begin_s=2 * HOUR, for_s=10 * HOUR)
    running(lab, "busy", time_limit_s=HOUR, hosts=(HostId("local1"),))
    lab.now_s += 0.75 * HOUR
    wide, _ = lab.submit("wide", devices=2)
    shorts = [lab.submit("short", time_limit_s=HOUR / 2)[0] for _ in range(3)]
    assert [lab.state(job) for job in (wide, *shorts)] == ["queued", "starting", "starting", "queued"]
    assert {lab.attempt(job).devices[0] for job in shorts[:2]} == {"local0:gpu0", "local0:gpu1"}
    assert "reserved for wide" in lab.why(shorts[2]), "on the other host it would end too late"


def test_a_reservation_moves_to_another_host_for_a_job_that_needs_this_one(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    claim(lab, "a:gpu0", "b:gpu0", for_s=HOUR)
    wide, _ = lab.submit("wide", devices=2)
    bound, _ = lab.submit("bound", hosts=(HostId("a"),))
    other, _ = lab.submit("other")
    assert [lab.state(job) for job in (wide, bound, other)] == ["queued", "starting", "queued"]


def test_memory_beside_the_reserved_devices_is_kept(lab: Lab) -> None:
    lab.host("a", gpus=3)
    running(lab, "busy", time_limit_s=HOUR)
    wide, _ = lab.submit("wide", devices=2, memory_bytes=200 * GIB, hosts=(HostId("a"),))
    assert lab.state(wide) == "starting"
    lab.finish(wide)
    running(lab, "large", time_limit_s=HOUR, memory_bytes=100 * GIB)
    wide, _ = lab.submit("wide", devices=1, memory_bytes=200 * GIB)
    endless, _ = lab.submit("endless", devices=1, memory_bytes=100 * GIB)
    short, _ = lab.submit("short", devices=1, memory_bytes=100 * GIB, time_limit_s=HOUR / 2)
    assert [lab.state(job) for job in (wide, endless, short)] == ["queued", "queued", "starting"]


def test_jobs_that_start_in_the_same_pass_are_waited_for(lab: Lab) -> None:
    """A host comes back, and all that waits is looked at in one pass."""
    lab.submit("first", time_limit_s=HOUR)
    wide, _ = lab.submit("wide", devices=2)
    endless, _ = lab.submit("endless")
    lab.host("a", gpus=2)
    assert [lab.state(job) for job in (wide, endless)] == ["queued", "queued"]
    assert reservation(lab).job == wide


def test_jobs_of_different_containers_are_not_alike(lab: Lab) -> None:
    """A job that no host can run says nothing about one with the same request in another runtime."""
    lab.tell(e.HostAdded(**lab.at(), host=HostId("a")))
    lab.submit("image", container="podman:image")
    plain, _ = lab.submit("plain")
    lab.connect("a", gpus=1)
    assert lab.state(plain) == "starting"


def test_devices_that_are_claimed_soon_are_not_taken_from_others(lab: Lab) -> None:
    """Neither suspended nor shrunk: the urgent job has no limit, and the claim begins in an hour."""
    lab.host("a", gpus=2)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    net, _ = submit(lab, "net", 30_000, devices=2)
    progress(lab, net, 10)
    lab.now_s += 300.0
    claim(lab, "a:gpu0", "a:gpu1", begin_s=HOUR, for_s=HOUR)
    lab.submit("urgent", devices=2, priority=5)
    assert lab.state(net) == "running"
    lab.submit("brief", devices=2, priority=5, time_limit_s=HOUR / 2)
    assert lab.state(net) == "stopping"


def test_once_the_expected_start_has_passed_only_the_promised_one_keeps_devices(lab: Lab) -> None:
    """Runs of a minute are expected of this user, and this one lasts for hours."""
    lab.host("a", gpus=2)
    run_briefly(lab)
    running(lab, "long", user="ann", time_limit_s=10 * HOUR)
    wide, _ = lab.submit("wide", devices=2)
    half, _ = lab.submit("half", time_limit_s=HOUR / 2)
    assert lab.state(half) == "queued", "the start is expected in a minute"
    promised_s = reservation(lab).latest_s
    pass_time(lab, 120.0)
    endless, _ = lab.submit("endless")
    assert [lab.state(job) for job in (wide, half, endless)] == ["queued", "starting", "queued"]
    assert reservation(lab).latest_s == promised_s


def test_a_start_is_promised_anew_where_the_awaited_job_gets_another_limit(lab: Lab) -> None:
    """The expected start, in a minute, is the same before and after."""
    lab.host("a", gpus=2)
    run_briefly(lab)
    long = running(lab, "long", user="ann", time_limit_s=10 * HOUR)
    lab.submit("wide", devices=2)
    before = reservation(lab)
    spec = lab.scheduler.state.jobs[long].spec
    lab.tell(e.JobEdited(**lab.at(), job=long, spec=replace(spec, time_limit_s=HOUR), what="time_limit", by="ann"))
    after = reservation(lab)
    assert before.latest_s is not None and after.latest_s == pytest.approx(before.latest_s - 9 * HOUR, abs=5.0)
    assert after.at_s == pytest.approx(before.at_s, abs=5.0)


def test_a_promise_stands_while_the_devices_are_freed(lab: Lab) -> None:
    """The awaited job ends host by host; the next one in the queue gets neither its devices nor its cores."""
    for name in ("a", "b"):
        lab.host(name, gpus=1, cores=4)
    first = running(lab, "first", devices=2, nodes=2, time_limit_s=HOUR)
    wide, _ = lab.submit("wide", devices=2, nodes=2, cpus=8)
    promise = reservation(lab)
    others = [lab.submit("other", devices=0, cpus=2, hosts=(HostId(name),))[0] for name in ("a", "b")]
    lab.exit(first, 0)
    lab.exit(first, 1)
    assert (lab.state(first), reservation(lab)) == ("stopping", promise)
    lab.stopped(first)
    assert [lab.state(job) for job in (wide, *others)] == ["starting", "queued", "queued"]


@pytest.mark.parametrize("guaranteed", [False, True])
def test_a_job_that_passed_a_promised_one_gives_its_devices_back_when_that_is_due(lab: Lab, guaranteed: bool) -> None:
    """It was expected to end in time, and trains more slowly than its model said."""
    lab.host("a", gpus=2)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    command = running(lab, "command", time_limit_s=HOUR)
    wide, _ = lab.submit("wide", devices=2)
    net, _ = submit(lab, "net", 400, devices=1, guaranteed=guaranteed)
    assert lab.state(net) == ("queued" if guaranteed else "starting"), "a guarantee cannot be taken back"
    if not guaranteed:
        progress(lab, net, 10)
        promised_s = reservation(lab).latest_s
        pass_time(lab, HOUR / 2)
        assert (lab.state(net), reservation(lab).latest_s) == ("running", promised_s)
        pass_time(lab, HOUR / 2 - 30.0)
        assert lab.state(net) == "stopping"
        assert "wide: its start was promised" in lab.scheduler.state.jobs[net].reason
        lab.stopped(net)
        lab.fire(Timer(TimerKind.LIMIT, command))
        lab.stopped(command)
        assert (lab.state(wide), lab.state(net)) == ("starting", "queued")


def test_nobody_who_comes_later_with_the_same_priority_puts_a_promise_off(lab: Lab) -> None:
    """Neither people who wait for their shell, nor jobs that have waited out of proportion."""
    lab.host("a", gpus=2)
    running(lab, "busy", time_limit_s=4 * HOUR)
    wide, _ = lab.submit("wide", devices=2)
    small, _ = lab.submit("small", time_limit_s=5 * HOUR)
    promised_s = reservation(lab).latest_s
    shell, _ = lab.submit("shell", interactive=True)
    pass_time(lab, 3 * HOUR)
    assert [lab.state(job) for job in (wide, small, shell)] == ["queued"] * 3
    assert (reservation(lab).job, reservation(lab).latest_s) == (wide, promised_s)
    urgent, _ = lab.submit("urgent", priority=1)
    assert lab.state(urgent) == "starting"


@pytest.mark.parametrize("limit_s", [None, HOUR])
def test_a_start_is_promised_only_where_time_limits_give_it(lab: Lab, limit_s: float | None) -> None:
    lab.host("a", gpus=1)
    running(lab, "busy", time_limit_s=limit_s)
    wide, _ = lab.submit("wide")
    row = promise_row(wide, lab.scheduler.state)
    assert row is not None and row.after == ("busy",)
    if limit_s is None:
        assert (row.at_s, row.latest_s) == (None, None), "nothing tells the end of a command without a limit"
    else:
        assert row.at_s is not None
        assert row.latest_s == pytest.approx(row.at_s + 30.0), "the grace period of its stop"


def test_a_start_after_earlier_runs_is_expected_and_not_promised(lab: Lab) -> None:
    lab.host("a", gpus=1)
    for _ in range(3):
        nightly = running(lab, "nightly")
        lab.now_s += 600.0
        lab.finish(nightly)
    running(lab, "nightly")
    wide, _ = lab.submit("wide")
    row = promise_row(wide, lab.scheduler.state)
    assert row is not None and row.latest_s is None
    assert row.at_s == pytest.approx(lab.now_s + 600.0, abs=5.0)


def test_a_job_is_not_stopped_for_a_start_that_is_promised_only_now(lab: Lab) -> None:
    """A job that runs already has passed nobody: it owes nothing, also where its limit is near."""
    lab.host("a", gpus=1)
    first = running(lab, "trains", kind=JobKind.CHECKPOINTABLE, time_limit_s=600.0, plans=(Plan(dp=1),))
    lab.now_s += 595.0
    second, decided = lab.submit("urgent", time_limit_s=600.0)
    assert reservation(lab).job == second and reservation(lab).latest_s is not None
    assert not d.StopAttempt.match(decided, job=first)
    assert lab.state(first) == "running"
