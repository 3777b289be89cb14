"""CPU cores beside devices: assignment and return."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.plans.plan import Plan
from clusterd.types import AttemptReport, AttemptState, HostId, JobId, JobKind, JobSpec, RankReport, Resources
from tests.core.allocation.test_device_claims import claim, fire
from tests.core.conftest import Lab

CORES = 32
STEP_S = {1: 8.0, 2: 4.4, 4: 2.6, 8: 1.7}
"""By cores beside each device, of a model with its optimizer on the host."""


def offloaded(**changed: Any) -> PerformanceTable:
    """A model that runs on one or two devices, and takes the cores that it gets."""
    return PerformanceTable(
        tuple(
            Estimate(
                **{
                    "plan": Plan(dp=n, zero=2, offload="optimizer"),
                    "device_type": "cuda",
                    "shape": (n,),
                    "step_time_s": STEP_S[4] / n,
                    "lower_s": STEP_S[4] / n,
                    "upper_s": STEP_S[4] / n,
                    "cores_per_device": 4,
                    "core_times": tuple((cores, t / n) for cores, t in STEP_S.items()),
                    **changed,
                }
            )
            for n in (1, 2)
        ),
        global_batch=16,
        measured=7,
    )


def lab_of(gpus: int, **changed: Any) -> Lab:
    lab = Lab()
    lab.host("a", gpus=gpus, cores=CORES)
    lab.tell(e.SpeedLearned(**lab.at(), model="large", table=offloaded(**changed), why="trials"))
    return lab


def submit(lab: Lab, name: str, steps: int = 3000, cpus: int = 0, **what: Any) -> tuple[JobId, list[d.Decision]]:
    lab.jobs += 1
    job = JobId(str(lab.jobs))
    resources = Resources(devices=1, cpus=cpus)
    spec = JobSpec(name=name, kind=JobKind.ELASTIC, command=("x",), resources=resources, **what)
    shape = {"parameters": [], "layers": [], "samples": 16, "global_batch": 16, "steps": steps}
    stamp = lab.at()
    return job, lab.tell(
        e.JobSubmitted(**stamp, job=job, spec=spec),
        e.ModelDescribed(**{**stamp, "id": e.EventId(stamp["id"] + 1)}, job=job, shape=shape, model="large"),
    )


def command(lab: Lab, cpus: int) -> JobId:
    lab.jobs += 1
    job = JobId(str(lab.jobs))
    spec = JobSpec(name="prepare", kind=JobKind.COMMAND, command=("x",), resources=Resources(devices=0, cpus=cpus))
    lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))
    return job


def each(lab: Lab, job: JobId) -> float:
    """Cores beside each device."""
    attempt = lab.attempt(job)
    return attempt.booked.cores[HostId("a")] / len(attempt.ranks)


def test_cores_that_nobody_needs_go_where_they_save_time() -> None:
    lab = lab_of(gpus=1)
    job, _ = submit(lab, "alone")
    assert each(lab, job) == 8, "more would save nothing"


def test_a_second_job_gets_its_share_of_them_without_a_rank_being_moved() -> None:
    """Ten cores: eight were worth it to the first; the next core is worth more to the second."""
    lab = Lab()
    lab.host("a", gpus=2, cores=10)
    lab.tell(e.SpeedLearned(**lab.at(), model="large", table=offloaded(), why="trials"))
    table = PerformanceTable(offloaded().estimates[:1], 16, measured=7)  # one device each
    lab.tell(e.SpeedLearned(**lab.at(), model="large", table=table, why="trials"))
    first, _ = submit(lab, "first")
    lab.run(first)
    assert each(lab, first) == 8
    lab.tell(e.AttemptProgressed(**lab.at(), job=first, attempt=1, step=1, loss=None, step_time_s=1.7))
    second, decided = submit(lab, "second")
    word = d.UseCores.match(decided, job=first)
    assert word is not None and word.each == 4 == each(lab, first)
    assert "instead of 1.7: the others serve somebody better" in word.reason
    assert d.StartMigration.match(decided) is None
    assert each(lab, second) == 4
    lab.run(second)
    back = d.UseCores.match(lab.finish(second), job=first)
    assert back is not None and back.each == 8 and "nobody needs them more" in back.reason


def test_a_host_that_was_away_is_told_again() -> None:
    """The word may have come while nobody could pass it on."""
    lab = lab_of(gpus=1)
    job, _ = submit(lab, "training")
    lab.run(job)
    report = AttemptReport(job=job, attempt=1, generation=1, ranks=(RankReport(rank=0, end=None),))
    again = d.UseCores.match(lab.connect("a", report))
    assert again is None, "its ranks were launched with these"
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=1, loss=None, step_time_s=1.7))
    command(lab, cpus=CORES - 2)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="timeout"))
    again = d.UseCores.match(lab.connect("a", report), job=job)
    assert again is not None and again.each == 2


def test_a_command_that_waits_for_cores_gets_those_beyond_others_least() -> None:
    lab = lab_of(gpus=1)
    job, _ = submit(lab, "training")
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=1, loss=None, step_time_s=1.7))
    prepare = command(lab, cpus=CORES - 2)
    assert lab.attempt(prepare) is not None
    assert each(lab, job) == 2, "and keeps what is left"
    waits = command(lab, cpus=4)
    assert lab.scheduler.state.jobs[waits].attempt is None
    assert "CPU cores" in lab.why(waits)


def test_cores_on_loan_are_there_when_a_booking_begins() -> None:
    """Of ten cores a booking of one of two devices has five; until it begins, eight are worth it to who trains."""
    lab = Lab()
    lab.host("a", gpus=2, cores=10)
    table = PerformanceTable(offloaded().estimates[:1], 16, measured=7)
    lab.tell(e.SpeedLearned(**lab.at(), model="large", table=table, why="trials"))
    first, _ = submit(lab, "first")
    lab.run(first)
    lab.tell(e.AttemptProgressed(**lab.at(), job=first, attempt=1, step=1, loss=None, step_time_s=1.7))
    (used,) = lab.attempt(first).devices
    number = claim(lab, "a:gpu1" if used == "a:gpu0" else "a:gpu0", begin_s=3600.0, for_s=7200.0, owner="ann")
    booked, _ = lab.submit("booked", devices=1, cpus=5, user="ann", booking=number)
    assert each(lab, first) == 8
    fire(lab, number)
    assert (lab.state(booked), lab.attempt(booked).booked.cores) == ("starting", {"a": 5})
    assert each(lab, first) == 4, "more is worth nothing to it until eight"


def test_nobody_goes_below_what_it_asked_for_or_was_promised() -> None:
    for what, least in (({"cpus": 3}, 3), ({"guaranteed": True}, 4), ({}, 1)):
        lab = lab_of(gpus=1)
        job, _ = submit(lab, "training", **what)
        lab.run(job)
        lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=1, loss=None, step_time_s=1.7))
        assert each(lab, job) == 8
        prepare = command(lab, cpus=CORES - least)
        assert lab.scheduler.state.jobs[prepare].attempt is not None
        assert each(lab, job) == least


def test_where_cores_make_no_difference_none_change_hands() -> None:
    lab = lab_of(gpus=1, core_times=(), cores_per_device=0)
    job, _ = submit(lab, "training")
    lab.run(job)
    submit(lab, "next")
    assert each(lab, job) == 1
    assert d.UseCores.match(lab.decisions) is None


what_comes = st.sampled_from(["elastic", "guaranteed", "command", "finish"])
requests = st.lists(
    st.tuples(what_comes, st.integers(0, 12), st.integers(10, 5000)),
    min_size=1,
    max_size=12,
)


@given(requests)
@settings(max_examples=60, deadline=None)
def test_cores_are_never_given_twice(requests: list[tuple[str, int, int]]) -> None:
    """Whatever comes and goes; books are checked after every event."""
    lab = lab_of(gpus=6)
    for kind, cpus, steps in requests:
        state = lab.scheduler.state
        if kind == "finish":
            running = [job for job in state.active if state.jobs[job].attempt is not None]
            if running and not any(state.jobs[j].attempt.migration for j in running):
                lab.run(running[0])
                lab.finish(running[0])
        elif kind == "command":
            command(lab, cpus=cpus)
        else:
            submit(lab, kind, steps, cpus=cpus, guaranteed=kind == "guaranteed")
        for job in list(state.active):
            if lab.attempt(job).state is AttemptState.LAUNCHING:
                lab.run(job)
        assert state.hosts[HostId("a")].cores_used <= CORES
