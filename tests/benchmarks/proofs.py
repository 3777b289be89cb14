"""Cost of the proofs that a plan trains what one process trains: of a start, of a move's preparation, of a step.

    python -m tests.benchmarks.proofs [--repeats 5] [--json]

start_PLAN                  seconds that the comparison adds to a start under PLAN; with a known proof nothing is added
preparation_PLAN            seconds that the steps after a state add to the preparation of a move from one process
step                        share of a step that comparing replicas takes, two ranks of a small GPT
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clusterd.plans.plan import Plan
from tests.benchmarks.report import Report, options

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/train", "examples/gpt", "examples/hf")]

PLANS = ("dp=2", "dp=2,zero=3", "dp=2,accumulation=2")
SIZE: dict[str, Any] = {"depth": 4, "steps": 1}


def starts(pool: Any, directory: Path, plan: str, repeats: int) -> tuple[float, float]:
    """Median seconds of a run of one step: without a proof, and with one."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats):
        for proves in (False, True):
            proven = [] if proves else [Plan.parse(plan).family]
            began_s = time.perf_counter()
            run = pool.run_each(directory / f"{number}.{proves}", plan, [SIZE], more=lambda _, p=proven: {"proven": p})[
                0
            ]
            run.checked()
            taken[proves].append(time.perf_counter() - began_s)
    return statistics.median(taken[False]), statistics.median(taken[True])


def preparations(pools: Any, directory: Path, plan: str, repeats: int) -> tuple[float, float]:
    """Median seconds from the request of a move to the first step after it: without a proof, and with one."""
    from migration_driver import Mover

    taken: dict[float, list[float]] = {0.0: [], 60.0: []}
    for number in range(repeats):
        for proof_s, times in taken.items():
            place = directory / f"{number}.{proof_s}"
            place.mkdir(parents=True)
            more = {"proven": [Plan.parse(plan).family]}
            mover = Mover(pools, place, {"depth": 4, "pace_s": 0.02}, rank_file=more, proof_s=proof_s)
            try:
                mover.start("dp=1")
                mover.train(3)
                began_s = time.perf_counter()
                mover.move(plan)
                times.append(time.perf_counter() - began_s)
                mover.stop()
            finally:
                mover.close()
    return statistics.median(taken[0.0]), statistics.median(taken[60.0])


def share_of_a_step(repeats: int) -> float:
    """Time of a comparison of replicas by that of the steps between two."""
    import torch
    from scenarios import Recorded, job

    from clusterd.train.loop import replicas
    from clusterd.train.loop.rank_training import Training
    from clusterd.train.process.context import Context

    training = Training(job(Recorded(64), depth=4), Context(), torch.device("cpu"), None)
    steps, comparisons = [], []
    comparison = replicas.ReplicaComparison(training)
    batches = iter(training.batches())
    for _ in range(max(repeats, 3)):
        inputs, targets = next(batches)
        began_s = time.perf_counter()
        training.stepper.step(inputs, targets)
        steps.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        torch.stack([norm for _, norm in comparison._norms()]).tolist()
        comparisons.append(time.perf_counter() - began_s)
    return statistics.median(comparisons) / (statistics.median(steps) * replicas.EVERY)


def main() -> None:
    from rank_pool import RankPool

    args = options(__doc__ or "", repeats=5)
    report = Report("proofs")
    with tempfile.TemporaryDirectory() as name:
        pools = RankPool(), RankPool()
        try:
            for plan in PLANS:
                known_s, proven_s = starts(pools[0], Path(name) / "start" / plan, plan, args.repeats)
                report.add(f"start_{plan}", proven_s - known_s)
                report.details[f"start_{plan}"] = {"known_s": known_s, "proven_s": proven_s}
            for plan in PLANS[:2]:
                without_s, with_s = preparations(pools, Path(name) / "move" / plan, plan, args.repeats)
                report.add(f"preparation_{plan}", with_s - without_s)
                report.details[f"preparation_{plan}"] = {"without_s": without_s, "with_s": with_s}
        finally:
            for pool in pools:
                pool.close()
    report.add("step", share_of_a_step(4 * args.repeats), at_most=0.005)
    report.show(args.json)


if __name__ == "__main__":
    main()
