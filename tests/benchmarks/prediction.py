"""Predicted against measured, on a running cluster: step time and peak memory of plans that were never tried.

python tests/benchmarks/prediction.py [--json] [--plans 12] [--models gpt-s,gpt-m,gpt-l,conv]

Each model is submitted to embedded hosts and profiled as every job is, with the default budget. Then it is moved to
plans that were not tried, runs at least 20 steps under each, and what was predicted before is compared with the median.

Every plan is measured twice, in two rounds some minutes apart, and the mean is what a prediction is held against.
``repeat_error`` is how far the second round was from the first, on average: what no prediction could do better than by
much on this machine.

Whoever looks takes processor time from the steps, as do the ranks of the last move while they end: it is looked for
seldom, at the log where it lies, and steps of the first seconds do not count.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.report import Report, options
from tests.conftest import REPOSITORY, RunningCluster

MODELS = {
    "gpt-s": ("gpt", "--width 64 --depth 4"),
    "gpt-m": ("gpt", "--width 128 --depth 6"),
    "gpt-l": ("gpt", "--width 256 --depth 6"),
    "conv": ("convnet", "--width 32 --depth 4"),
}
DEVICES = 2
SETTLE_S = 2.0
LOOK_S = 0.5
STEPS = 20
ROUNDS = 2
RIVAL = 1.3
"""Times the fastest trial of as many devices, up to which a tried plan is measured again."""

MEASURED_S = 3.0
PROFILED_S = 240.0
PLAN_S = 120.0
TAIL_BYTES = 1 << 16


def profiled(cluster: RunningCluster, name: str) -> str:
    """A job of this model, once nothing more is worth a trial."""
    example, sizes = MODELS[name]
    command = json.dumps(["python", "train.py", "--steps", "200000", *sizes.split()])
    text = f'workdir = "{REPOSITORY / "examples" / example}"\nkind = "elastic"\ncommand = {command}\n'
    job = cluster.submit(text + f"resources = {{ devices = {DEVICES} }}\n", name)
    began = False
    deadline_s = time.monotonic() + PROFILED_S
    while time.monotonic() < deadline_s:
        row = cluster.job(job)
        assert row["ended_s"] is None, row["reason"]
        began = began or row["profiling"] or row["trials"] > 0
        if began and not row["profiling"] and row["migrating"] is None:
            return job
        time.sleep(LOOK_S)
    sys.exit(f"{name} was not profiled within {PROFILED_S:.0f} s\n{cluster.log()}")


def steps_since(cluster: RunningCluster, job: str, plan: str, after: int) -> list[dict[str, Any]]:
    """Steps under a plan that came after the step `after`, from the newest log on the host."""
    logs = (cluster.directory / "local").glob(f"*/agent/attempts/{job}.1*/steps.jsonl")
    newest = max(logs, key=lambda file: file.stat().st_mtime)
    with newest.open("rb") as file:
        file.seek(max(newest.stat().st_size - TAIL_BYTES, 0))
        lines = [json.loads(line) for line in file.read().splitlines(keepends=True)[1:] if line.endswith(b"\n")]
    return [x for x in lines if x.get("step", 0) > after and x.get("plan", plan) == plan]


def run_under(cluster: RunningCluster, job: str, plan: str) -> tuple[float, int]:
    """Median step time, and the most memory of rank 0, under a plan."""
    if cluster.job(job)["plan"] != plan:
        cluster.run("migrate", job, "--plan", plan, "--pin")
    time.sleep(SETTLE_S)
    before = cluster.job(job)["step"]
    deadline_s = time.monotonic() + PLAN_S
    while time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        found = steps_since(cluster, job, plan, before)
        if len(found) >= STEPS and sum(x["time_s"] for x in found) >= MEASURED_S:
            peak = max(x.get("device_bytes", 0) for x in found)
            return statistics.median(x["time_s"] for x in found), peak
    sys.exit(f"{plan} made no {STEPS} steps within {PLAN_S:.0f} s\n{cluster.log()}")


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
    best = fresh[:2] + [r for r in rows if r["devices"] == 1 and not r["measured_s"]][:1]
    others = [r for r in fresh if r not in best]
    chosen = best + chance.sample(others, min(count - len(best), len(others)))
    # So must what was tried and may be the best: its trial was made in another minute.
    tried = [r for r in rows if r["measured_s"]]
    fastest = {n: min((r["measured_s"] for r in tried if r["devices"] == n), default=0.0) for n in (1, DEVICES)}
    rivals = [r for r in tried if r["measured_s"] <= RIVAL * fastest[r["devices"]]]
    both = sorted(chosen + rivals, key=lambda r: r["devices"])
    rounds = [[run_under(cluster, job, r["plan"]) for r in both] for _ in range(ROUNDS)]
    seen = [
        {**r, "steps_s": [s for s, _ in found], "step_s": statistics.mean(s for s, _ in found),
         "peak_bytes": max(peak for _, peak in found)}
        for r, *found in zip(both, *rounds, strict=True)
    ]  # fmt: skip
    runs = [r for r in seen if not r["measured_s"]]
    cluster.run("cancel", job)
    cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    regrets = []
    for devices in {r["devices"] for r in seen}:
        some = [r for r in seen if r["devices"] == devices]
        first = min(some, key=lambda r: r["step_time_s"])
        regrets.append(first["step_s"] / min(r["step_s"] for r in some) - 1.0)
    return {
        "trials": row["trials"],
        "profiling_s": spent_s,
        "mean_error": statistics.mean(abs(r["step_time_s"] / r["step_s"] - 1.0) for r in runs),
        "repeat_error": statistics.mean(abs(r["steps_s"][-1] / r["steps_s"][0] - 1.0) for r in seen),
        "memory_error": statistics.mean(abs(r["device_bytes"] / r["peak_bytes"] - 1.0) for r in runs),
        "coverage": statistics.mean(r["lower_s"] <= r["step_s"] <= r["upper_s"] for r in runs),
        "regret": max(regrets),
        "runs": [
            {"plan": r["plan"], "predicted_s": r["step_time_s"], "measured_s": r["steps_s"],
             "predicted_bytes": r["device_bytes"], "peak_bytes": r["peak_bytes"], "tried": bool(r["measured_s"])}
            for r in seen
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
    report.add("repeat_error", statistics.mean(f["repeat_error"] for f in found.values()))
    report.add("memory_error", statistics.mean(f["memory_error"] for f in found.values()), at_most=0.10)
    report.add("regret_max", max(f["regret"] for f in found.values()), at_most=0.03)
    report.add("coverage", statistics.mean(f["coverage"] for f in found.values()))
    report.add("profiling_share", max(f["profiling_s"] for f in found.values()) / 3600.0, at_most=0.02)
    report.details["models"] = found
    report.show(given.json)


if __name__ == "__main__":
    main()
