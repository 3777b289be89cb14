"""Time of a fit to seven trials and of predictions, on one core.

python tests/benchmarks/model.py [--json] [--repeats N]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from clusterd.plans.enumerate import legal_plans
from clusterd.profiling.coefficients import Prior
from clusterd.profiling.curves import packed
from clusterd.profiling.fit import fit
from clusterd.profiling.model import Row, Rows, predict
from clusterd.profiling.workload import Workload
from tests.benchmarks.report import Report, options, spread
from tests.plans.shapes import gpt
from tests.profiling.worlds import over_devices

COUNTS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure and print."""
    given = options(__doc__ or "", repeats=7)
    shape = gpt(depth=16, width=256, global_batch=64)
    load = Workload.from_shape(shape, "gpt")
    plans = {n: legal_plans(shape, n, accumulations=(1, 2, 4, 8)) for n in COUNTS}
    rows = [Row(load, plan, packed(n, 4)) for n in COUNTS for plan in plans[n]]
    rows = (rows * (20_000 // len(rows) + 1))[:20_000]
    prior = Prior.typical()
    features = Rows.of(rows)
    trials = np.linspace(0, len(features) - 1, 7).astype(int)
    measured_s = predict(prior.mean + 0.3 * np.sin(np.arange(len(prior.mean))), features[trials])

    fits, predictions, points = [], [], []
    learned = fit(features[trials], measured_s, prior)
    for _ in range(given.repeats):
        started_s = time.perf_counter()
        learned = fit(features[trials], measured_s, prior)
        fits.append(time.perf_counter() - started_s)

        started_s = time.perf_counter()
        learned.predict(Rows.of(rows))
        predictions.append(len(rows) / (time.perf_counter() - started_s))

        started_s = time.perf_counter()
        curve = over_devices(learned, load, lambda n: plans[n], COUNTS, 4)
        points.append(sum(map(len, plans.values())) / (time.perf_counter() - started_s))
        assert curve.points
    report = Report("performance model")
    report.add("fit_s", statistics.median(fits), at_most=0.5)
    report.add("predictions_per_s", statistics.median(predictions), at_least=10_000)
    report.add("curve_plans_per_s", statistics.median(points), at_least=1_000)
    report.details["spread"] = {"fit_s": spread(fits), "predictions_per_s": spread(predictions)}
    report.show(given.json)


if __name__ == "__main__":
    main()
