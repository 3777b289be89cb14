"""Table of Pollux's step times on T4s for `profiling evaluate`: ``python -m tests.profiling.t4_tables FOLDER OUT.csv``.

Each row is a measured time of Pollux's artifact. A placement is taken at the two local batches that come closest to
two batches of the whole job, as clusterd keeps that batch under every plan.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from clusterd.profiling.table import REQUIRED

# Parameters, layers, width, length of a sample, and the job's batches.
APPLICATIONS = {
    "bert": (110_000_000, 12, 768, 384, (48, 96)),
    "cifar10": (11_000_000, 18, 0, 0, (512, 2048)),
    "imagenet": (25_600_000, 50, 0, 0, (200, 800)),
    "yolov3": (62_000_000, 75, 0, 0, (32, 64)),
    "deepspeech2": (38_000_000, 9, 0, 0, (80, 320)),
}
FARTHEST = 0.45
"""Largest difference of the logarithms of a job's batch and the measured one."""


def write(folder: Path, path: Path) -> None:
    """Write the table of the applications in `folder`, one directory each."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(REQUIRED)
        for name, (parameters, layers, hidden, length, batches) in APPLICATIONS.items():
            times: dict[str, dict[int, float]] = {}
            with (folder / name / "placements.csv").open() as source:
                for row in csv.DictReader(source):
                    times.setdefault(row["placement"], {})[int(row["local_bsz"])] = float(row["step_time"])
            for placement, by_local in times.items():
                devices = sum(map(int, placement))
                nearest = {
                    min(by_local, key=lambda local: abs(math.log(local * devices / batch))): batch for batch in batches
                }
                for local, batch in nearest.items():
                    if abs(math.log(local * devices / batch)) <= FARTHEST:
                        model = (name, parameters, layers, hidden, length, local * devices)
                        writer.writerow((*model, devices, 1, 1, 0, 0, 0, "+".join(placement), by_local[local]))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
