"""Made-up table of jobs for `profiling predictability`: ``python -m tests.profiling.job_tables OUT.csv [JOBS [SEED]]``.

Users explore a model in short runs that mostly fail or are cancelled, then repeat what works under a similar name.
The fit of an exploration's first steps is worse.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from clusterd.profiling.predictability import OPTIONAL, REQUIRED


def write(path: Path, jobs: int = 2000, seed: int = 0) -> None:
    """Write a table of `jobs` jobs."""
    random = np.random.default_rng(seed)
    care = random.beta(2.0, 2.0, size=20)  # of each user: share of tests that are no explorations
    clock_s = 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*REQUIRED, *OPTIONAL])
        for number in range(jobs):
            clock_s += random.exponential(600.0)
            user, model = int(random.zipf(1.5) - 1) % len(care), int(random.integers(8))
            exploring = random.random() > care[user]
            name = f"{'try' if exploring or random.random() < 0.1 else 'train'}-{model}-{number % 7}"
            size = int(2 ** random.integers(0, 3 if exploring else 5))
            requested_s = float(np.exp(random.normal(9.0, 1.0)))
            works = random.random() < (0.15 if exploring else 0.92)
            actual_s = requested_s * float(np.exp(random.normal(-0.1, 0.2)) if works else random.uniform(0.0, 0.4))
            end = "completed" if works else str(random.choice(["failed", "cancelled"]))
            error = float(np.exp(random.normal(-3.5 if works else -2.5, 0.8)))
            user_name, model_name = f"user{user}", f"model{model}"
            figures = (f"{requested_s:.0f}", f"{actual_s:.0f}", end, f"{clock_s:.0f}", f"{error:.4f}")
            writer.writerow((name, user_name, model_name, size, *figures))


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
