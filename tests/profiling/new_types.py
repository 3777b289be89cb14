"""Speed of a type of GPU that no job ran on, from data sheets: ``python -m tests.profiling.new_types TABLE.csv``.

The table has one GPU per row: `name_gpu`, `num_gpu`, and a column of throughput for each job, as those of
github.com/lambdal/deeplearning-benchmark (pytorch/pytorch-train-throughput-fp16.csv). Rows of several GPUs and types
without a data sheet are left out; of a type with several rows the first counts. Each type is left out in turn and its
speed-ups predicted from the types that are left.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from statistics import NormalDist, fmean

from clusterd.profiling.fleet import CARDS, Card, card, speed_up

NOT_JOBS = ("name_gpu", "num_gpu", "watt", "price")


def read(path: Path) -> dict[str, dict[str, float]]:
    """Throughput by job and type."""
    found: dict[str, dict[str, float]] = {}
    cards: set[Card] = set()
    with path.open() as file:
        for row in csv.DictReader(file):
            known = card(row["name_gpu"])
            if float(row["num_gpu"]) == 1 and known is not None and known not in cards:
                cards.add(known)
                for job, value in row.items():
                    if job not in NOT_JOBS and float(value) > 0:
                        found.setdefault(job, {})[row["name_gpu"]] = float(value)
    return found


def judge(measured: dict[str, dict[str, float]]) -> dict[str, float]:
    """Mean error, coverage of the 90% interval, and how often and by how much a slower type is taken for the faster."""
    z = NormalDist().inv_cdf(0.95)
    errors, covered, lost = [], [], []
    for by_type in measured.values():
        for new, throughput in by_type.items():
            told = speed_up(new, [name for name in by_type if name != new])
            if told is None:
                continue
            known, log_speed, width = told
            off = math.log(throughput / by_type[known]) - log_speed
            errors.append(abs(math.expm1(-off)))
            covered.append(float(abs(off) <= z * width))
            # A job that may run on either goes to the type that is said to be faster.
            chosen = throughput if log_speed > 0 else by_type[known]
            lost.append(max(throughput, by_type[known]) / chosen - 1.0)
    return {
        "jobs_and_types": float(len(errors)),
        "mean_error": fmean(errors),
        "coverage_90": fmean(covered),
        "loss_of_choice_mean": fmean(lost),
        "loss_of_choice_max": max(lost),
    }


if __name__ == "__main__":
    print(f"{len(CARDS)} data sheets")
    for name, value in judge(read(Path(sys.argv[1]))).items():
        print(f"{name:20} {value:.3f}")
