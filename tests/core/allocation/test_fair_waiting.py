"""No job starves: reservations, loans that are returned, and no preemption of higher priorities."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.allocation.migration_cost import DEFAULT_THRESHOLDS
from clusterd.core.events import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import HostId, JobId, JobKind
from tests.core.conftest import Lab
from tests.core.policies.test_default import known, moved, progress, submit

RUN_S = 8.0


def pass_time(lab: Lab, seconds: float) -> list[d.Decision]:
    """Let so much time pass, with the rounds that become due in it."""
    decided: list[d.Decision] = []
    until_s = lab.now_s + seconds
    while (at_s := lab.scheduler.state.timers.get(Timer(TimerKind.ROUND), until_s)) < until_s:
        lab.now_s = max(lab.now_s, at_s)
        decided += lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))
    lab.now_s = max(lab.now_s, until_s)
    return decided


@pytest.mark.parametrize("priority", [0, 10])
def test_a_wide_command_starts_once_those_before_it_end(lab: Lab, priority: int) -> None:
    """One-device commands arrive a little faster than they end."""
    lab.host("a", gpus=2)
    first, second = lab.submit()[0], lab.submit()[0]
    lab.run(first)
    lab.run(second)
    wide, _ = lab.submit("wide", devices=2, priority=priority)
    behind = [lab.submit()[0] for _ in range(5)]
    lab.finish(first)
    assert {lab.state(job) for job in behind} == {"queued"}, "the free device is reserved"
    assert "reserved for wide" in lab.why(behind[0])
    lab.finish(second)
    assert lab.state(wide) == "starting"


def test_a_command_with_a_time_limit_passes_where_it_delays_nobody(lab: Lab) -> None:
    lab.host("a", gpus=2)
    long, _ = lab.submit("long", time_limit_s=3600.0)
    lab.run(long)
    wide, _ = lab.submit("wide", devices=2)
    endless, _ = lab.submit("endless")
    quick, _ = lab.submit("quick", time_limit_s=60.0)
    assert [lab.state(job) for job in (wide, endless, quick)] == ["queued", "queued", "starting"]
    promise = lab.scheduler.state.reservation
    assert promise is not None and promise.job == wide and promise.after == (long,)
    assert promise.latest_s is not None and promise.at_s <= promise.latest_s


def test_a_promised_start_is_never_put_off(lab: Lab) -> None:
    lab.host("a", gpus=2)
    long, _ = lab.submit("long", time_limit_s=600.0)
    lab.run(long)
    lab.submit("wide", devices=2)
    promised = lab.scheduler.state.reservation
    for number in range(20):
        lab.submit(f"quick-{number}", time_limit_s=30.0)
        lab.now_s += 20.0
    assert promised is not None and lab.scheduler.state.reservation is not None
    assert lab.scheduler.state.reservation.at_s <= promised.at_s


@pytest.fixture
def borrower(lab: Lab) -> JobId:
    """An elastic job on four devices of four, that asked for two."""
    lab.host("a", gpus=4, cores=16)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    job, _ = submit(lab, "borrower", 30_000, devices=2)
    progress(lab, job, 10)
    assert len(lab.attempt(job).ranks) == 4
    lab.now_s += 60.0
    return job


@pytest.mark.parametrize(("devices", "left"), [(1, 2), (2, 2)])
def test_a_command_gets_back_what_others_have_on_loan(lab: Lab, borrower: JobId, devices: int, left: int) -> None:
    command, decided = lab.submit("command", devices=devices)
    shrink = d.StartMigration.match(decided, job=borrower)
    assert shrink is not None and len(shrink.new_ranks) == left
    assert "holds more devices than the 2 that it asked for" in shrink.reason
    moved(lab, shrink)
    assert lab.state(command) == "starting"


def test_an_elastic_job_of_unknown_speed_gets_back_what_others_have_on_loan(lab: Lab, borrower: JobId) -> None:
    job, _ = lab.submit("new", kind=JobKind.ELASTIC, devices=2)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 100}
    decided = lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=shape, model="unknown"))
    shrink = d.StartMigration.match(decided, job=borrower)
    assert shrink is not None and len(shrink.new_ranks) == 2


def test_a_loan_goes_back_though_the_request_is_slower_than_fewer_devices(lab: Lab) -> None:
    """Device slots of few cores: two are slower than one, and only four are faster."""
    times = {1: 4.0, 2: 4.1, 4: 2.2}
    odd = tuple(replace(x, step_time_s=times[x.devices]) for x in known().estimates if x.devices in times)
    lab.host("a", gpus=4, cores=16)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=odd), why="trials"))
    job, _ = submit(lab, "borrower", 30_000, devices=2)
    progress(lab, job, 10)
    lab.now_s += 60.0
    command, decided = lab.submit("command", devices=2)
    shrink = d.StartMigration.match(decided, job=job)
    assert shrink is not None and len(shrink.new_ranks) == 1
    moved(lab, shrink)
    assert lab.state(command) == "starting"


def test_nobody_gets_more_than_the_loan_by_right(lab: Lab, borrower: JobId) -> None:
    """Three devices are more than the two on loan."""
    _, decided = lab.submit("command", devices=3)
    assert d.StartMigration.match(decided) is None and lab.attempt(borrower).migration is None


def test_a_command_without_devices_gets_the_cores_of_devices_on_loan(lab: Lab) -> None:
    lab.host("a", cpus=4, cores=4)
    job, _ = lab.submit("borrower", devices=2, kind=JobKind.ELASTIC)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": 30_000}
    table = known()
    table = replace(table, estimates=tuple(replace(x, device_type="cpu") for x in table.estimates))
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=table, why="trials"))
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=shape, model="net"))
    assert len(lab.attempt(job).ranks) == 4
    progress(lab, job, 10)
    lab.now_s += 60.0
    _, decided = lab.submit("no devices", devices=0, cpus=1)
    shrink = d.StartMigration.match(decided, job=job)
    assert shrink is not None and len(shrink.new_ranks) == 2


def test_a_command_without_devices_that_suspends_others_gets_none(lab: Lab) -> None:
    """Only the cores of the suspended job's device."""
    lab.host("a", cpus=1, cores=1)
    on_one = tuple(replace(x, device_type="cpu") for x in known().estimates if x.devices == 1)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=on_one), why="trials"))
    job, _ = submit(lab, "long", 30_000)
    progress(lab, job, 10)
    urgent, _ = lab.submit("urgent", devices=0, cpus=1, priority=5)
    pass_time(lab, 200.0)
    assert lab.state(job) == "stopping"
    lab.stopped(job)
    assert lab.state(urgent) == "starting" and lab.attempt(urgent).devices == ()


def test_a_guaranteed_job_takes_nothing_from_a_higher_priority(lab: Lab) -> None:
    lab.host("a", gpus=4)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    dear, _ = submit(lab, "dear", 30_000, devices=4, priority=10)
    progress(lab, dear, 10)
    lab.now_s += 600.0
    for kind in (JobKind.COMMAND, JobKind.ELASTIC):
        _, decided = lab.submit("guaranteed", devices=1, guaranteed=True, kind=kind)
        assert d.StartMigration.match(decided) is None
    pass_time(lab, 7200.0)
    attempt = lab.attempt(dear)
    assert attempt.migration is None and attempt.stop.outcome is None


def suspended_for_urgent(lab: Lab) -> tuple[list[JobId], JobId]:
    """Two jobs that run on one device only, being suspended for a command of a higher priority."""
    lab.host("a", gpus=2)
    on_one = tuple(x for x in known().estimates if x.devices == 1)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=on_one), why="trials"))
    jobs = [submit(lab, name, 30_000)[0] for name in ("one", "two")]
    for job in jobs:
        progress(lab, job, 10)
    urgent, _ = lab.submit("urgent", devices=2, priority=9)
    pass_time(lab, 200.0)
    return jobs, urgent


def test_a_higher_priority_suspends_what_cannot_shrink(lab: Lab) -> None:
    """Each of the two runs on its last device; both go on when the urgent one has ended."""
    jobs, urgent = suspended_for_urgent(lab)
    assert [lab.state(job) for job in jobs] == ["stopping", "stopping"]
    assert lab.scheduler.state.handovers[urgent].suspended == tuple(jobs)
    late, _ = lab.submit("late", devices=1, priority=9)
    for job in jobs:
        lab.stopped(job)
    assert lab.state(urgent) == "starting", "the claim is served before anybody else"
    assert lab.state(late) == "queued" and not lab.scheduler.state.handovers
    lab.run(urgent)
    lab.finish(urgent)
    assert lab.state(late) == "starting"


@pytest.mark.parametrize("preemptible", [True, False])
def test_a_higher_priority_stops_a_command_only_if_it_is_preemptible(lab: Lab, preemptible: bool) -> None:
    lab.host("a", gpus=1)
    filler, _ = lab.submit("filler", preemptible=preemptible)
    lab.run(filler)
    lab.now_s += 600.0
    urgent, _ = lab.submit("urgent", priority=9)
    assert lab.state(filler) == ("stopping" if preemptible else "running")
    if not preemptible:
        return
    lab.stopped(filler)
    assert (lab.state(urgent), lab.state(filler)) == ("starting", "queued")
    lab.run(urgent)
    lab.finish(urgent)
    assert lab.state(filler) == "starting", "it begins anew"
    assert lab.attempt(filler).number == 2


def test_a_command_that_has_just_started_is_stopped_as_soon_as_it_may_be(lab: Lab) -> None:
    """Not at the next round, half a minute later."""
    lab.host("a", gpus=1)
    filler, _ = lab.submit("filler", preemptible=True)
    lab.run(filler)
    started_s = lab.attempt(filler).started_s
    lab.submit("urgent", priority=9)
    assert lab.state(filler) == "running"
    due_s = lab.scheduler.state.timers[Timer(TimerKind.ROUND)]
    assert due_s == started_s + DEFAULT_THRESHOLDS.settle_s
    lab.tell(e.TimerFired(at_s=due_s, id=e.EventId(len(lab.log) + 1), timer=Timer(TimerKind.ROUND)))
    assert lab.state(filler) == "stopping"


def test_a_preemptible_command_is_not_stopped_where_its_work_is_worth_more(lab: Lab) -> None:
    """Of two of one priority that end in an hour, one has just begun: it is stopped for a job of a minute."""
    lab.host("a", gpus=1)
    old, _ = lab.submit("old", preemptible=True, time_limit_s=7200.0)
    lab.run(old)
    lab.now_s += 3600.0
    quick, _ = lab.submit("quick", time_limit_s=60.0)
    pass_time(lab, 300.0)
    assert (lab.state(old), lab.state(quick)) == ("running", "queued")
    lab.finish(old)
    lab.run(quick)
    lab.finish(quick)
    fresh, _ = lab.submit("fresh", preemptible=True, time_limit_s=7200.0)
    lab.run(fresh)
    lab.now_s += 130.0
    again, _ = lab.submit("again", time_limit_s=60.0)
    pass_time(lab, 300.0)
    assert (lab.state(fresh), lab.state(again)) == ("stopping", "queued")


def test_devices_that_come_free_serve_one_claim_only(lab: Lab) -> None:
    """Two claims on one host; the first two of four devices were counted for both, and one job got none of its plan."""
    lab.host("a", gpus=4)
    on_two = tuple(x for x in known().estimates if x.devices == 2)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=on_two), why="trials"))
    jobs = [submit(lab, name, 30_000, devices=2)[0] for name in ("one", "two")]
    for job in jobs:
        progress(lab, job, 10)
    lab.now_s += 600.0
    urgent = [submit(lab, name, 100, devices=2, priority=9)[0] for name in ("first", "second")]
    pass_time(lab, 300.0)
    assert list(lab.scheduler.state.handovers) == urgent
    lab.stopped(jobs[0])
    assert sorted(lab.state(job) for job in urgent) == ["queued", "starting"]
    lab.stopped(jobs[1])
    assert [lab.state(job) for job in urgent] == ["starting", "starting"]
    assert [len(lab.attempt(job).devices) for job in urgent] == [2, 2]


def test_a_wide_job_that_cannot_shrink_is_suspended_for_a_short_one(lab: Lab) -> None:
    """All of its plans need eight devices; the other is gone in a minute."""
    lab.host("a", gpus=8, cores=64)
    wide_only = tuple(x for x in known().estimates if x.devices == 8)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=wide_only), why="trials"))
    long, _ = submit(lab, "long", 30_000, devices=8)
    progress(lab, long, 10)
    short, _ = submit(lab, "short", 50, devices=8)
    decided = pass_time(lab, 400.0)
    stop = d.StopAttempt.match(decided, job=long)
    assert stop is not None and stop.keep and "suspended for short" in stop.reason
    assert "suspended for it" in lab.why(short) or "gives up devices" in lab.why(short)
    lab.stopped(long)
    assert lab.state(short) == "starting"
    again, _ = submit(lab, "again", 50, devices=8)
    assert lab.state(long) == "queued" and lab.state(again) == "queued"
    lab.run(short)
    lab.finish(short)
    assert "starting" in (lab.state(long), lab.state(again))


def test_a_job_for_which_another_was_suspended_waits_for_memory_that_somebody_took_meanwhile(lab: Lab) -> None:
    """Devices and cores are free, and most of the host's 256 GiB are not."""
    lab.host("a", gpus=8, cores=48)
    on_eight = tuple(x for x in known().estimates if x.devices == 8)
    for model, gib in (("net", 1), ("offloading", 24)):
        table = replace(known(), estimates=tuple(replace(x, host_bytes=gib << 30) for x in on_eight))
        lab.tell(e.SpeedLearned(**lab.at(), model=model, table=table, why="trials"))
    long, _ = submit(lab, "long", 30_000, devices=8)
    progress(lab, long, 10)
    short, _ = submit(lab, "short", 50, devices=8, model="offloading")
    pass_time(lab, 400.0)
    assert lab.state(long) == "stopping"
    other, _ = lab.submit("other", devices=0, cpus=1, memory_bytes=200 << 30)
    lab.run(other)
    lab.stopped(long)
    assert lab.state(short) == "queued"
    lab.finish(other)
    assert lab.state(short) == "starting"


@pytest.mark.parametrize("zero", [0, 2])
def test_a_guaranteed_job_is_suspended_only_if_it_still_ends_as_promised(lab: Lab, zero: int) -> None:
    """It runs without ZeRO; if it asked for ZeRO-2, a fifth slower, it has time to spare. It comes back first."""
    lab.host("a", gpus=8, cores=64)
    wide_only = tuple(x for x in known().estimates if x.devices == 8)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=wide_only), why="trials"))
    long, _ = submit(lab, "long", 30_000, devices=8, guaranteed=True, plan=Plan(dp=8, zero=zero))
    progress(lab, long, 10)
    short, _ = submit(lab, "short", 50, devices=8)
    pass_time(lab, 400.0)
    assert lab.state(long) == ("stopping" if zero else "running")
    if zero:
        lab.stopped(long)
        assert lab.state(short) == "starting"
        again, _ = submit(lab, "again", 50, devices=8, guaranteed=True)
        lab.run(short)
        lab.finish(short)
        assert (lab.state(long), lab.state(again)) == ("starting", "queued")


@pytest.mark.parametrize("devices", [4, 8])
def test_time_that_only_a_loan_would_save_is_no_time_to_spare(lab: Lab, devices: int) -> None:
    """It asked for four devices of eight, or for all, and ZeRO-2; it may come back to no more than it asked for."""
    lab.host("a", gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    plan = Plan(dp=devices, zero=0 if devices == 4 else 2)
    long, _ = submit(lab, "long", 30_000, devices=devices, guaranteed=True, plan=plan)
    assert sum(map(bool, lab.scheduler.state.jobs[long].attempt.devices)) == 8
    progress(lab, long, 10)
    table = replace(known(), estimates=tuple(x for x in known().estimates if x.devices == 8))
    lab.tell(e.SpeedLearned(**lab.at(), model="wide", table=table, why="trials"))
    submit(lab, "short", 50, devices=8, model="wide")
    pass_time(lab, 400.0)
    assert lab.state(long) == ("running" if devices == 4 else "stopping")


@pytest.mark.parametrize("guaranteed", [False, True])
def test_who_may_be_preempted_passes_the_reservation_and_gives_way(lab: Lab, guaranteed: bool) -> None:
    """A guaranteed job waits an hour for a command's two devices; the other two need not lie idle."""
    lab.host("a", gpus=4, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    command, _ = lab.submit("command", devices=2, time_limit_s=3600.0)
    lab.run(command)
    wide, _ = submit(lab, "wide", 3000, devices=4, guaranteed=True, plan=Plan(dp=4))
    other, _ = submit(lab, "other", 30_000, devices=2, guaranteed=guaranteed, plan=Plan(dp=2))
    assert (lab.state(wide), lab.state(other)) == ("queued", "queued" if guaranteed else "starting")
    if not guaranteed:
        progress(lab, other, 10)
        pass_time(lab, 1200.0)
        lab.finish(command)
        pass_time(lab, 60.0)
        assert lab.state(other) == "stopping"
        lab.stopped(other)
        assert (lab.state(wide), lab.state(other)) == ("starting", "queued")


@pytest.mark.parametrize("steps", [100, 30_000])
def test_a_guaranteed_job_returns_a_loan_only_if_the_migration_leaves_it_time(lab: Lab, steps: int) -> None:
    """It asked for four devices and ZeRO-2; a migration takes 30 s, which a job of a hundred steps does not save."""
    lab.host("a", gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    loan, _ = submit(lab, "loan", steps, devices=4, guaranteed=True, plan=Plan(dp=4, zero=2))
    progress(lab, loan, 10)
    _, decided = submit(lab, "other", 30, devices=4)
    decided += pass_time(lab, 30.0)
    assert (d.StartMigration.match(decided, job=loan) is not None) == (steps > 100)


def test_a_job_that_cannot_run_on_what_it_asked_for_gives_back_all_that_it_can(lab: Lab) -> None:
    """It asks for one device and needs four at least; it holds eight, and a command wants three."""
    lab.host("a", gpus=8, cores=64)
    several = tuple(x for x in known().estimates if x.devices >= 4)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=replace(known(), estimates=several), why="trials"))
    loan, _ = submit(lab, "loan", 30_000)
    progress(lab, loan, 10)
    pass_time(lab, 100.0)
    _, decided = lab.submit("command", devices=3)
    decided += pass_time(lab, 30.0)
    start = d.StartMigration.match(decided, job=loan)
    assert start is not None and len(start.new_ranks) == 4


def test_a_cancelled_claimant_leaves_its_devices_to_others(lab: Lab) -> None:
    jobs, urgent = suspended_for_urgent(lab)
    lab.tell(e.JobCancelled(**lab.at(), job=urgent, by="ann"))
    assert not lab.scheduler.state.handovers
    for job in jobs:
        lab.stopped(job)
    assert [lab.state(job) for job in jobs] == ["starting", "starting"]


Arrival = tuple[float, int, float, int, bool]
"""Gap, devices, run time, priority below the watched job's, with a time limit."""

ARRIVALS = st.lists(
    st.tuples(st.floats(0.5, 30.0), st.integers(1, 4), st.floats(1.0, 60.0), st.integers(-1, 0), st.booleans()),
    min_size=10,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, width=st.integers(1, 4), warm=st.integers(0, 8))
def test_no_stream_of_equal_or_lower_priority_starves_a_job(arrivals: list[Arrival], width: int, warm: int) -> None:
    """The job starts within a bound that follows from the jobs that arrived before it.

    The bound: one after the other, all that arrived before it; nothing that arrives later counts, but for one run of
    at most the longest time limit that was let pass.
    """
    lab = Lab()
    lab.host("a", gpus=4)
    ends: list[tuple[float, JobId]] = []
    run_s: dict[JobId, float] = {}

    def start_launched(decided: list[d.Decision]) -> None:
        for launch in decided:
            if isinstance(launch, d.LaunchAttempt):
                lab.run(launch.job)
                ends.append((lab.now_s + run_s[launch.job], launch.job))

    def arrive(arrival: Arrival) -> JobId:
        _, devices, seconds, priority, limited = arrival
        job = JobId(str(lab.jobs + 1))
        run_s[job] = seconds
        _, decided = lab.submit(
            f"job-{job}", devices=devices, priority=priority, time_limit_s=seconds * 1.5 if limited else None
        )
        start_launched(decided)
        return job

    def finish_until(at_s: float) -> None:
        while ends and min(ends)[0] <= at_s:
            end_s, job = min(ends)
            ends.remove((end_s, job))
            lab.now_s = max(lab.now_s, end_s)
            start_launched(lab.finish(job))
        lab.now_s = max(lab.now_s, at_s)

    for arrival in arrivals[:warm]:
        arrive(arrival)
    before_s = sum(run_s.values()) + 2.0 * lab.jobs
    watched = JobId(str(lab.jobs + 1))
    run_s[watched] = 1.0
    arrived_s = lab.now_s
    start_launched(lab.submit("watched", devices=width)[1])
    bound_s = arrived_s + before_s + 1.5 * 60.0 + 600.0
    for arrival in arrivals * 20:
        if lab.state(watched) != "queued" or lab.now_s > bound_s:
            break
        arrive(arrival)
        finish_until(lab.now_s + arrival[0])
    assert lab.state(watched) != "queued" or lab.now_s <= bound_s, "it waits for jobs that came after it"


def test_of_two_jobs_that_ask_alike_none_is_told_of_the_other(lab: Lab) -> None:
    """Regression: the answer was made once for both, and sent the user of the second to the first."""
    lab.tell(e.HostAdded(**lab.at(), host=HostId("a")))
    jobs = [lab.submit(hosts=(HostId("b"),))[0] for _ in range(2)]
    for job in jobs:
        assert lab.why(job) == "every host is left out for it: clusterd why tells the reasons"
