"""Every policy on several workloads: factors by which the default pipeline is better, paired, losses shown.

python tests/benchmarks/simulate.py [--json] [--load 1.0] [--workloads 8] [--move-cost 78|measured] [--trace base]

Workload 0 is the trace as published; the others are drawn from it with replacement, gaps shuffled, by seed. Jobs and
step times are found under CLUSTERD_DATA (default ../shared/data). `most`, and "most" in JSON, is the factor by which
any policy at all could be better, had it known everything and moved jobs for nothing (clusterd/simulate/bounds.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clusterd.core.policies import POLICIES
from clusterd.simulate import run, workload
from clusterd.simulate.bounds import bounds
from clusterd.simulate.cluster import parse_cluster
from clusterd.simulate.setting import Setting
from clusterd.simulate.trace import read
from tests.benchmarks.report import Report, arguments

DATA = Path(os.environ.get("CLUSTERD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
AIMS = {
    "tiresias": 2.0, "optimus": 2.0, "sia": 1.3, "gavel": 1.3, "rubick": 1.2, "aiturbo": 1.2,
}  # fmt: skip
"""Least factor of average completion time, of the published variants."""

BOUND = "bound"

PLANS_AIM = 1.1
"""Likewise, of the best of those that are given the best plan."""


def one(job: tuple[int, float, str, float | None, str, float | None, bool]) -> dict[str, Any]:
    """One workload under one policy: its figures; under "bound", what no policy could beat."""
    number, load, trace, move_s, policy, predictable, oracle = job
    cluster = parse_cluster("8x8:a800")
    truth, jobs = read(DATA / "a800" / f"workload_{trace}.csv", DATA / "a800" / "step_times.csv", cluster)
    if number:
        jobs = workload.resampled(jobs, random.Random(f"resample {number}"))
    if predictable is not None:
        jobs = workload.partly_predictable(jobs, predictable, random.Random(f"predictable {number}"))
    jobs = workload.at_load(jobs, truth, cluster, load)
    if policy == BOUND:
        return asdict(bounds(cluster, jobs, truth))
    performance_tables = run.believe(truth, oracle, number, [a.model for a in jobs.arrivals])
    setting = Setting(cluster, jobs, truth, performance_tables, move_s=move_s)
    return run.outcome(setting, policy).figures


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--workloads", type=int, default=8)
    parser.add_argument("--move-cost", default="78")
    parser.add_argument("--trace", default="base", choices=("base", "bp", "mt"))
    parser.add_argument("--predictable", type=float)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    if not (DATA / "a800").is_dir():
        sys.exit(f"{DATA / 'a800'} is not there: set CLUSTERD_DATA to the folder with the data sets")
    names = given.policies.split(",")
    move_s = None if given.move_cost == "measured" else float(given.move_cost)
    tasks = [
        (number, given.load, given.trace, move_s, name, given.predictable, given.oracle)
        for name in [*names, BOUND]
        for number in range(given.workloads)
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(one, tasks))
    *by_policy, least = [results[i : i + given.workloads] for i in range(0, len(results), given.workloads)]
    found = summary(dict(zip(names, by_policy, strict=True)), least)
    report = Report("simulate")
    for name, factor in factors(found).items():
        report.add(f"factor_{name.replace('+', '_')}", factor, at_least=AIMS.get(name, PLANS_AIM))
    theirs = [row["factor"]["makespan_s"]["of_means"] for name, row in found.items() if name != "default"]
    report.add("makespan_factor_least", min(theirs, default=None), at_least=1.0)
    stored = found["default"]["figures"].get("guaranteed_met")
    if stored is not None:
        report.add("guaranteed_met", stored, at_least=0.95)
    report.details = {"settings": vars(given), "policies": found}
    if not given.json:
        show(found, vars(given))
    report.show(given.json)


def factors(found: dict[str, Any]) -> dict[str, float]:
    """Of average completion time: of the published policies that were run, and of the best with plans."""
    of_means = {name: row["factor"]["average_completion_s"]["of_means"] for name, row in found.items()}
    table = {name: of_means[name] for name in AIMS if name in of_means}
    with_plans = [factor for name, factor in of_means.items() if name.endswith("+plans")]
    return table | ({"best+plans": min(with_plans)} if with_plans else {})


def summary(by_policy: dict[str, list[dict[str, Any]]], least: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over workloads, and for each policy the factor to the default, workload by workload.

    Args:
        least: of each workload, what no policy could beat.
    """
    ours = by_policy["default"]
    table: dict[str, Any] = {}
    for name, some in by_policy.items():
        means = {
            key: statistics.fmean(f[key] for f in some if f[key] is not None)
            for key in some[0]
            if any(f[key] is not None for f in some)
        }
        factors: dict[str, Any] = {}
        for key in ("average_completion_s", "p99_completion_s", "makespan_s"):
            ratios = [theirs[key] / mine[key] for theirs, mine in zip(some, ours, strict=True)]
            factors[key] = {
                "of_means": means[key] / statistics.fmean(f[key] for f in ours),
                "mean": statistics.fmean(ratios),
                "stdev": statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
                "min": min(ratios),
                "max": max(ratios),
                "lost": sum(r < 1.0 for r in ratios),
            }
            if key in least[0]:
                factors[key]["most"] = means[key] / statistics.fmean(one[key] for one in least)
        table[name] = {"figures": means, "factor": factors, "aim": AIMS.get(name)}
    return table


def show(found: dict[str, Any], given: dict[str, Any]) -> None:
    """A table: means, and factors with their spread."""
    title = (
        f"{given['workloads']} workloads, load {given['load']}, move {given['move_cost']} s; factor: theirs over ours"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("policy", "average", "factor", "most", "spread", "lost", "p99", "makespan", "most", "moves", "kept"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for name, row in found.items():
        f, x = row["figures"], row["factor"]
        average = x["average_completion_s"]
        stored = f.get("guaranteed_met")
        table.add_row(
            name, f"{f['average_completion_s']:.0f} s", f"{average['of_means']:.2f}",
            f"{average['most']:.2f}", f"{average['min']:.2f}-{average['max']:.2f}", str(average["lost"]),
            f"{x['p99_completion_s']['of_means']:.2f}", f"{x['makespan_s']['of_means']:.2f}",
            f"{x['makespan_s']['most']:.2f}",
            f"{f['moves_per_job']:.2f}", "-" if stored is None else f"{stored:.0%}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
