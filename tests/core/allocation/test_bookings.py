"""Bookings: devices that a user reserved ahead, for jobs of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.core.queueing.bookings import UNUSED_S, WEEK_S, Wanted, choose, used_s
from clusterd.core.state import Job
from clusterd.projection import unusable
from clusterd.types import DeviceClaim, DeviceId, HostId, JobId, RankEnd, Reason, Resources
from tests.core.allocation.test_device_claims import claim, fire
from tests.core.conftest import Lab, facts
from tests.core.policies.test_default import known, progress, submit

HOUR = 3600.0


def book(
    lab: Lab, *devices: str, begin_s: float = 0.0, for_s: float = 4 * HOUR, owner: str = "ann", name: str = ""
) -> str:
    """Book devices from so many seconds after now."""
    return claim(lab, *devices, begin_s=begin_s, for_s=for_s, owner=owner, reason=name)


def end(lab: Lab, number: str) -> None:
    """Let the time of the booking pass."""
    while number in lab.scheduler.state.device_claims:
        fire(lab, number)


def test_a_job_of_a_booking_starts_on_its_devices_when_it_begins(lab: Lab) -> None:
    lab.host("a", gpus=4)
    number = book(lab, "a:gpu2", "a:gpu3", begin_s=HOUR)
    job, _ = lab.submit(devices=2, user="ann", booking=number)
    assert (lab.state(job), lab.why(job)) == ("queued", "waits for its booking 1, which has not begun")
    fire(lab, number)
    assert set(lab.attempt(job).devices) == {"a:gpu2", "a:gpu3"}


def test_others_and_jobs_without_the_booking_wait_until_it_is_over(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0", for_s=HOUR)
    mine, _ = lab.submit("mine", user="ann", booking=number, time_limit_s=HOUR / 4)
    lab.run(mine)
    others, _ = lab.submit("others", user="bob", booking=number)
    without, _ = lab.submit("without", user="ann")
    lab.finish(mine)
    assert [lab.state(job) for job in (others, without)] == ["queued", "queued"]
    end(lab, number)
    assert lab.state(without) == "starting"
    assert lab.state(others) == "queued"
    assert "booking 1 is over" in lab.why(others)


def test_a_job_ends_with_its_booking(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0", for_s=HOUR)
    job, _ = lab.submit(user="ann", booking=number)
    lab.run(job)
    assert lab.scheduler.state.timers[Timer(TimerKind.LIMIT, job)] == pytest.approx(
        lab.scheduler.state.device_claims[number].until_s
    )
    end(lab, number)
    assert lab.state(job) == "stopping"
    lab.stopped(job)
    assert (lab.state(job), lab.why(job)) == ("failed", "its booking 1 is over")
    assert lab.scheduler.state.jobs[job].exit_code == 124


def test_a_cancelled_booking_ends_its_jobs(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0")
    job, _ = lab.submit(user="ann", booking=number)
    lab.run(job)
    next_one, _ = lab.submit(user="bob")
    lab.tell(e.DeviceClaimRemoved(**lab.at(), claim=number, by="ann"))
    lab.stopped(job)
    assert (lab.state(job), lab.state(next_one)) == ("failed", "starting")


def test_what_no_job_has_used_goes_to_others(lab: Lab) -> None:
    lab.host("a", gpus=2)
    number = book(lab, "a:gpu0", "a:gpu1", begin_s=HOUR)
    fire(lab, number)
    job, _ = lab.submit(user="ann", booking=number)
    other, _ = lab.submit("other", user="bob")
    lab.run(job)
    lab.finish(job)
    begun_s = lab.scheduler.state.device_claims[number].from_s
    released = d.ReleaseBooked.match(fire(lab, number), user="ann", devices=("a:gpu1",))
    assert released is not None
    assert released.reason == ("a:gpu1 is free for others: no job of booking 1 used it for 15m00s; it keeps 1 device")
    assert lab.now_s == pytest.approx(begun_s + UNUSED_S, abs=5.0)
    assert lab.attempt(other).devices == ("a:gpu1",)
    assert lab.scheduler.state.device_claims[number].devices == ("a:gpu0",)


def test_a_booking_that_nobody_uses_is_over(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0")
    assert d.ReleaseBooked.match(fire(lab, number), user="ann") is not None
    assert lab.scheduler.state.device_claims == {}
    assert used_s(lab.scheduler.state, "ann", lab.now_s) == pytest.approx(UNUSED_S, abs=5.0)


def test_the_time_to_use_a_device_begins_when_the_job_of_another_has_left_it(lab: Lab) -> None:
    lab.host("a", gpus=1)
    other, _ = lab.submit("other", user="bob")
    lab.run(other)
    number = book(lab, "a:gpu0")
    lab.now_s += 2 * HOUR
    lab.finish(other)
    fire(lab, number)
    assert lab.now_s >= 1000.0 + 2 * HOUR + UNUSED_S
    assert lab.scheduler.state.device_claims == {}


def test_the_time_to_use_a_device_begins_again_with_the_daemon(lab: Lab) -> None:
    """While there was none nobody could submit a job."""
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0")
    lab.now_s += HOUR
    lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
    lab.connect("a")
    job, _ = lab.submit(user="ann", booking=number)
    assert lab.attempt(job).devices == ("a:gpu0",)


def test_a_job_that_waits_names_the_booking_and_its_own_says_when_it_begins(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0", begin_s=HOUR)
    other, _ = lab.submit("other", user="bob")
    own, _ = lab.submit("own", user="ann", booking=number)
    jobs = lab.scheduler.state.jobs

    def why(job: JobId) -> str:
        return " ".join(unusable(jobs[job], lab.scheduler.state, lab.now_s))

    assert "a:gpu0 is booked by ann (booking 1) from " in why(other)
    assert " until " in why(other)
    assert "its booking 1 begins " in why(own)
    assert "booked by" not in why(own)


def test_a_job_of_a_booking_is_neither_moved_nor_resized(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=4)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    number = book(lab, "a:gpu0", "a:gpu1")
    job, _ = submit(lab, "net", 30_000, devices=2, user="ann", booking=number)
    progress(lab, job, 10)
    decided = lab.tell(e.HostDrained(**lab.at(), host=lab.scheduler.state.hosts["a"].id))  # type: ignore[index]
    lab.submit("high", devices=4, priority=10)
    assert not [x for x in [*lab.decisions, *decided] if isinstance(x, d.StartMigration)]
    assert set(lab.attempt(job).devices) == {"a:gpu0", "a:gpu1"}


def test_what_an_operator_claims_goes_to_no_job_of_a_booking(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0")
    claim(lab, "a:gpu0", for_s=HOUR)
    job, _ = lab.submit(user="ann", booking=number)
    assert lab.state(job) == "queued"


def test_a_booked_device_that_is_faulty_or_in_use_by_others_goes_to_nobody(lab: Lab) -> None:
    lab.host("a", gpus=3)
    first, _ = lab.submit("first", hosts=("a",))
    lab.run(first)
    faulty = lab.attempt(first).devices[0]
    lab.exit(first, end=RankEnd(reason=Reason.DEVICE_FAULT, exit_code=1, message="fell off the bus"))
    lab.tell(e.JobCancelled(**lab.at(), job=first))
    lab.stopped(first)
    used = next(device for device in facts("a", gpus=3).devices if device.id != faulty)
    there = tuple(replace(x, foreign="python of eve") if x == used else x for x in facts("a", gpus=3).devices)
    lab.tell(e.HostChanged(**lab.at(), host=HostId("a"), facts=replace(facts("a"), devices=there)))
    number = book(lab, "a:gpu0", "a:gpu1", "a:gpu2")
    jobs = [lab.submit(user="ann", booking=number)[0] for _ in range(2)]
    (right,) = {x.id for x in there} - {faulty, used.id}
    assert lab.attempt(jobs[0]).devices == (right,)
    assert lab.state(jobs[1]) == "queued"


def test_bookings_are_replayed(lab: Lab, replayed: Any) -> None:
    lab.host("a", gpus=2)
    number = book(lab, "a:gpu0", "a:gpu1", begin_s=HOUR)
    lab.submit(user="ann", booking=number)
    fire(lab, number)
    fire(lab, number)
    assert replayed(lab).state == lab.scheduler.state


# --- choice of the devices, and the quota -----------------------------------------------------------------------------


def wanted(lab: Lab, devices: int, begin_s: float = 0.0, for_s: float = HOUR) -> Wanted:
    from_s = lab.now_s + begin_s
    resources = Resources(devices=devices)
    return Wanted(resources=resources, only=frozenset(), from_s=from_s, until_s=from_s + for_s)


def test_devices_are_on_the_fewest_hosts_and_those_that_are_free_first(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=3)
    lab.submit(devices=1, hosts=("b",), time_limit_s=2 * HOUR)
    assert choose(lab.scheduler.state, wanted(lab, 2), lab.now_s) == (("a:gpu0", "a:gpu1"), [])
    chosen, _ = choose(lab.scheduler.state, wanted(lab, 3), lab.now_s)
    assert {device.partition(":")[0] for device in chosen} == {"b"}
    chosen, _ = choose(lab.scheduler.state, wanted(lab, 1, begin_s=3 * HOUR), lab.now_s)
    assert chosen == ("a:gpu0",), "the fuller host, as both are free by then"
    lab.submit(devices=1, hosts=("a",), time_limit_s=2 * HOUR)
    chosen, _ = choose(lab.scheduler.state, wanted(lab, 2, begin_s=3 * HOUR), lab.now_s)
    assert chosen == ("b:gpu1", "b:gpu2"), "of hosts that are free by then, one that is free now"


def test_a_shared_device_is_free_when_the_last_of_its_jobs_ends(lab: Lab) -> None:
    for host in "ab":
        lab.host(host, gpus=1)
    for host, hours in (("a", 1), ("a", 4), ("b", 2)):
        lab.submit(devices=1, hosts=(host,), share=2, time_limit_s=hours * HOUR)
    assert choose(lab.scheduler.state, wanted(lab, 1), lab.now_s) == (("b:gpu0",), [])


def test_claims_in_the_way_are_named(lab: Lab) -> None:
    lab.host("a", gpus=2)
    book(lab, "a:gpu0", begin_s=HOUR, owner="bob")
    chosen, in_the_way = choose(lab.scheduler.state, wanted(lab, 2, begin_s=2 * HOUR), lab.now_s)
    assert (chosen, [each.id for each in in_the_way]) == (("a:gpu1",), ["1"])
    assert len(choose(lab.scheduler.state, wanted(lab, 2, begin_s=6 * HOUR), lab.now_s)[0]) == 2


DEVICES = [f"{host}:gpu{number}" for host in ("a", "b") for number in range(3)]

STEPS = st.one_of(
    st.tuples(
        st.just("book"), st.sampled_from(["ann", "bob"]), st.tuples(st.integers(1, 4), st.sampled_from([0.0, 1.0, 5.0]))
    ),
    st.tuples(st.just("submit"), st.sampled_from(["ann", "bob", "eve"]), st.sampled_from([None, 600.0, 5400.0])),
    st.tuples(st.just("own"), st.integers(0, 5), st.integers(1, 2)),
    st.tuples(st.sampled_from(["finish", "time", "cancel"]), st.integers(0, 5), st.none()),
)

QUOTA_S = 12 * HOUR


@given(st.lists(STEPS, max_size=30))
def test_bookings_are_kept_whatever_happens(steps: list[tuple[str, Any, Any]]) -> None:
    """While a booking lasts its devices go to its own jobs alone; who does not use them loses them; the quota holds."""
    lab = Lab()
    lab.host("a", gpus=3)
    lab.host("b", gpus=3)
    for verb, first, second in steps:
        state = lab.scheduler.state
        before = {device: holder.job for device, holder in state.holders.items()}
        _take(lab, verb, first, second)
        for device, holder in state.holders.items():
            job = state.jobs[holder.job]
            bookings = [c for c in state.device_claims.values() if device in c.devices and c.is_active(lab.now_s)]
            if before.get(device) != holder.job:
                assert all(c.id == job.spec.booking and c.owner == job.spec.user for c in bookings), (
                    f"{device} is booked"
                )
                assert bookings or not job.spec.booking
        for booking in state.device_claims.values():
            if booking.is_active(lab.now_s):
                idle = [s for s in booking.unused.values() if s is not None]
                assert all(lab.now_s < since_s + UNUSED_S + 2.0 for since_s in idle), "unused for too long"
        for user in ("ann", "bob"):
            starts = [c.from_s for c in state.device_claims.values() if c.owner == user]
            assert all(used_s(state, user, from_s) <= QUOTA_S + 1e-3 for from_s in starts)
        assert not [job for job in _running(lab) if job.spec.booking and job.spec.booking not in state.device_claims]


def _running(lab: Lab) -> list[Job]:
    jobs = map(lab.scheduler.state.jobs.__getitem__, lab.scheduler.state.active)
    return [job for job in jobs if job.state.value in ("starting", "running")]


def _take(lab: Lab, verb: str, first: Any, second: Any) -> None:
    state = lab.scheduler.state
    running, booked = _running(lab), sorted(state.device_claims)
    if verb == "book":
        devices, hours = second
        request = wanted(lab, devices, begin_s=hours * HOUR, for_s=2 * HOUR)
        chosen, _ = choose(state, request, lab.now_s)
        if len(chosen) == devices and used_s(state, first, request.from_s) + request.device_s <= QUOTA_S:
            book(lab, *chosen, begin_s=hours * HOUR, for_s=2 * HOUR - 2.0, owner=first)
    elif verb == "submit":
        lab.submit(user=first, time_limit_s=second)
    elif verb == "own" and booked:
        booking = state.device_claims[booked[first % len(booked)]]
        lab.submit(user=booking.owner, booking=booking.id, devices=min(second, len(booking.devices)))
    elif verb == "finish" and running:
        job = running[first % len(running)]
        if job.state.value == "starting":
            lab.run(job.id)
        lab.finish(job.id)
    elif verb == "time" and state.timers:
        lab.fire(min(state.timers, key=lambda timer: (state.timers[timer], str(timer))))
        for stopping in [job for job in state.active if state.jobs[job].state.value == "stopping"]:
            lab.stopped(stopping)
    elif verb == "cancel" and booked:
        lab.tell(e.DeviceClaimRemoved(**lab.at(), claim=booked[first % len(booked)], by="ann"))


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 48)), max_size=12))
def test_a_month_of_bookings_is_within_the_quota_of_each_week(asked: list[tuple[float, int]]) -> None:
    """Every week of a month, wherever it begins, has at most the quota; what is refused would not fit."""
    lab = Lab()
    lab.host("a", gpus=1)
    made: list[tuple[float, float]] = []
    for day, hours in asked:
        from_s = 1000.0 + day * 86400.0
        fits = used_s(lab.scheduler.state, "ann", from_s) + hours * HOUR <= 40 * HOUR + 1e-3  # of binary fractions
        weeks = [
            sum(
                length_s
                for start_s, length_s in [*made, (from_s, hours * HOUR)]
                if first_s <= start_s < first_s + WEEK_S
            )
            for first_s in [from_s, *(start_s for start_s, _ in made if from_s - WEEK_S < start_s <= from_s)]
        ]
        assert fits == (max(weeks) <= 40 * HOUR + 1e-3)
        if fits:
            made.append((from_s, hours * HOUR))
            number = len(made)
            booking = DeviceClaim(
                id=str(number), devices=(DeviceId("a:gpu0"),), from_s=from_s, until_s=from_s + hours * HOUR,
                reason="", by="ann", owner="ann",
            )  # fmt: skip
            lab.scheduler.state.device_claims[booking.id] = booking


# --- a month ----------------------------------------------------------------------------------------------------------


class Month(Lab):
    """A lab whose jobs run for a drawn time, and whose clock goes on by itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.coming: list[tuple[float, int, Callable[[], object]]] = []
        self.ends: dict[JobId, float] = {}

    def at_time(self, at_s: float, action: Callable[[], object]) -> None:
        heappush(self.coming, (at_s, len(self.coming) + self.jobs, action))

    def play(self, until_s: float) -> Iterator[None]:
        """Do the next thing that happens, again and again: an action, the end of a job, or a timer."""
        while self.now_s < until_s:
            state = self.scheduler.state
            for job in [state.jobs[each] for each in state.active]:
                if job.state.value == "starting":
                    self.run(job.id)
                    self.ends[job.id] = self.now_s + self.random.uniform(0.1, 1.0) * (job.spec.time_limit_s or HOUR)
                elif job.state.value == "stopping":
                    self.stopped(job.id)
            ending = min(((s, job) for job, s in self.ends.items() if self.state(job) == "running"), default=None)
            timer = min(((s, str(t), t) for t, s in state.timers.items()), default=None)
            next_s = [
                self.coming[0][0] if self.coming else inf,
                ending[0] if ending else inf,
                timer[0] if timer else inf,
            ]
            if min(next_s) == inf:
                return
            self.now_s = max(self.now_s, min(next_s))
            if ending is not None and min(next_s) == next_s[1]:
                self.finish(ending[1])
            elif min(next_s) == next_s[0]:
                heappop(self.coming)[2]()
            else:
                assert timer is not None
                self.fire(timer[2])
            yield


@pytest.mark.slow
def test_a_month_in_a_lab_with_bookings() -> None:
    """Every morning ann books two devices, and comes four days of five; bob's jobs fill what is left.

    Her jobs start when the booking begins, as bob's jobs have time limits; what she does not use is his again.
    """
    lab, days = Month(seed=1), 28
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    mine: list[tuple[float, JobId]] = []
    unused = 0

    def morning(at_s: float) -> None:
        """Book for the next morning."""
        nonlocal unused
        chosen, _ = choose(lab.scheduler.state, wanted(lab, 2, begin_s=at_s - lab.now_s, for_s=4 * HOUR), lab.now_s)
        assert len(chosen) == 2
        number = book(lab, *chosen, begin_s=at_s - lab.now_s - 1.0, for_s=4 * HOUR)
        if lab.random.random() < 0.8:
            job, _ = lab.submit("mine", user="ann", booking=number, devices=2, time_limit_s=6 * HOUR)
            mine.append((at_s, job))
        else:
            unused += 1

    for day in range(days):
        begins_s = 1000.0 + day * 86400.0
        lab.at_time(begins_s, lambda at_s=begins_s + 86400.0: morning(at_s))  # type: ignore[misc]
        for _ in range(5):
            limit_s = lab.random.choice([HOUR, 3 * HOUR, 8 * HOUR])
            devices = lab.random.choice([1, 1, 2])
            submits = partial(lab.submit, "his", user="bob", devices=devices, time_limit_s=limit_s)
            lab.at_time(begins_s + lab.random.uniform(0.0, 86400.0), submits)
    for _ in lab.play(1000.0 + (days + 3) * 86400.0):
        for claimed in lab.scheduler.state.device_claims.values():
            idle = [s for s in claimed.unused.values() if s is not None]
            assert not claimed.is_active(lab.now_s) or all(lab.now_s <= s + UNUSED_S + 60.0 for s in idle)
    jobs = lab.scheduler.state.jobs
    late_s = [(jobs[job].started_s or inf) - at_s for at_s, job in mine]
    assert max(late_s) < 60.0, "bob's jobs were in the way"
    assert all((jobs[job].ended_s or inf) - at_s < 4 * HOUR + 60.0 for at_s, job in mine), "past the booking"
    assert len([x for x in lab.decisions if isinstance(x, d.ReleaseBooked)]) == unused > 0
    assert all(job.state.value == "finished" for job in jobs.values() if job.spec.user == "bob")
    assert lab.scheduler.state.device_claims == {}


def test_the_cores_of_a_booking_are_there_when_it_begins(lab: Lab) -> None:
    """Others get what is left of the host: until then those that end before, and then nobody its part."""
    lab.host("a", gpus=4, cores=16)
    number = book(lab, "a:gpu0", "a:gpu1", begin_s=2 * HOUR)
    short, _ = lab.submit("short", devices=0, cpus=12, time_limit_s=HOUR, grace_s=0.0)
    lab.run(short)
    lab.finish(short)
    beside, _ = lab.submit("beside", devices=2, cpus=8, user="bob")
    long, _ = lab.submit("long", devices=0, cpus=8, user="bob")
    mine, _ = lab.submit("mine", devices=2, cpus=8, user="ann", booking=number)
    assert [lab.state(job) for job in (long, beside, mine)] == ["queued", "starting", "queued"]
    lab.run(beside)
    fire(lab, number)
    assert lab.state(mine) == "starting"
    lab.run(mine)
    lab.finish(mine)
    state = lab.scheduler.state
    assert lab.state(long) == "queued"  # the booking still has them
    assert "with its part of the host's cores and memory" in str(unusable(state.jobs[long], state, lab.now_s))
    end(lab, number)
    assert lab.state(long) == "starting"


def test_a_job_of_a_booking_without_devices_runs_on_its_hosts_and_uses_it(lab: Lab) -> None:
    lab.host("a", gpus=0, cpus=0, cores=32)  # where it would go without the booking
    lab.host("b", gpus=2, cores=8)
    number = book(lab, "b:gpu0")
    others, _ = lab.submit("others", devices=0, cpus=6, hosts=(HostId("b"),))
    mine, _ = lab.submit("mine", devices=0, cpus=4, user="ann", booking=number)
    lab.run(mine)
    assert lab.attempt(mine).hosts == ("b",)
    assert lab.state(others) == "queued"
    lab.now_s += 2 * UNUSED_S
    fire(lab, number)
    assert (lab.state(mine), lab.state(others)) == ("running", "queued")


def test_bookings_after_each_other_keep_the_same_cores(lab: Lab) -> None:
    """A device that is booked for each Monday does not close its host for jobs without a time limit."""
    lab.host("a", gpus=4, cores=16)
    for week in range(1, 5):
        book(lab, "a:gpu0", begin_s=week * WEEK_S)
    book(lab, "a:gpu1", begin_s=4 * WEEK_S + HOUR)  # two at once: 8 of 16 cores
    beside, _ = lab.submit("beside", devices=0, cpus=8)
    more, _ = lab.submit("more", devices=0, cpus=1)
    assert [lab.state(job) for job in (beside, more)] == ["starting", "queued"]
