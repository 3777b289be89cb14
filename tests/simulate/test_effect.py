"""Effect of a drain or a claim before it is made, by roll-outs with and without it."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec

from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.daemon.journal import codec
from clusterd.forecasting import Answer, Change, Request, WhatIf
from clusterd.rows import Effect
from clusterd.simulate.forecaster import answer
from clusterd.simulate.rollout import Watched, play
from clusterd.types import DeviceClaim, DeviceId, HostId, JobId, JobSpec, Resources
from tests.core.conftest import Lab


def lab_of_two() -> tuple[Lab, JobId, JobId, JobId]:
    """A job on each of two hosts, one for ten minutes and one for two hours, and one that waits for either."""
    lab = Lab()
    lab.now_s = 1e6
    for name in "ab":
        lab.host(name, gpus=2)
    # Each has run for as long before, so that how long it will run is known.
    lab.scheduler.state.run_times |= {"/short": [600.0] * 16, "/long": [7200.0] * 16, "/late": [600.0] * 16}
    short, _ = lab.submit("short", devices=2)
    lab.run(short)
    long, _ = lab.submit("long", devices=2)
    lab.run(long)
    late, _ = lab.submit("late", devices=2)
    assert lab.attempt(short).hosts == ("a",) and lab.state(late) == "queued"
    return lab, short, long, late


def ask(lab: Lab, **about: Any) -> Answer:
    request = Request(
        now_s=lab.now_s, state=codec.encode(lab.scheduler.state), tables={}, past=msgspec.msgpack.encode([]),
        policy="default", rollouts=20, cpu_s=60.0, **about,
    )  # fmt: skip
    return answer(request, POLICIES["default"]())


def effect(lab: Lab, change: Change) -> Effect:
    found = ask(lab, change=change).effect
    assert found is not None and found.rollouts == 20
    return found


def test_a_drained_host_is_free_once_its_job_ends_and_who_waits_for_it_waits_for_another() -> None:
    lab, _, _, late = lab_of_two()
    found = effect(lab, Change(drained=(HostId("a"),), jobs_stay=True))
    assert found.free is not None and 300.0 < found.free.p50_s - lab.now_s < 1200.0
    assert [each.job for each in found.delays] == [late]
    assert 5000.0 < found.delays[0].p50_s < 9000.0


def test_a_job_would_start_at_once_on_an_idle_cluster() -> None:
    """Regression: nothing was due there, so no pass was made, and start and end were not known."""
    lab = Lab()
    lab.host("a", gpus=2)
    spec = JobSpec(name="x", command=("x",), resources=Resources(devices=1), time_limit_s=60.0)
    (found,) = ask(lab, what_ifs=(WhatIf(spec=spec),)).what_ifs
    assert found.plan == "1 device"
    assert found.forecast is not None and found.forecast.start is not None and found.forecast.end is not None
    assert found.forecast.start.p50_s == lab.now_s
    assert found.forecast.end.p50_s <= lab.now_s + 60.0


def test_a_claim_for_the_night_delays_nobody_that_is_over_by_then() -> None:
    lab, *_ = lab_of_two()
    from_s = lab.now_s + 40 * 3600.0
    claim = DeviceClaim(id="1", devices=(DeviceId("a:gpu0"),), from_s=from_s, until_s=from_s + 3600.0, reason="fan")
    found = effect(lab, Change(claim=claim))
    assert found.delays == () and found.free is not None and found.free.p50_s == claim.from_s


def test_a_claim_from_now_on_delays_who_waits_by_its_length() -> None:
    lab, _, _, late = lab_of_two()
    everything = tuple(DeviceId(f"{host}:gpu{n}") for host in "ab" for n in range(2))
    claim = DeviceClaim(id="1", devices=everything, from_s=lab.now_s, until_s=lab.now_s + 10 * 3600.0, reason="move")
    found = effect(lab, Change(claim=claim))
    assert [each.job for each in found.delays] == [late]
    assert 9 * 3600.0 < found.delays[0].p50_s < 10 * 3600.0


def test_jobs_stay_on_a_host_that_is_drained_when_idle() -> None:
    lab, short, *_ = lab_of_two()
    lab.tell(e.HostDrained(**lab.at(), host=HostId("a"), by="ann", jobs_stay=True))
    assert lab.why(short) == "a is drained (by ann): it stays there until its end"
    free, _ = lab.submit("more", devices=1)
    assert lab.state(free) == "queued"


def test_who_would_never_run_under_a_claim_without_end_is_named() -> None:
    lab, short, long, late = lab_of_two()
    everything = tuple(DeviceId(f"{host}:gpu{n}") for host in "ab" for n in range(2))
    found = effect(lab, Change(claim=DeviceClaim(id="1", devices=everything, from_s=lab.now_s, reason="sold")))
    assert [(each.job, each.p50_s) for each in found.delays] == [(late, None)]
    assert {short, long}.isdisjoint(each.job for each in found.delays)


def test_a_course_that_is_cut_off_does_not_tell_when_a_claimed_device_is_free() -> None:
    """The device is free at the cut; what takes it before the claim begins has not been played."""
    lab = Lab()
    lab.now_s = 1e6
    lab.host("a", gpus=1)
    job, _ = lab.submit("job", time_limit_s=60.0)
    watched = Watched(devices=(DeviceId("a:gpu1"),), from_s=lab.now_s + 1e5)
    state = lab.scheduler.state
    course = play(state, POLICIES["default"](), [], lab.now_s, [job], passes_s=0.0, watched=watched)
    assert course.free_s == inf
