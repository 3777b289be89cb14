"""Forecasts of starts and ends against what happens, and against Slurm's method on the same queue.

python tests/benchmarks/forecasts.py [--json] [--seeds N] [--jobs N] [--rollouts N] [--recorded]

Commands of some users arrive on 4 hosts of 4 GPUs. Each name has its own median run time, its runs are lognormal about
it, and users ask for 1.2 to 8 times as long. The first half of the jobs is history; then, at every fifth submission,
the jobs that are not over are forecast. Roll-outs draw later submissions from
four weeks of history of the same users. Widening is learned only from what had happened by then. Slurm's method takes
limits for run times and plans the queue in order of arrival, with backfill. Figures are for seeds 1 to N; 101 on are
for development.

`--recorded` takes jobs of a trace from a production cluster (philly_durations.csv, under CLUSTERD_DATA): in their
order, with their run times, users (its virtual clusters) and numbers of devices, up to four. Their times of arrival are
stretched to the load that 16 GPUs carry, and those of 2,000 jobs before them that had ended are known, as are the
outcomes of the forecasts of the queues before. They have no names but their size, and no limits, so Slurm's method has
no answer.

`rollouts_200_s` is the processor time of five roll-outs of 16 hosts with 100 jobs, half of them with finished runs,
times forty. `encode_ms` is how long the event loop waits for the state of so many jobs to be encoded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.lifecycle.jobs import RUN_TIMES_MAX
from clusterd.core.policies import POLICIES
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.daemon.forecasts.forecaster import live_part
from clusterd.daemon.forecasts.outcomes import LEARNED_FROM, Outcome, Widening, is_within, learned, pinball_s
from clusterd.daemon.journal import codec
from clusterd.forecasting import PastJob
from clusterd.simulate.arrivals import Arrivals
from clusterd.simulate.live import LiveSimulation
from clusterd.simulate.remaining import Elapsing, courses_of
from clusterd.simulate.rollout import Course, roll_out, summary
from clusterd.simulate.runs import Run
from clusterd.types import JobId, JobSpec, Resources
from tests.benchmarks.report import Report, arguments
from tests.simulate.clusters import cluster_of

HORIZON_S = 1e9
LONG_WAIT_S = 600.0
GAP_S = 400.0
PAST_S = 30 * 86400.0
RECORDED_PAST = 2000
DATA = Path(os.environ.get("CLUSTERD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


@dataclass(frozen=True)
class Drawn:
    """A job of the generated workload."""

    at_s: float
    spec: JobSpec
    run_s: float


def workload(seed: int, jobs: int, part: str = "") -> list[Drawn]:
    """Jobs of four users with three names each, at about the load that 16 GPUs carry; other parts have other jobs."""
    random_ = random.Random(f"forecasts {seed}")
    kinds = [
        (f"u{user}", f"n{user}{name}", random_.lognormvariate(math.log(1800.0), 1.0), random_.choice([1, 1, 2, 4]))
        for user in range(4)
        for name in range(3)
    ]
    random_ = random.Random(f"forecasts {seed} {part}")
    found, at_s = [], 0.0
    for _ in range(jobs):
        user, name, median_s, devices = random_.choice(kinds)
        run_s = median_s * random_.lognormvariate(0.0, 0.4)
        limit_s = math.ceil(median_s * random_.uniform(1.2, 8.0) / 300.0) * 300.0
        at_s += random_.expovariate(1.0 / GAP_S)
        spec = JobSpec(
            name=name,
            user=user,
            command=("x",),
            resources=Resources(devices=devices, kind="cuda"),
            time_limit_s=limit_s,
        )
        found.append(Drawn(at_s, spec, min(run_s, limit_s)))
    return found


def recorded(seed: int, jobs: int, past: int) -> tuple[list[Drawn], list[PastJob]]:
    """Consecutive jobs of the trace from a drawn one on, and those before it, at about the load that 16 GPUs carry."""
    with (DATA / "pollux" / "philly_durations.csv").open() as file:
        rows = sorted(
            (
                datetime.fromisoformat(row["timestamp"]).timestamp(),
                float(row["duration"]),
                int(row["num_gpus"]),
                row["cluster"],
            )
            for row in csv.DictReader(file)
            if 1 <= int(row["num_gpus"]) <= 4 and float(row["duration"]) >= 1.0
        )
    first = random.Random(f"recorded {seed}").randrange(past, len(rows) - jobs)
    some = rows[first - past : first + jobs]
    work_s = sum(run_s * devices for _, run_s, devices, _ in some) / 16.0
    from_s, stretch = rows[first][0], work_s / (some[-1][0] - some[0][0])
    found = []
    for at_s, run_s, devices, user in some:
        resources = Resources(devices=devices, kind="cuda")
        spec = JobSpec(name=f"{user}-{devices}", user=user, command=("x",), resources=resources)
        found.append(Drawn((at_s - from_s) * stretch, spec, run_s))
    return found[past:], [PastJob(at_s=job.at_s, spec=job.spec, ran_s=job.run_s) for job in found[:past]]


@dataclass
class Captures:
    """States of the true course at some submissions, and the course itself."""

    from_job: int
    course: Course = field(default_factory=Course)
    states: list[tuple[float, bytes]] = field(default_factory=list)
    count: int = 0

    def on_batch(self, scheduler: Scheduler, events: Sequence[e.Event], decisions: Sequence[d.Decision]) -> None:
        """Record the batch."""
        self.course.on_batch(scheduler, events, decisions)
        is_submission = any(isinstance(event, e.JobSubmitted) for event in events)
        if not is_submission or len(scheduler.state.jobs) < self.from_job or not scheduler.state.queue:
            return
        self.count += 1
        if self.count % 5 == 1:
            self.states.append((events[-1].at_s, codec.encode(live_part(scheduler.state))))


def by_limits(state: State, now_s: float) -> dict[JobId, float]:
    """Starts of queued jobs by Slurm's method: every run takes its limit, first come first served, with backfill.

    None, where a job has no limit.
    """
    if any(state.jobs[job].spec.time_limit_s is None for job in (*state.active, *state.queue)):
        return {}
    free = {host: len(each.devices) for host, each in state.hosts.items()}
    changes: dict[str, list[tuple[float, int]]] = {host: [] for host in free}
    for job in map(state.jobs.__getitem__, state.active):
        attempt, limit_s = job.attempt, job.spec.time_limit_s
        assert attempt is not None and limit_s is not None
        for rank in attempt.ranks.values():
            free[rank.place.host] -= 1
            changes[rank.place.host].append((max(attempt.started_s + limit_s, now_s), 1))
    found: dict[JobId, float] = {}
    for job in sorted(map(state.jobs.__getitem__, state.queue), key=lambda job: (job.submitted_s, int(job.id))):
        limit_s, count = job.spec.time_limit_s or 0.0, job.spec.resources.devices
        times = sorted({now_s, *(at_s for some in changes.values() for at_s, _ in some)})

        def fits(host: str, at_s: float, until_s: float, count: int = count) -> bool:
            points = [at_s, *(t for t, _ in changes[host] if at_s < t < until_s)]
            return all(free[host] + sum(n for t, n in changes[host] if t <= point) >= count for point in points)

        at_s, host = next((t, h) for t in times for h in free if fits(h, t, t + limit_s))
        changes[host] += [(at_s, -count), (at_s + limit_s, count)]
        found[job.id] = at_s
    return found


@dataclass(frozen=True)
class Shown:
    """A forecast as it was shown, with its outcome."""

    outcome: Outcome
    is_wait: bool  # of a start
    slurm_error_s: float | None = None


def generated(seed: int, jobs: int) -> tuple[list[Drawn], list[PastJob]]:
    """A workload and its past."""
    # A stationary process: the past of the same weekly hours is another part of it.
    past = workload(seed, int(PAST_S / GAP_S), "past")
    return workload(seed, jobs), [PastJob(at_s=job.at_s - PAST_S, spec=job.spec, ran_s=job.run_s) for job in past]


def run_times(past: Sequence[PastJob]) -> dict[str, list[float]]:
    """Run times of jobs that were over before time 0, as the state remembers them."""
    found: dict[str, list[float]] = {}
    for job in sorted((job for job in past if job.at_s + job.ran_s < 0.0), key=lambda job: job.at_s + job.ran_s):
        for key in (f"{job.spec.user}/{job.spec.name}", job.spec.user):
            found[key] = [*found.get(key, ()), job.ran_s][-RUN_TIMES_MAX:]
    return found


def of_workload(
    drawn: Sequence[Drawn],
    past: Sequence[PastJob],
    known: Mapping[str, list[float]],
    before: Sequence[Shown],
    seed: int,
    rollouts: int,
) -> list[Shown]:
    """Forecasts of one workload.

    Args:
        known: run times that are known at its start.
        before: forecasts of whose outcomes it is known at its start, oldest first.
    """
    jobs = len(drawn)
    captures = Captures(from_job=jobs // 2)
    truth = LiveSimulation(POLICIES["default"](), HORIZON_S, on_batch=captures.on_batch)
    for number, job in enumerate(drawn, 1):
        name = job.spec.name
        run = Run(
            job=JobId(str(number)), name=name, steps=job.run_s, speed=Elapsing(), has_steps=False, keeps_state=False
        )
        truth.submit(job.at_s, job.spec, run)
    there = cluster_of("4x4:g")
    there.run_times.update(known)
    truth.go_on(there, [], 0.0, [JobId(str(number)) for number in range(1, jobs + 1)])
    policy, found = POLICIES["default"](), list[Shown]()
    for now_s, body in captures.states:
        state = codec.state(body)
        newest = [*before, *(each for each in found if each.outcome.came_s <= now_s)][-LEARNED_FROM:]
        widening = learned(each.outcome for each in newest)
        draws = courses_of(state, now_s)
        courses = list(islice(roll_out(state, policy, draws, now_s, str(seed), None, Arrivals(past, now_s)), rollouts))
        slurm = by_limits(state, now_s)
        for job_id, forecast in summary(courses, state, draws, now_s).items():
            for what, times, true in (
                ("start", forecast.start, captures.course.start_s),
                ("end", forecast.end, captures.course.end_s),
            ):
                if times is None:
                    continue
                used = widening.get(what, Widening())
                outcome = Outcome(what, "command", now_s, times, used, true[job_id])
                error_s = abs(slurm[job_id] - true[job_id]) if what == "start" and job_id in slurm else None
                found.append(Shown(outcome, what == "start", error_s))
    return found


def coverage(some: Sequence[Shown], share: int, widened: bool = True) -> float | None:
    """Share of outcomes within the interval."""
    if not some:
        return None
    hits = []
    for each in some:
        one = each.outcome
        shown = one.widening.applied(one.raw, one.at_s) if widened else one.raw
        ends = (shown.p25_s, shown.p75_s) if share == 50 else (shown.p5_s, shown.p95_s)
        hits.append(is_within(one.came_s, *ends))
    return statistics.fmean(hits)


def lab(hosts: int, jobs: int) -> tuple[State, float]:
    """A full cluster with so many jobs that are not over; the names of every second one have finished runs."""
    random_, scheduler = random.Random(3), Scheduler()
    scheduler.state = cluster_of(f"{hosts}x8:g")
    for name in range(6):
        scheduler.state.run_times[f"ann/n{name}"] = [random_.lognormvariate(8.0, 1.0) for _ in range(8)]
    for number in range(1, jobs + 1):
        spec = JobSpec(
            name=f"n{random_.randrange(12)}",
            user="ann" if number % 2 else f"u{number % 7}",
            command=("x",),
            resources=Resources(devices=random_.choice([1, 1, 2, 4, 8]), kind="cuda"),
            time_limit_s=random_.choice([None, 86400.0]),
        )
        for decision in scheduler.handle(e.JobSubmitted(at_s=float(number), job=JobId(str(number)), spec=spec)):
            if isinstance(decision, d.LaunchAttempt):
                about = {"job": decision.job, "attempt": decision.attempt, "generation": decision.generation}
                scheduler.handle(e.AttemptLaunched(at_s=float(number), **about))
    return scheduler.state, float(jobs)


def rollout_s(hosts: int, jobs: int, count: int = 5) -> float:
    """Processor time of one roll-out."""
    state, now_s = lab(hosts, jobs)
    policy, draws = POLICIES["default"](), courses_of(state, now_s)
    courses = roll_out(state, policy, draws, now_s, "")
    next(courses)  # fills the policy's caches
    begun_s = time.process_time()
    for _ in range(count):
        next(courses)
    return (time.process_time() - begun_s) / count


def encode_ms(jobs: int) -> float:
    """Milliseconds in which the event loop waits for the state to be encoded; the least of five."""
    state, _ = lab(16, jobs)
    took: list[float] = []
    for _ in range(5):
        begun_s = time.perf_counter()
        msgspec.msgpack.encode(live_part(state))
        took.append(time.perf_counter() - begun_s)
    return min(took) * 1e3


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--recorded", action="store_true", help="jobs of a trace, not generated ones")
    parser.add_argument("--only-accuracy", action="store_true", help="leave the times out")
    given = parser.parse_args()
    report = Report("forecasts")
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    shown: list[Shown] = []
    for seed in seeds:
        drawn, past = recorded(seed, given.jobs, RECORDED_PAST) if given.recorded else generated(seed, given.jobs)
        # Generated queues are of labs that have just begun, those of the trace of one that goes on.
        known, before = (run_times(past), shown) if given.recorded else ({}, [])
        shown += of_workload(drawn, past, known, before, seed, given.rollouts)
    starts = [each for each in shown if each.is_wait]
    late = [each for each in starts if each.outcome.came_s - each.outcome.at_s > LONG_WAIT_S]
    report.add("forecasts", len(shown))
    for name, some in (("all", shown), ("starts", starts), ("waits_over_10m", late)):
        report.add(f"within_90_{name}", coverage(some, 90), at_least=0.85, at_most=0.95)
        report.add(f"within_50_{name}", coverage(some, 50), at_least=0.45, at_most=0.55)
        report.add(f"within_90_{name}_unwidened", coverage(some, 90, widened=False))
        if late_ones := [each.outcome for each in some if each.outcome.raw.p95_s is not None]:
            report.add(
                f"later_than_p95_{name}_unwidened", statistics.fmean(one.came_s > one.raw.p95_s for one in late_ones)
            )
    widths = [each.outcome.widening.applied(each.outcome.raw, each.outcome.at_s) for each in starts]
    known = [q.p95_s - q.p5_s for q in widths if q.p95_s is not None and q.p5_s is not None]
    if known:
        report.add("width_90_starts_s", statistics.median(known))
    report.add(
        "pinball_starts_s", statistics.fmean(pinball_s(each.outcome.came_s, each.outcome.raw) for each in starts)
    )
    ours_s = statistics.median(abs(each.outcome.raw.p50_s - each.outcome.came_s) for each in starts)
    report.add("median_error_starts_s", ours_s)
    if by_slurm := [each.slurm_error_s for each in starts if each.slurm_error_s is not None]:
        report.add("median_error_starts_slurm_s", statistics.median(by_slurm))
        report.add("error_over_slurm", ours_s / statistics.median(by_slurm), at_most=0.5)
    if not given.only_accuracy:
        one_s = rollout_s(16, 100)
        report.add("rollouts_200_s_16_hosts_100_jobs", 200 * one_s, at_most=20)
        report.add("rollouts_in_30_s_16_hosts_100_jobs", 30.0 / one_s)
        for jobs in (100, 1000):
            report.add(f"encode_ms_{jobs}_jobs", encode_ms(jobs))
    report.show(given.json)


if __name__ == "__main__":
    main()
