"""Claims: devices that an operator keeps from the scheduler for some time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.events import Timer, TimerKind
from clusterd.types import DeviceClaim, DeviceId, JobId
from tests.core.conftest import Lab
from tests.core.policies.test_default import known, progress, submit

HOUR = 3600.0


def claim(
    lab: Lab,
    *devices: str,
    begin_s: float = 0.0,
    for_s: float | None = None,
    drain: bool = False,
    owner: str = "",
    reason: str = "new fan",
) -> str:
    """Claim devices from so many seconds after now; with an owner it is a booking."""
    number = str(lab.scheduler.state.last_device_claim + 1)
    at: dict[str, Any] = lab.at()
    from_s = at["at_s"] + begin_s
    made = DeviceClaim(
        id=number,
        devices=tuple(map(DeviceId, devices)),
        from_s=from_s,
        until_s=None if for_s is None else from_s + for_s,
        reason=reason,
        by=owner or "ann",
        drain=drain,
        owner=owner,
    )
    lab.tell(e.DevicesClaimed(**at, claim=made))
    return number


def fire(lab: Lab, number: str) -> list[d.Decision]:
    """The claim's next time has come: its start or its end."""
    return lab.fire(Timer(TimerKind.CLAIM, number))


def test_a_claimed_device_goes_to_nobody_until_the_claim_is_removed(lab: Lab) -> None:
    lab.host("a", gpus=2)
    number = claim(lab, "a:gpu0")
    first, second = lab.submit("first")[0], lab.submit("second")[0]
    assert lab.attempt(first).devices == ("a:gpu1",)
    assert lab.state(second) == "queued"
    lab.tell(e.DeviceClaimRemoved(**lab.at(), claim=number, by="ann"))
    assert lab.attempt(second).devices == ("a:gpu0",)


def test_a_claim_ends_by_itself(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = claim(lab, "a:gpu0", for_s=HOUR)
    job, _ = lab.submit()
    assert lab.state(job) == "queued"
    fire(lab, number)
    assert lab.state(job) == "starting"
    assert lab.scheduler.state.device_claims == {}


def test_only_jobs_that_end_before_a_claim_start_on_its_devices(lab: Lab) -> None:
    lab.host("a", gpus=1)
    claim(lab, "a:gpu0", begin_s=HOUR)
    endless, _ = lab.submit("endless")
    long, _ = lab.submit("long", time_limit_s=2 * HOUR)
    short, _ = lab.submit("short", time_limit_s=HOUR / 2)
    assert [lab.state(job) for job in (endless, long, short)] == ["queued", "queued", "starting"]


def test_a_promised_start_waits_for_the_end_of_a_claim(lab: Lab) -> None:
    lab.host("a", gpus=2)
    claim(lab, "a:gpu0", for_s=HOUR)
    job, _ = lab.submit("wide", devices=2)
    promise = lab.scheduler.state.reservation
    assert promise is not None and promise.job == job
    (made,) = lab.scheduler.state.device_claims.values()
    assert made.until_s is not None and promise.at_s == pytest.approx(made.until_s, abs=2.0)


def test_a_promised_start_ends_before_a_claim_or_comes_after_it(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit("running", time_limit_s=HOUR)
    lab.run(running)
    claim(lab, "a:gpu0", begin_s=2 * HOUR, for_s=HOUR)
    (made,) = lab.scheduler.state.device_claims.values()
    long, _ = lab.submit("long", time_limit_s=2 * HOUR)
    promise = lab.scheduler.state.reservation
    assert promise is not None and promise.job == long and promise.at_s == pytest.approx(made.until_s, abs=2.0)
    short, _ = lab.submit("short", time_limit_s=HOUR / 2)
    lab.finish(running)
    assert (lab.state(long), lab.state(short)) == ("queued", "starting")


def test_a_claim_puts_off_a_promise(lab: Lab) -> None:
    lab.host("a", gpus=1)
    running, _ = lab.submit("running", time_limit_s=HOUR)
    lab.run(running)
    lab.submit("next", time_limit_s=HOUR)
    before = lab.scheduler.state.reservation
    claim(lab, "a:gpu0", begin_s=HOUR, for_s=HOUR)
    after = lab.scheduler.state.reservation
    assert before is not None and after is not None
    assert after.at_s > before.at_s + HOUR / 2


def test_an_elastic_job_is_migrated_off_at_the_start(lab: Lab) -> None:
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    job, _ = submit(lab, "net", 30_000, devices=2)
    progress(lab, job, 10)
    held = lab.attempt(job).devices
    number = claim(lab, held[0], begin_s=HOUR)
    decided = fire(lab, number)
    (move,) = [x for x in decided if isinstance(x, d.StartMigration)]
    assert held[0] not in {place.device for place in move.new_ranks}
    assert "is claimed by ann (claim 1): new fan" in move.reason


@pytest.mark.parametrize("drain", [False, True])
def test_a_command_ends_first_unless_the_claim_drains(lab: Lab, drain: bool) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit("study")
    lab.run(job)
    number = claim(lab, "a:gpu0", begin_s=HOUR, drain=drain)
    assert lab.state(job) == "running"
    fire(lab, number)
    assert lab.state(job) == ("stopping" if drain else "running")
    if drain:
        lab.stopped(job)
        assert lab.state(job) == "queued"
    else:
        assert "it stays there until its end" in lab.why(job)


def test_claims_are_by_the_wall_clock(lab: Lab) -> None:
    lab.host("a", gpus=1)
    number = claim(lab, "a:gpu0", begin_s=HOUR)
    from_s = lab.scheduler.state.device_claims[number].from_s
    lab.now_s += 2 * HOUR
    lab.tell(e.ClockSet(**lab.at(), by_s=2 * HOUR))
    assert lab.scheduler.state.device_claims[number].from_s == from_s
    job, _ = lab.submit()
    assert lab.state(job) == "queued", "by the new clock it has begun"


def test_claims_are_replayed(lab: Lab, replayed: Any) -> None:
    lab.host("a", gpus=2)
    lab.submit("first")
    number = claim(lab, "a:gpu0", "a:gpu1", begin_s=HOUR, for_s=HOUR)
    fire(lab, number)
    lab.submit("second")
    assert replayed(lab).state == lab.scheduler.state


DEVICES = [f"{host}:gpu{number}" for host in ("a", "b") for number in range(3)]

STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.sampled_from([None, 600.0, 5400.0])),
    st.tuples(st.just("train"), st.integers(1, 3), st.none()),
    st.tuples(
        st.just("claim"),
        st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4, unique=True),
        st.tuples(st.sampled_from([0.0, 1200.0, 7200.0]), st.sampled_from([None, 3600.0]), st.booleans()),
    ),
    st.tuples(st.sampled_from(["finish", "time", "remove"]), st.integers(0, 5), st.none()),
)


@given(st.lists(STEPS, max_size=25))
def test_no_grant_overlaps_a_claim(steps: list[tuple[str, Any, Any]]) -> None:
    """Whatever arrives, ends and is claimed: nobody is given a device while it is claimed.

    Nor one that is claimed before the time limit of the job, which cannot move, is over.
    """
    lab = Lab()
    lab.host("a", gpus=3)
    lab.host("b", gpus=3)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    for verb, first, second in steps:
        before = {device: (holder.job, holder.generation) for device, holder in lab.scheduler.state.holders.items()}
        _take(lab, verb, first, second)
        state = lab.scheduler.state
        for device, holder in state.holders.items():
            if before.get(device) == (holder.job, holder.generation):
                continue
            windows = [c for c in state.device_claims.values() if device in c.devices]
            own = any(job == holder.job for d_, (job, _) in before.items() if d_ == device)
            assert own or not any(c.is_active(lab.now_s) for c in windows), f"{device} is claimed"
            if state.jobs[holder.job].spec.name == "command":
                started_s, limit_s = lab.attempt(holder.job).started_s, state.jobs[holder.job].spec.time_limit_s
                end_s = started_s + limit_s if limit_s is not None else float("inf")
                assert all(c.from_s >= end_s - 1.0 or c.until_s == lab.now_s for c in windows), f"{device} will be"


def _take(lab: Lab, verb: str, first: Any, second: Any) -> None:
    state = lab.scheduler.state
    running = [job for job in state.active if state.jobs[job].state.value in ("starting", "running")]
    if verb == "submit":
        lab.submit("command", devices=first, time_limit_s=second)
    elif verb == "train":
        submit(lab, "net", 30_000, devices=first)
    elif verb == "claim":
        begin_s, for_s, drain = second
        claim(lab, *first, begin_s=begin_s, for_s=for_s, drain=drain)
    elif verb == "finish" and running:
        job = JobId(running[first % len(running)])
        if state.jobs[job].state.value == "starting":
            lab.run(job)
        if state.jobs[job].spec.name == "command":
            lab.finish(job)
        else:
            progress(lab, job, 10)
    elif verb == "time" and state.timers:
        lab.fire(min(state.timers, key=lambda timer: (state.timers[timer], str(timer))))
    elif verb == "remove" and state.device_claims:
        chosen = sorted(state.device_claims)[first % len(state.device_claims)]
        lab.tell(e.DeviceClaimRemoved(**lab.at(), claim=chosen, by="ann"))
