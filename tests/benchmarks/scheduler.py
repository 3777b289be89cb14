"""Time of a scheduling pass by the size of the cluster and of the queue, on one core.

python tests/benchmarks/scheduler.py [--json] [--repeats N] [--quick]

A pass is what follows a submit: the event, the view, the default pipeline and the decisions. The cluster is full of
running jobs whose speed is known; the other jobs wait. Above a thousand jobs passes are spaced in time: `decision_s` is
the time from a submit right after a pass to the end of the pass that considers it. `growth_exponent` is the slope of
the logarithm of the time over the logarithm of the size, the larger one of hosts and jobs. `scheduling_share` is
measured in a daemon that runs the demo's jobs: processor time in the scheduler over seconds from the first start to the
last end.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import resource
import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.scheduler import Scheduler
from clusterd.core.timers import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import parse_cluster
from clusterd.types import JobId, JobKind, JobSpec, Resources
from examples.demo import JOBS as DEMO
from tests.benchmarks.report import Report, arguments, spread
from tests.conftest import RunningCluster

MODELS = 8
AFTER_ANY_SPACING_S = 3600.0


def table(number: int) -> PerformanceTable:
    """A model that scales as n^0.85, on one host or on two."""
    base_s = 0.5 + 0.1 * number
    shapes = [(1,), (2,), (4,), (8,), (4, 4), (8, 8)]
    times = [base_s / sum(s) ** 0.85 * (1.2 if len(s) > 1 else 1.0) for s in shapes]
    return PerformanceTable(
        tuple(
            Estimate(plan=Plan(dp=sum(s)), device_type="g", shape=s, step_time_s=t, lower_s=t * 0.95, upper_s=t * 1.05)
            for s, t in zip(shapes, times, strict=True)
        ),
        global_batch=64,
        measured=7,
    )


class Lab:
    """A scheduler with `hosts` hosts of 8 devices, and `jobs` jobs."""

    def __init__(self, hosts: int, jobs: int) -> None:
        self.scheduler = Scheduler()
        self.now_s = 1000.0
        self.jobs = 0
        facts = parse_cluster(f"{hosts}x8:g").facts()
        first: list[e.Event] = [e.HostAdded(at_s=self.now_s, host=h) for h in facts]
        first += [e.HostConnected(at_s=self.now_s, host=h, facts=f) for h, f in facts.items()]
        first += [e.SpeedLearned(at_s=self.now_s, model=f"m{i}", table=table(i)) for i in range(MODELS)]
        self.scheduler.handle(*first)
        self.tell([event for _ in range(jobs) for event in self.submission()])

    def submission(self) -> list[e.Event]:
        """Events of a new job whose model is described at once."""
        self.jobs += 1
        job, model = JobId(str(self.jobs)), f"m{self.jobs % MODELS}"
        steps = 500 + 997 * self.jobs % 20_000
        spec = JobSpec(
            name=f"job{job}", kind=JobKind.ELASTIC, command=("x",), resources=Resources(devices=1 << self.jobs % 4)
        )
        shape = {"parameters": [], "layers": [], "samples": 64, "global_batch": 64, "steps": steps}
        return [
            e.JobSubmitted(at_s=self.now_s, job=job, spec=spec),
            e.ModelDescribed(at_s=self.now_s, job=job, shape=shape, model=model),
        ]

    def tell(self, events: list[e.Event]) -> None:
        """Handle events, and report every launch as successful."""
        decided = self.scheduler.handle(*events)
        launched: list[e.Event] = [
            e.AttemptLaunched(at_s=self.now_s, job=x.job, attempt=x.attempt, generation=x.generation)
            for x in decided
            if isinstance(x, d.LaunchAttempt)
        ]
        if launched:
            self.scheduler.handle(*launched)

    def pass_s(self, repeats: int) -> list[float]:
        """Processor time of each pass after a single submit, in seconds."""
        found: list[float] = []
        for _ in range(repeats):
            self.now_s += AFTER_ANY_SPACING_S
            events = self.submission()
            began_s = time.process_time()
            self.scheduler.handle(*events)
            found.append(time.process_time() - began_s)
            assert self.scheduler.proposed is not None, "the submit was not followed by a pass"
        return found

    def decision_s(self) -> float:
        """Seconds from a submit right after a pass to the end of the pass that considers it."""
        self.scheduler.handle(*self.submission())
        if self.scheduler.proposed is not None:
            return self.pass_s(1)[0]
        wait_s = self.scheduler.state.timers[Timer(TimerKind.PASS)] - self.now_s
        return wait_s + self.pass_s(1)[0]


def scheduling_share() -> float:
    """Share of time in the scheduler of a real daemon, with the jobs of the demo submitted at once."""
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="clusterd-scheduling-")))
    try:
        cluster.start(2, 2)
        cluster.wait_until_up(2)
        jobs = [cluster.submit(textwrap.dedent(text), name) for name, text in DEMO.items()]
        rows = [cluster.wait_for(job, lambda row: row["ended_s"] is not None, 300.0) for job in jobs]
        assert all(row["state"] == "finished" for row in rows), [row["reason"] for row in rows]
        spent_s = float(cluster.call("status")["scheduling_s"])
    finally:
        cluster.close()
    return spent_s / float(max(row["ended_s"] for row in rows) - min(row["started_s"] for row in rows))


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    xs, ys = [math.log(s) for s in sizes], [math.log(t) for t in times]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the largest sizes")
    given = parser.parse_args()
    hosts = [8, 16, 32, 64] if given.quick else [8, 32, 128, 512, 1024]
    jobs = [10, 100, 640] if given.quick else [10, 100, 640, 1000, 3000, 10_000]
    most_hosts, most_jobs = hosts[-1], jobs[-1]
    report = Report("scheduler")
    by_hosts = {n: Lab(n, most_jobs // 10).pass_s(given.repeats) for n in hosts}
    by_jobs = {n: Lab(hosts[-2], n).pass_s(given.repeats) for n in jobs}
    full = Lab(most_hosts, most_jobs)
    largest = full.pass_s(given.repeats)
    middle = Lab(min(128, most_hosts), min(1000, most_jobs)).pass_s(given.repeats * 3)

    # The smallest sizes are left out: constant costs dominate there.
    over_hosts = exponent(hosts[1:], [statistics.median(by_hosts[n]) for n in hosts[1:]])
    over_jobs = exponent(jobs[1:], [statistics.median(by_jobs[n]) for n in jobs[1:]])
    report.add(f"pass_s_{most_hosts}_hosts_{most_jobs}_jobs", statistics.median(largest), at_most=1.0)
    report.add(f"decision_s_{most_hosts}_hosts_{most_jobs}_jobs", full.decision_s())
    report.add("growth_exponent", max(over_hosts, over_jobs), at_most=1.2)
    report.add("growth_exponent_hosts", over_hosts, at_most=1.2)
    report.add("growth_exponent_jobs", over_jobs, at_most=1.2)
    report.add(
        f"event_ms_{min(128, most_hosts)}_hosts_{min(1000, most_jobs)}_jobs",
        statistics.median(middle) * 1e3,
        at_most=20,
    )
    report.add("scheduling_share", scheduling_share(), at_most=0.01)
    report.add("memory_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    report.details["pass_s"] = {
        "by_hosts": {n: spread(t) for n, t in by_hosts.items()},
        "by_jobs": {n: spread(t) for n, t in by_jobs.items()},
    }
    report.show(given.json)


if __name__ == "__main__":
    main()
