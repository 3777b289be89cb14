"""Roll-outs of a live state: with all run times known they are what happens, else they are as wide as what is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import Job, State
from clusterd.forecasting import PastJob
from clusterd.simulate.arrivals import Arrivals
from clusterd.simulate.cluster import parse_cluster
from clusterd.simulate.generate import Spec, generate
from clusterd.simulate.live import LiveSimulation
from clusterd.simulate.loop import NOT_SIMULATED, Simulation
from clusterd.simulate.remaining import Chance, Elapsing, courses_of, total_time
from clusterd.simulate.rollout import Course, play, roll_out, summary
from clusterd.simulate.run import believe
from clusterd.simulate.runs import Run
from clusterd.simulate.setting import Setting
from clusterd.types import AttemptState, JobId, JobSpec, Resources
from tests.simulate.clusters import cluster_of

FOR_EVER_S = 1e9


def copy_of(state: State) -> State:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)


def is_quiet(state: State) -> bool:
    """True where no launch, stop or migration is under way."""
    jobs = [state.jobs[job] for job in state.active]
    running = all(job.attempt is not None and job.attempt.state is AttemptState.RUNNING for job in jobs)
    return running and not any(job.attempt and (job.attempt.migration or job.attempt.retired) for job in jobs)


@dataclass
class Capture:
    """State and true progress of jobs after some batch, and the whole course."""

    batch: int
    quiet: bool = False  # only once nothing is under way
    simulation: Simulation | None = None
    course: Course = field(default_factory=Course)
    count: int = 0
    state: State | None = None
    runs: list[Run] = field(default_factory=list)
    now_s: float = 0.0

    def on_batch(self, scheduler: Scheduler, events: Sequence[e.Event], decisions: Sequence[d.Decision]) -> None:
        self.course.on_batch(scheduler, events, decisions)
        if self.state is None and self.count >= self.batch and (not self.quiet or is_quiet(scheduler.state)):
            assert self.simulation is not None
            self.state, self.now_s = copy_of(scheduler.state), events[-1].at_s
            self.runs = [deepcopy(run) for run in self.simulation.runs.values() if run.job in scheduler.state.jobs]
        self.count += 1


def went_on(capture: Capture, **changes: float) -> tuple[Course, Course]:
    """The course that a roll-out from the capture takes, and the true one from there on."""
    assert capture.state is not None
    course = Course()
    awaited = [*capture.state.active, *capture.state.queue]
    runs = [run for run in capture.runs if run.job in awaited]
    live = LiveSimulation(POLICIES["default"](), FOR_EVER_S, on_batch=course.on_batch, **changes)
    live.go_on(copy_of(capture.state), runs, capture.now_s, awaited)
    true = Course(
        {job: at_s for job, at_s in capture.course.start_s.items() if job in course.start_s},
        {job: at_s for job, at_s in capture.course.end_s.items() if job in awaited},
    )
    return course, true


def command(name: str, devices: int, **others: object) -> JobSpec:
    return JobSpec(name=name, command=("x",), user="ann", resources=Resources(devices=devices, kind="cuda"), **others)  # type: ignore[arg-type]


JOBS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.integers(10, 5000),
        st.sampled_from([None, 600.0, 4000.0]),
        st.integers(0, 1),
        st.booleans(),
    ),
    min_size=2,
    max_size=12,
)


# Regression: a pass of its own at the beginning of a roll-out set the next round to where the daemon has none.
PREEMPTED = [
    (1, 10, None, 0, False),
    (1, 10, 4000.0, 0, False),
    (2, 11, None, 0, False),
    (1, 11, 4000.0, 0, True),
    (4, 10, 600.0, 0, False),
]


@settings(max_examples=25)
@given(JOBS, st.integers(0, 25), st.integers(0, 3))
@example(PREEMPTED, 1, 0)
def test_with_all_run_times_known_the_forecast_is_what_happens(jobs: list[tuple], batch: int, late: int) -> None:
    """Commands with and without limits, of two priorities, some preemptible, some still to arrive at the start."""
    capture = Capture(batch)
    simulation = LiveSimulation(POLICIES["default"](), FOR_EVER_S, on_batch=capture.on_batch)
    capture.simulation = simulation
    for number, (devices, run_s, limit_s, priority, preemptible) in enumerate(jobs):
        job, name = JobId(str(number + 1)), f"job{number}"
        spec = command(name, devices, time_limit_s=limit_s, priority=priority, preemptible=preemptible)
        run = Run(job=job, name=name, steps=run_s, speed=Elapsing(), has_steps=False, keeps_state=False)
        simulation.submit(1.0 + (number % (late + 1)) * 0.5, spec, run)
    simulation.go_on(cluster_of("2x4:g"), [], 0.0, [JobId(str(n + 1)) for n in range(len(jobs))])
    if capture.state is None or len(capture.state.jobs) < len(jobs):
        return
    course, true = went_on(capture)
    assert course.end_s == true.end_s
    new = [job for job in capture.state.queue if capture.state.jobs[job].started_s is None]
    assert {job: course.start_s.get(job) for job in new} == {job: true.start_s.get(job) for job in new}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("batch", [20, 45, 90])
def test_elastic_jobs_go_on_from_a_live_state_as_they_would_have(batch: int) -> None:
    cluster = parse_cluster("2x8:g")
    truth, workload = generate(Spec(jobs=24, load=40.0, median=1200.0), cluster)
    workload = replace(workload, arrivals=tuple(replace(a, at_s=0.0) for a in workload.arrivals))
    tables = believe(truth, True, 0, [a.model for a in workload.arrivals])
    capture = Capture(batch, quiet=True)
    setting = Setting(cluster, workload, truth, tables, move_s=0.0)
    capture.simulation = Simulation(setting, POLICIES["default"](), capture.on_batch)
    capture.simulation.run()
    course, true = went_on(capture, move_s=0.0)
    assert len(course.end_s) > 3
    assert course.end_s == pytest.approx(true.end_s, rel=1e-6)


def test_a_roll_out_names_the_job_whose_end_lets_another_start() -> None:
    state, policy = cluster_of("1x4:g"), POLICIES["default"]()
    scheduler = Scheduler(policy)
    scheduler.state = state
    first, second = JobId("1"), JobId("2")
    scheduler.handle(e.JobSubmitted(at_s=1.0, job=first, spec=command("wide", 4)))
    scheduler.handle(e.JobSubmitted(at_s=2.0, job=second, spec=command("late", 2)))
    draws = courses_of(state, 10.0)
    courses = [course for course, _ in zip(roll_out(state, policy, draws, 10.0, "seed"), range(20), strict=False)]
    found = summary(courses, state, draws, 10.0)
    assert found[second].after == "wide"
    assert found[second].rollouts == 20
    assert found[first].start is None, "it has started"
    start, end = found[second].start, found[first].end
    assert start is not None and end is not None
    assert start.p50_s == pytest.approx(end.p50_s, rel=0.05)
    assert scheduler.state.jobs[second].attempts == [], "nothing of it happens to the live state"


def test_a_job_that_is_to_begin_at_a_time_is_forecast_for_that_time() -> None:
    """Regression: `--begin 16:00` of tomorrow was expected at 16:02, between 16:02 and 16:02."""
    state, policy, job = cluster_of("1x1:g"), POLICIES["default"](), JobId("1")
    scheduler = Scheduler(policy)
    scheduler.state = state
    scheduler.handle(e.JobSubmitted(at_s=1.0, job=job, spec=command("net", 1, begin_s=86400.0)))
    draws = courses_of(state, 10.0)
    found = summary(list(islice(roll_out(state, policy, draws, 10.0, "seed"), 20)), state, draws, 10.0)
    start = found[job].start
    assert start is not None
    assert (start.p5_s, start.p95_s) == (pytest.approx(86400.0, abs=1.0), pytest.approx(86400.0, abs=1.0))


def test_what_a_roll_out_has_no_time_to_play_is_not_known() -> None:
    state, policy = cluster_of("1x1:g"), POLICIES["default"]()
    scheduler = Scheduler(policy)
    scheduler.state = state
    for number in range(4):
        scheduler.handle(e.JobSubmitted(at_s=1.0, job=JobId(str(number)), spec=command("net", 1)))
    draws = courses_of(state, 10.0)
    courses = list(islice(roll_out(state, policy, draws, 10.0, "seed", passes_s=0.0), 5))
    assert JobId("3") not in summary(courses, state, draws, 10.0)


def test_the_same_seed_gives_the_same_courses() -> None:
    state, policy = cluster_of("1x2:g"), POLICIES["default"]()
    scheduler = Scheduler(policy)
    scheduler.state = state
    for number in range(4):
        scheduler.handle(e.JobSubmitted(at_s=1.0, job=JobId(str(number)), spec=command("net", 1)))
    draws = courses_of(state, 10.0)

    def ends(seed: str) -> list[dict[JobId, float]]:
        return [course.end_s for course, _ in zip(roll_out(state, policy, draws, 10.0, seed), range(3), strict=False)]

    assert ends("a") == ends("a") != ends("b")


@given(st.lists(st.floats(1.0, 1e6), max_size=16), st.floats(0.0, 1e6), st.none() | st.floats(1.0, 1e6))
def test_a_job_is_drawn_to_run_longer_than_it_has(known: list[float], elapsed_s: float, limit_s: float | None) -> None:
    job = Job(JobId("1"), command("net", 1, time_limit_s=limit_s), 0, 0.0, 0.0)
    draw = total_time(job, {"ann/net": known}, elapsed_s, limit_s if limit_s is not None else float("inf"))
    random_ = Chance("1")
    assert all(draw(random_) > elapsed_s for _ in range(20))


def test_earlier_runs_of_the_same_name_tell_how_long_the_next_one_takes() -> None:
    """Sixteen runs of an hour make the next one an hour; without them it may be anything."""
    job = Job(JobId("1"), command("net", 1), 0, 0.0, 0.0)

    def interval(known: list[float]) -> tuple[float, float]:
        draw = total_time(job, {"ann/net": known}, 0.0, float("inf"))
        drawn = sorted(draw(Chance(str(course))) for course in range(400))
        return drawn[40], drawn[360]

    low, high = interval([3600.0] * 16)
    assert 3000.0 < low <= high < 4500.0
    low, high = interval([])
    assert high > 50.0 * low


def test_jobs_of_a_batch_are_long_together() -> None:
    """Nothing is known of eight jobs of one name: in most courses the last is like one before it, not drawn alone."""
    job = Job(JobId("1"), command("net", 1), 0, 0.0, 0.0)
    draw, alike = total_time(job, {}, 0.0, float("inf")), 0
    for course in range(100):
        random_ = Chance(str(course))
        *others, last = [draw(random_) for _ in range(8)]
        alike += any(0.2 < last / other < 5.0 for other in others)
    independent = [draw(Chance(f"alone {course}")) for course in range(100)]
    by_chance = sum(0.2 < one / other < 5.0 for one, other in pairwise(independent))
    assert by_chance < 60 < alike


def test_a_batch_that_still_runs_tells_of_those_behind_it() -> None:
    """Regression: sixteen runs of a minute said that the next takes one, while twenty of its name ran for a day."""
    job = Job(JobId("1"), command("net", 1), 0, 0.0, 0.0)
    known = {"ann/net": [60.0] * 16}
    running = total_time(job, known, 86400.0, float("inf"))
    waiting = total_time(job, known, 0.0, float("inf"))
    long = 0
    for course in range(100):
        random_ = Chance(str(course))
        for _ in range(20):
            running(random_)
        long += waiting(random_) > 3600.0
    assert 30 < long < 80


def test_later_submissions_are_those_of_the_same_hours_of_past_weeks() -> None:
    """Each Monday at 10 a job was submitted: at 9 the next one is expected at 10, and with one week of history none."""
    now_s, hour_s, week_s = 1e6, 3600.0, 7 * 86400.0
    random_ = random.Random(1)

    def past(weeks: int) -> Arrivals:
        jobs = [
            PastJob(at_s=now_s + hour_s - n * week_s, spec=command("net", 1), ran_s=60.0) for n in range(1, weeks + 2)
        ]
        return Arrivals(jobs, now_s)

    known = past(3)
    assert known.weeks == 3
    assert [(at_s, job.ran_s) for at_s, job in known.draw(random_)] == [(now_s + hour_s, 60.0)]
    assert past(1).weeks == 0
    assert past(1).draw(random_) == []


def test_a_job_that_is_submitted_later_can_delay_one_that_waits() -> None:
    """Of a higher priority, an hour from now, while a job of two hours holds the only device."""
    state, now_s = cluster_of("1x1:g"), 10.0
    scheduler = Scheduler()
    scheduler.state = state
    limits = {"time_limit_s": 7200.0}
    for job in ("1", "2"):
        scheduler.handle(e.JobSubmitted(at_s=1.0, job=JobId(job), spec=command(f"job{job}", 1, **limits)))

    def start_s(later: list[tuple[float, PastJob]]) -> float:
        runs = [
            Run(job=JobId(job), name=job, steps=5000.0, speed=Elapsing(), has_steps=False, keeps_state=False)
            for job in ("1", "2")
        ]
        return play(copy_of(state), POLICIES["default"](), runs, now_s, [JobId("2")], later).start_s[JobId("2")]

    urgent = PastJob(at_s=0.0, spec=command("urgent", 1, priority=5), ran_s=1000.0)
    assert start_s([(3600.0, urgent)]) == pytest.approx(start_s([]) + 1000.0, rel=0.02)


def test_each_decision_has_its_effect_in_a_simulation() -> None:
    """One without a method would break the forecasts of whoever has such a decision ahead."""
    without = [
        name
        for name, kind in d.DECISIONS.items()
        if not issubclass(kind, NOT_SIMULATED) and not hasattr(LiveSimulation, f"_do_{kind.__name__}")
    ]
    assert set(without) <= {"AbortCollectives"}, "which only faults cause"
