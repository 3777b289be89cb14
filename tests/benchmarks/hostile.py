"""Workloads that no policy was shaped by: every policy on a matrix of generated settings and loads.

python tests/benchmarks/hostile.py [--json] [--quick] [--seeds building|closing] [--settings wide,pareto] [--loads 1.5]

Prints where the default policy is not first, and by how much; *bound*: over what no policy could beat; *idle*: share of
device time that nobody had while a job waited. Settings are specifications of `clusterd simulate
--generate`. Seeds for building and for closing reports are different. Every policy pays 78 s for a move and knows the
true step times. Where jobs are guaranteed, the default is compared with policies that keep 95% of guarantees.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from clusterd.simulate import run
from clusterd.simulate.bounds import bounds
from clusterd.simulate.cluster import parse_cluster
from clusterd.simulate.generate import generate, parse_spec
from clusterd.simulate.setting import Setting
from tests.benchmarks.report import Report, arguments

SETTINGS = {
    "plain": ("8x8:a", ""),
    "wide": ("8x8:a", "wide=0.3"),
    "wide half": ("8x8:a", "wide=0.5"),
    "all wide": ("8x8:a", "wide=1"),
    "pareto": ("8x8:a", "work=pareto"),
    "heavy tail": ("8x8:a", "spread=2.5"),
    "uniform": ("8x8:a", "work=uniform"),
    "bursts": ("8x8:a", "arrivals=bursts"),
    "days": ("8x8:a", "arrivals=days"),
    "half unknown": ("8x8:a", "unknown=0.5"),
    "unknown": ("8x8:a", "unknown=1"),
    "unknown wide": ("8x8:a", "unknown=1,wide=0.3"),
    "guaranteed": ("8x8:a", "guaranteed=1"),
    "half guaranteed": ("8x8:a", "guaranteed=0.5"),
    "guaranteed wide": ("8x8:a", "guaranteed=1,wide=0.3"),
    "one model": ("8x8:a", "models=1"),
    "two types": ("6x8:a+4x4:b", ""),
    "scarce type": ("7x8:a+2x4:b", "scarce=0.3"),
    "small cluster": ("2x4:a", "jobs=100"),
    "short jobs": ("8x8:a", "median=60"),
    "long jobs": ("8x8:a", "median=6000"),
    "bursts wide": ("8x8:a", "arrivals=bursts,wide=0.3"),
    "pareto days": ("8x8:a", "work=pareto,arrivals=days"),
}
POLICIES = (
    "default",
    "srtf",
    "srtf+plans",
    "sia+plans",
    "aiturbo",
    "aiturbo+plans",
    "gavel",
    "tiresias",
    "rubick",
    "fifo",
)
QUICK = ("wide", "pareto", "unknown", "guaranteed", "small cluster", "bursts wide")
SEEDS = {"building": 1, "closing": 1001}
MOVE_S = 78.0
GUARANTEES = 0.95
"""Share of guarantees that a policy keeps to be compared with, where there are any."""

HEADINGS = [
    "setting",
    "load",
    "default",
    "best other",
    "",
    "factor",
    "p99",
    "bound",
    "rho max",
    "idle",
    "moves",
    "kept",
]

BOUND = "bound"
BOUND_LOAD = 0.7
"""Load at which the default is compared with what no policy could beat."""


def one(cell: tuple[str, float, str, int]) -> dict[str, Any]:
    """Figures of one policy in one setting at one load; under "bound", what no policy could beat."""
    name, load, policy, seed = cell
    text, spec_text = SETTINGS[name]
    cluster = parse_cluster(text)
    spec = replace(parse_spec(spec_text), load=load, seed=seed)
    truth, jobs = generate(spec, cluster)
    if policy == BOUND:
        return asdict(bounds(cluster, jobs, truth))
    tables = run.believe(truth, True, 0, [a.model for a in jobs.arrivals])
    setting = Setting(cluster, jobs, truth, tables, move_s=MOVE_S)
    return run.outcome(setting, policy).figures


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="six settings, one load")
    parser.add_argument("--seeds", choices=tuple(SEEDS), default="building")
    parser.add_argument("--settings", default="")
    parser.add_argument("--loads", default="0.7,1.0,1.5")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    names = [n for n in given.settings.split(",") if n] or (list(QUICK) if given.quick else list(SETTINGS))
    loads = [1.0] if given.quick else [float(load) for load in given.loads.split(",")]
    policies = given.policies.split(",")
    seed = SEEDS[given.seeds]
    cells = [(n, load, p, seed) for n in names for load in loads for p in policies]
    cells += [(n, BOUND_LOAD, BOUND, seed) for n in names if BOUND_LOAD in loads]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=_silence) as pool:
        found = dict(zip(cells, pool.map(one, cells), strict=True))
    rows = [
        _row(name, load, {p: found[name, load, p, seed] for p in policies}, found.get((name, load, BOUND, seed)))
        for name in names
        for load in loads
    ]
    report = Report("hostile")
    report.add("settings_and_loads", len(rows))
    report.add("first_share", statistics.fmean(row["factor"] <= 1.0 for row in rows), at_least=0.9)
    report.add("worst_factor", max(row["factor"] for row in rows), at_most=1.05)
    report.add("worst_p99_factor", max(row["p99_factor"] for row in rows), at_most=1.2)
    report.add("worst_wait_over_fair_share", max(row["rho_max"] for row in rows), at_most=10.0)
    over_bound = [row["over_bound"] for row in rows if row["over_bound"] is not None]
    report.add("worst_over_bound", max(over_bound, default=None), at_most=1.6)
    report.add("idle_while_waiting", max(row["idle_while_waiting"] for row in rows))
    report.add("mean_gain_over_best", statistics.geometric_mean([row["factor"] for row in rows]))
    report.add("unfinished", sum(row["unfinished"] for row in rows), at_most=0)
    report.details = {"rows": rows}
    if not given.json:
        show(rows)
    report.show(given.json)


def _keeps_guarantees(figures: dict[str, Any]) -> bool:
    kept = figures["guaranteed_met"]
    return kept is None or kept >= GUARANTEES


def _silence() -> None:
    """Send what the solver HiGHS prints to standard error, so that --json stays JSON."""
    os.dup2(2, 1)


def _row(name: str, load: float, figures: dict[str, dict[str, Any]], bound: dict[str, float] | None) -> dict[str, Any]:
    """The default beside the best of the others."""
    ours = figures["default"]
    # Who breaks guarantees is no measure for those who keep them.
    others = {p: f for p, f in figures.items() if p != "default" and _keeps_guarantees(f)}
    others = others or {p: f for p, f in figures.items() if p != "default"}
    any_best = min((f["average_completion_s"] for p, f in figures.items() if p != "default"))
    best = min(others, key=lambda p: others[p]["average_completion_s"])
    best_p99 = min(f["p99_completion_s"] for f in others.values())
    return {
        "setting": name,
        "load": load,
        "default_s": ours["average_completion_s"],
        "best": best,
        "best_s": others[best]["average_completion_s"],
        "factor": ours["average_completion_s"] / others[best]["average_completion_s"],
        "p99_factor": ours["p99_completion_s"] / best_p99,
        "rho_max": ours["rho_max"],
        "over_bound": ours["average_completion_s"] / bound["average_completion_s"] if bound is not None else None,
        "idle_while_waiting": ours["idle_while_waiting"],
        "moves_per_job": ours["moves_per_job"],
        "guaranteed_met": ours["guaranteed_met"],
        "factor_to_any": ours["average_completion_s"] / any_best,
        "unfinished": ours["jobs"] - ours["finished"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the matrix."""
    table = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("setting", "best") else "right")
    for row in rows:
        bound = f"{row['over_bound']:.2f}" if row["over_bound"] is not None else ""
        style = "" if row["factor"] <= 1.0 else "bold"
        table.add_row(
            row["setting"], f"{row['load']:g}", f"{row['default_s']:.0f}", row["best"], f"{row['best_s']:.0f}",
            f"{row['factor']:.2f}", f"{row['p99_factor']:.2f}", bound, f"{row['rho_max']:.1f}",
            f"{row['idle_while_waiting']:.1%}", f"{row['moves_per_job']:.2f}",
            f"{row['guaranteed_met']:.0%}" if row["guaranteed_met"] is not None else "",
            style=style,
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
