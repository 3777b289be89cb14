"""Predicted against measured, on a running cluster: step time and peak memory of plans that were never tried.

python tests/benchmarks/prediction.py [--json] [--plans 12] [--models gpt-s,gpt-m,gpt-l,conv]

Each model is submitted to embedded hosts and profiled as every job is, with the default budget. Then it is moved to
plans that were not tried, runs at least 20 steps under each, and what was predicted before is compared with the median.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.report import Report, options
from tests.conftest import REPOSITORY, RunningCluster, until

MODELS = {
    "gpt-s": ("gpt", "--width 64 --depth 4"),
    "gpt-m": ("gpt", "--width 128 --depth 6"),
    "gpt-l": ("gpt", "--width 256 --depth 6"),
    "conv": ("convnet", "--width 32 --depth 4"),
}
DEVICES = 2
WARM_UP = 4
STEPS = 20
PROFILED_S = 240.0


def profiled(cluster: RunningCluster, name: str) -> str:
    """A job of this model, once nothing more is worth a trial."""
    example, sizes = MODELS[name]
    command = json.dumps(["python", "train.py", "--steps", "200000", *sizes.split()])
    text = f'workdir = "{REPOSITORY / "examples" / example}"\nkind = "elastic"\ncommand = {command}\n'
    job = cluster.submit(text + f"resources = {{ devices = {DEVICES} }}\n", name)
    began = False

    def over() -> bool:
        nonlocal began
        row = cluster.job(job)
        assert row["ended_s"] is None, row["reason"]
        began = began or row["profiling"] or row["trials"] > 0
        return began and not row["profiling"] and row["migrating"] is None

    until(over, PROFILED_S, cluster.log)
    return job


def steps_since(cluster: RunningCluster, job: str, plan: str, after: int) -> list[dict[str, Any]]:
    """Steps under a plan that came after the step `after`."""
    lines = [json.loads(line) for line in cluster.call("steps", job=job)["data"].splitlines()]
    return [x for x in lines if x.get("step", 0) > after and x["plan"] == plan]


def run_under(cluster: RunningCluster, job: str, plan: str) -> tuple[float, int]:
    """Median step time, and the most memory of rank 0, under a plan."""
    before = cluster.job(job)["step"]
    if cluster.job(job)["plan"] != plan:
        cluster.run("migrate", job, "--plan", plan, "--pin")
    found: list[dict[str, Any]] = []

    def enough() -> bool:
        nonlocal found
        found = steps_since(cluster, job, plan, before)
        return len(found) >= WARM_UP + STEPS

    until(enough, 120.0, cluster.log)
    peak = max(x.get("device_bytes", 0) for x in found)
    return statistics.median(x["time_s"] for x in found[WARM_UP:]), peak


def measure(cluster: RunningCluster, name: str, count: int, chance: random.Random) -> dict[str, Any]:
    """One model: what was predicted, what came of it."""
    job = profiled(cluster, name)
    row = cluster.job(job)
    downtime_s = sum(m["downtime_s"] or 0.0 for m in row["migrations"])
    spent_s = sum(
        t["step_time_s"] * 13 for t in cluster.call("profile", job=job)["trials"] if t["step_time_s"]
    ) + downtime_s  # fmt: skip
    rows = [r for r in cluster.call("plans", job=job, devices=DEVICES)["rows"] if r["fits"]]
    rows += [r for r in cluster.call("plans", job=job, devices=1)["rows"] if r["fits"]]
    fresh = [r for r in rows if not r["measured_s"]]
    # The best must be among them: what is chosen by matters more than what is not.
    chosen = fresh[:2] + chance.sample(fresh[2:], min(count - 2, len(fresh) - 2))
    chosen.sort(key=lambda r: r["devices"])
    runs = []
    for r in chosen:
        seconds, peak = run_under(cluster, job, r["plan"])
        runs.append({**r, "step_s": seconds, "peak_bytes": peak})
    cluster.run("cancel", job)
    cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    measured = [(r["step_time_s"], r["measured_s"], r["devices"]) for r in rows if r["measured_s"]]
    measured += [(r["step_time_s"], r["step_s"], r["devices"]) for r in runs]
    regrets = []
    for devices in {d for *_, d in measured}:
        some = [(p, m) for p, m, d in measured if d == devices]
        regrets.append(min(some)[1] / min(m for _, m in some) - 1.0)
    return {
        "trials": row["trials"],
        "profiling_s": spent_s,
        "mean_error": statistics.mean(abs(r["step_time_s"] / r["step_s"] - 1.0) for r in runs),
        "memory_error": statistics.mean(abs(r["device_bytes"] / r["peak_bytes"] - 1.0) for r in runs),
        "coverage": statistics.mean(r["lower_s"] <= r["step_s"] <= r["upper_s"] for r in runs),
        "regret": max(regrets),
        "runs": [
            {"plan": r["plan"], "predicted_s": r["step_time_s"], "measured_s": r["step_s"],
             "predicted_bytes": r["device_bytes"], "peak_bytes": r["peak_bytes"]}
            for r in runs
        ],
    }  # fmt: skip


def main() -> None:
    """All models, one after the other."""
    given = options(__doc__ or "", plans=12, models=",".join(MODELS), seed=0)
    report = Report("prediction")
    chance = random.Random(given.seed)
    found: dict[str, Any] = {}
    cluster = RunningCluster(Path(tempfile.mkdtemp(prefix="clusterd-prediction-")))
    try:
        cluster.start(1, DEVICES)
        cluster.wait_until_up(1)
        for name in given.models.split(","):
            found[name] = measure(cluster, name, given.plans, chance)
    finally:
        cluster.close()
    report.add("mean_error", statistics.mean(f["mean_error"] for f in found.values()), at_most=0.10)
    report.add("memory_error", statistics.mean(f["memory_error"] for f in found.values()), at_most=0.10)
    report.add("regret_max", max(f["regret"] for f in found.values()), at_most=0.03)
    report.add("coverage", statistics.mean(f["coverage"] for f in found.values()))
    report.add("profiling_share", max(f["profiling_s"] for f in found.values()) / 3600.0, at_most=0.02)
    report.details["models"] = found
    report.show(given.json)


if __name__ == "__main__":
    main()
