"""Arena's published tables and traces: seconds per iteration by model, batch, device type and count.

The table gives the best plan that Arena's search found without naming it, so it is read as plain data parallelism. Jobs
name a model, a global batch, and a type and number of devices.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from clusterd.plans.plan import replicas
from clusterd.simulate.errors import InputError
from clusterd.simulate.trace import rows
from clusterd.simulate.truth import Key, ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload, fit_to
from tests.benchmarks.traces import table_of

COLUMNS = ("job_id", "submission_time", "num_iteration", "model_name", "batch_size", "num_gpu", "gpu_type")

_PLACE = re.compile(r"(\d+)_([A-Za-z0-9]+)_(\d+)_n_(\d+)_d")
_NAME = re.compile(r"(.+)_(\d+(?:\.\d+)?)([MB])_(\d+)")
_UNIT = {"M": 1e6, "B": 1e9}


def read_truth(path: Path) -> Truth:
    """Read the table of best plans (``prof_database_optimal.json``) without entries that it marks infeasible.

    Raises:
        InputError: it is none.
    """
    wanted = 'Arena\'s table of best plans, {"optimal": {MODEL_BATCH: {N_TYPE_N_n_M_d: seconds}}}'
    table = table_of(path, wanted).get("optimal")
    if not isinstance(table, dict):
        raise InputError(f"{path}: nothing under 'optimal'; give {wanted}")
    models: dict[str, ModelTruth] = {}
    for name, places in table.items():
        called = _NAME.fullmatch(name)
        if called is None or not isinstance(places, dict):
            raise InputError(f"{path}, {name}: a model is named NAME_SIZE_BATCH, as in bert_1.3B_128")
        times: dict[Key, float] = {}
        for place, seconds in places.items():
            where = _PLACE.fullmatch(place)
            if where is None or not isinstance(seconds, int | float) or not math.isfinite(seconds):
                raise InputError(
                    f"{path}, {name}, {place}: {seconds!r}; an entry is HOSTS_TYPE_HOSTS_n_DEVICES_d and seconds, "
                    "0 or less where nothing fits"
                )
            if seconds > 0:
                hosts, each = int(where[3]), int(where[4])
                times[replicas(hosts * each, int(called[4])), where[2], (each,) * hosts] = float(seconds)
        parameters = int(float(called[2]) * _UNIT[called[3]])
        models[name] = ModelTruth(name, int(called[4]), times, parameters)
    return Truth({name: model for name, model in models.items() if model.step_times_s}, str(path))


def read(path: Path, truth: Truth) -> Workload:
    """Read the jobs whose model and batch the truth holds, and count the others.

    Raises:
        InputError: the file cannot be read, or a line of it, or nothing of it can be run.
    """
    arrivals: list[Arrival] = []
    for line, row in rows(path, COLUMNS):
        try:
            arrival = Arrival(
                name=row["job_id"].strip(),
                at_s=float(row["submission_time"]),
                model=f"{row['model_name'].strip().replace('__', '_')}_{int(row['batch_size'])}",
                steps=int(row["num_iteration"]),
                devices=int(row["num_gpu"]),
                device_type=row["gpu_type"].strip(),
            )
            if arrival.steps < 1 or arrival.devices < 1 or not arrival.at_s >= 0:
                raise ValueError("iterations and devices must be at least 1, and the time not negative")
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}; correct the line or take it out") from None
        arrivals.append(arrival)
    return fit_to(arrivals, truth, [None] * len(arrivals), str(path))
