"""Tenants of a cluster: starts, growth and migrations respect quotas; shares order the queue."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.fair_share import budgets, weight
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.criterion import Criterion
from clusterd.plans.plan import Plan
from clusterd.types import JobId, JobKind, Tenant
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import SHAPE, progress, running


def shared(lab: Lab, **tenants: Tenant) -> None:
    """The daemon starts with these agreements."""
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, tenants=tenants))


def learned(lab: Lab) -> None:
    """A model that is twice as fast on twice the devices."""
    rows = tuple(
        Estimate(plan=Plan(dp=n), device_type="cuda", shape=(n,), step_time_s=s, lower_s=s, upper_s=s)
        for n, s in ((1, 8.0), (2, 4.0), (4, 2.0))
    )
    lab.tell(e.SpeedLearned(**lab.at(), model="m", table=PerformanceTable(rows, measured=3)))


def test_a_tenant_with_all_its_devices_in_use_waits_and_holds_up_nobody(lab: Lab) -> None:
    shared(lab, vision=Tenant(quota=2))
    lab.host("a", gpus=4)
    first, _ = lab.submit(devices=2, tenant="vision")
    lab.run(first)
    second, decided = lab.submit(devices=1, tenant="vision")
    assert d.LaunchAttempt.match(decided, job=second) is None
    assert lab.why(second) == "tenant vision may hold 2 devices, and holds 2: 1 more are wanted"
    other, decided = lab.submit(devices=2, tenant="speech")
    assert d.LaunchAttempt.match(decided, job=other)
    lab.finish(first)
    assert lab.scheduler.state.jobs[second].attempt is not None


def test_a_job_that_could_use_more_gets_what_its_tenant_may_have(lab: Lab) -> None:
    """Neither start nor growth passes the quota, though the cluster is idle."""
    shared(lab, vision=Tenant(quota=2))
    lab.host("a", gpus=4)
    learned(lab)
    job, _ = lab.submit(kind=JobKind.ELASTIC, devices=4, tenant="vision")
    decided = lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE, model="m"))
    launch = d.LaunchAttempt.match(decided, job=job)
    assert launch is not None and launch.plan == Plan(dp=2)
    lab.run(job)
    for step in range(5, 60, 5):
        lab.now_s += 60.0
        assert d.StartMigration.match(progress(lab, job, step), job=job) is None


def test_a_move_by_hand_keeps_the_quota(lab: Lab) -> None:
    shared(lab, vision=Tenant(quota=2))
    lab.host("a", gpus=4)
    job = running(lab, devices=2, tenant="vision")
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=4), by="ann"))
    assert "tenant vision may hold 2 devices" in lab.why(job)
    assert lab.attempt(job).migration is None


def test_the_tenant_below_its_share_is_next(lab: Lab) -> None:
    """Two thirds are agreed on for one of them; it waits with less, and comes before whoever came earlier."""
    shared(lab, large=Tenant(share=2.0))
    lab.host("a", gpus=4)
    held = [lab.submit(devices=2, tenant=tenant)[0] for tenant in ("large", "small")]
    for job in held:
        lab.run(job)
    early, _ = lab.submit(devices=2, tenant="small")
    late, _ = lab.submit(devices=2, tenant="large")
    lab.finish(held[0])
    assert [lab.scheduler.state.jobs[JobId(j)].attempt is not None for j in (early, late)] == [False, True]


def test_a_job_beyond_its_tenants_quota_is_told_that_it_is(lab: Lab) -> None:
    """Regression: the message read as if waiting would help."""
    shared(lab, vision=Tenant(quota=1))
    lab.host("a", gpus=4)
    job, _ = lab.submit(devices=2, tenant="vision")
    assert lab.why(job) == "needs 2 devices at once, and tenant vision may hold 1 in all"


def test_a_user_with_all_devices_that_are_allowed_waits_and_holds_up_nobody(lab: Lab) -> None:
    """Also where the jobs are alike but for their users; a reload changes the limit."""
    limits = {"": 2, "bob": 3}
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, device_limits=limits))
    lab.host("a", gpus=6)
    first, _ = lab.submit(devices=2, user="ann")
    lab.run(first)
    waits, decided = lab.submit(devices=1, user="ann")
    assert d.LaunchAttempt.match(decided, job=waits) is None
    assert lab.why(waits) == "ann may hold 2 devices, and holds 2: 1 more are wanted"
    other, decided = lab.submit(devices=1, user="bob")
    assert d.LaunchAttempt.match(decided, job=other)
    never, _ = lab.submit(devices=4, user="bob")
    assert lab.why(never) == "needs 4 devices at once, and bob may hold 3 in all"
    decided = lab.tell(e.SettingsReloaded(**lab.at(), tenants={}, device_limits={"": 3}))
    assert d.LaunchAttempt.match(decided, job=waits)
    assert lab.why(never) == "needs 4 devices at once, and bob may hold 3 in all"


WEEK_S = 7 * 86400.0


def by_half_life(lab: Lab, **tenants: Tenant) -> None:
    """The daemon starts, and what was used counts half after a week."""
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, tenants=tenants, half_life_s=WEEK_S))


def worked(lab: Lab, for_s: float, **what: Any) -> None:
    """A job has run for some time, and is over."""
    job, _ = lab.submit(**what)
    lab.run(job)
    lab.now_s += for_s
    lab.finish(job)


def test_of_users_the_one_who_has_used_less_lately_is_next_and_why_says_so(lab: Lab) -> None:
    """Two weeks later the use of an hour by the one is a quarter, less than the half hour of the other."""
    by_half_life(lab)
    lab.host("a", gpus=1)
    worked(lab, 3600.0, user="ann")
    for later_s, other_s, first in ((0.0, 0.0, "bob"), (2 * WEEK_S, 1800.0, "ann")):
        lab.now_s += later_s
        if other_s:
            worked(lab, other_s, user="bob")
        held, _ = lab.submit(user="cid")
        lab.run(held)
        waiting = {user: lab.submit(user=user)[0] for user in (("ann", "bob") if first == "bob" else ("bob", "ann"))}
        other = next(job for user, job in waiting.items() if user != first)
        place = lab.scheduler.state.order[other]
        assert (place.after, place.criterion) == (waiting[first], Criterion.USER_SHARE)
        for job in (held, waiting[first], other):
            lab.run(job)
            lab.finish(job)


def test_of_tenants_the_one_who_has_used_less_of_its_share_is_next(lab: Lab) -> None:
    """They hold nothing now; the one has four fifths of what was used lately, and three quarters are its share."""
    by_half_life(lab, large=Tenant(share=3.0))
    lab.host("a", gpus=1)
    worked(lab, 4000.0, tenant="large")
    worked(lab, 1000.0, tenant="small")
    held, _ = lab.submit(tenant="large")
    lab.run(held)
    early, late = (lab.submit(tenant=tenant)[0] for tenant in ("large", "small"))
    assert lab.scheduler.state.order[early].criterion is Criterion.TENANT_SHARE
    lab.finish(held)
    assert (lab.state(early), lab.state(late)) == ("queued", "starting")


@given(
    stints=st.lists(st.tuples(st.floats(1e4, 1e6), st.integers(0, 4), st.floats(-1e5, 1e5)), min_size=1, max_size=8),
    cuts=st.integers(1, 4),
)
def test_use_does_not_depend_on_how_often_it_is_counted_nor_on_the_clock(
    stints: list[tuple[float, int, float]], cuts: int
) -> None:
    """Seconds, devices, and by how much the clock of the head node is set afterwards."""
    found = []
    for parts in (1, cuts):
        lab, jobs = Lab(), list[JobId]()
        lab.now_s = 1e7
        by_half_life(lab)
        lab.host("a", gpus=4)
        expected = 0.0
        for for_s, devices, set_by_s in stints:
            if devices:
                jobs = [lab.submit(devices=devices, user="ann")[0]]
                lab.run(jobs[0])
            for _ in range(parts):
                lab.now_s += for_s / parts
                lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
            expected = expected * 0.5 ** (for_s / WEEK_S)
            expected += devices * WEEK_S / math.log(2.0) * (1.0 - 0.5 ** (for_s / WEEK_S))
            if devices:
                lab.finish(jobs[0])
            lab.now_s += set_by_s
            lab.tell(e.ClockSet(**lab.at(), by_s=set_by_s))
        users = lab.scheduler.state.used.get("default", {})
        found.append(users["ann"].device_s if users else 0.0)
        assert found[-1] == pytest.approx(expected, rel=1e-3, abs=300.0), (
            "each event comes a second after the one before"
        )


DECEMBER_S = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


def tick(lab: Lab) -> list[d.Decision]:
    return lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))


def test_a_user_whose_month_is_used_up_starts_nothing_until_the_next_and_others_do(lab: Lab) -> None:
    """A job that runs goes on."""
    lab.now_s = DECEMBER_S - 10 * 3600.0
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, budgets={"": 4.0, "bob": 1000.0}))
    lab.host("a", gpus=6)
    running, _ = lab.submit(devices=2, user="ann")
    lab.run(running)
    lab.now_s += 1.9 * 3600.0
    early, decided = lab.submit(devices=1, user="ann")
    assert d.LaunchAttempt.match(decided, job=early) is not None, "a fifth of an hour is left"
    lab.run(early)
    lab.now_s += 3600.0
    late, decided = lab.submit(devices=1, user="ann")
    assert d.LaunchAttempt.match(decided, job=late) is None
    why = "ann has used the 4 device-hours of 2026-11: the next month begins on 2026-12-01, 00:00 UTC"
    assert lab.why(late) == why
    assert [lab.state(job) for job in (running, early)] == ["running", "running"]
    other, decided = lab.submit(devices=1, user="bob")
    assert d.LaunchAttempt.match(decided, job=other) is not None
    lab.now_s = DECEMBER_S - 60.0
    assert d.LaunchAttempt.match(tick(lab), job=late) is None
    lab.now_s = DECEMBER_S
    assert d.LaunchAttempt.match(tick(lab), job=late) is not None


def test_the_budget_of_a_tenant_is_that_of_all_its_users(lab: Lab) -> None:
    lab.now_s = DECEMBER_S
    shared(lab, vision=Tenant(device_hours=2.0))
    lab.host("a", gpus=2)
    worked(lab, 3600.0, user="ann", tenant="vision")
    worked(lab, 3700.0, user="bob", tenant="vision")
    job, _ = lab.submit(user="cid", tenant="vision")
    assert lab.why(job).startswith("tenant vision has used the 2 device-hours of 2026-12")
    free, decided = lab.submit(user="cid")
    assert d.LaunchAttempt.match(decided, job=free) is not None
    settings = {"tenants": {"vision": Tenant(device_hours=3.0)}, "device_limits": {}}
    assert d.LaunchAttempt.match(lab.tell(e.SettingsReloaded(**lab.at(), **settings)), job=job) is not None


@given(
    stints=st.lists(st.tuples(st.floats(1e3, 2e6), st.integers(0, 4)), min_size=1, max_size=8), cuts=st.integers(1, 5)
)
def test_hours_of_a_month_are_those_held_since_it_began_by_weight(stints: list[tuple[float, int]], cuts: int) -> None:
    lab = Lab()
    lab.now_s = DECEMBER_S - 40 * 86400.0
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, budgets={"ann": 1e9}, device_weights={"CUD": 2.5}))
    lab.host("a", gpus=4)
    spans: list[tuple[float, float, int]] = []
    for for_s, devices in stints:
        job = lab.submit(devices=devices, user="ann")[0] if devices else None
        begin_s = lab.now_s
        if job is not None:
            lab.run(job)
        for _ in range(cuts):
            lab.now_s += for_s / cuts
            tick(lab)
        if job is not None:
            lab.finish(job)
            spans.append((begin_s, lab.now_s, devices))
    began = datetime.fromtimestamp(lab.now_s, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month_s = began.timestamp()
    rate = weight({"CUD": 2.5}, next(iter(lab.scheduler.state.hosts.values())).devices[0].name)
    expected_s = sum(max(end_s - max(begin_s, month_s), 0.0) * count for begin_s, end_s, count in spans) * rate
    (budget,) = budgets(lab.scheduler.state, "default", "ann", lab.now_s)
    assert budget.used_hours * 3600.0 == pytest.approx(expected_s, rel=1e-6, abs=200.0), "events take a second each"


def test_a_type_has_the_weight_of_the_longest_name_that_is_a_part_of_its_own() -> None:
    weights = {"a100": 2.0, "A100-SXM4-80GB": 3.0, "cpu": 0.1}
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H100")
    assert [weight(weights, name) for name in names] == [3.0, 2.0, 1.0]
