"""Gavel's published throughputs and traces: steps per second by job type, device type and scale factor.

A job type at one scale factor is one model here, ``TYPE xN``, which runs on N devices and no other number: every
replica brings its own batch, so steps at another scale would be other work. Throughput does not depend on how the
devices lie on hosts.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clusterd.core.performance_table import Shape
from clusterd.plans.plan import Plan
from clusterd.simulate.errors import InputError
from clusterd.simulate.trace import rows
from clusterd.simulate.truth import Key, ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload, fit_to
from tests.benchmarks.traces import table_of

COLUMNS = (
    "job_type",
    "command",
    "working_dir",
    "num_steps_arg",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "priority_weight",
    "SLO",
    "arrival_time_s",
)

_BATCH = re.compile(r"batch size (\d+)")


def model_of(job_type: str, scale: int) -> str:
    """Name of the model of a job type at a scale factor."""
    return f"{job_type} x{scale}"


def read_truth(path: Path, sizes: Mapping[str, Sequence[int]]) -> Truth:
    """Read step times on these hosts (device counts by type), without entries that have no throughput.

    Raises:
        InputError: the file is no table of throughputs, or has none for these types.
    """
    wanted = 'Gavel\'s throughputs, {DEVICE_TYPE: {"(\'JOB TYPE\', SCALE)": {"null": steps/s}}}'
    times: dict[tuple[str, int], dict[Key, float]] = {}
    table = table_of(path, wanted)
    for kind, counts in sizes.items():
        here = table.get(kind)
        if not isinstance(here, dict):
            raise InputError(f"{path}: no throughputs on {kind}; it has {', '.join(table)}")
        for text, entry in here.items():
            job_type, scale = _key(path, text)
            rate = entry.get("null") if isinstance(entry, dict) else None
            if not isinstance(rate, int | float) or not math.isfinite(rate):
                raise InputError(f"{path}, {kind}, {text}: no number under 'null'; give {wanted}")
            found = times.setdefault((job_type, scale), {})
            if rate > 0:
                for shape in _shapes(scale, sorted(counts, reverse=True)):
                    found[Plan(dp=scale), kind, shape] = 1.0 / rate
    models: dict[str, ModelTruth] = {}
    for (job_type, scale), found in times.items():
        batch = _BATCH.search(job_type)
        if found:
            name = model_of(job_type, scale)
            models[name] = ModelTruth(name, scale * (int(batch[1]) if batch else 1), found)
    return Truth(models, str(path))


def _key(path: Path, text: str) -> tuple[str, int]:
    try:
        job_type, scale = ast.literal_eval(text)
        if not isinstance(job_type, str) or not isinstance(scale, int) or scale < 1:
            raise ValueError
    except (ValueError, SyntaxError, TypeError):
        raise InputError(
            f"{path}: {text!r} is no job type and scale, as in \"('ResNet-18 (batch size 16)', 1)\""
        ) from None
    return job_type, scale


def _shapes(devices: int, hosts: Sequence[int], most: int | None = None) -> Iterator[Shape]:
    """All ways to take this many devices from hosts of these sizes (largest first), largest first."""
    if devices == 0:
        yield ()
    elif hosts:
        for first in range(min(devices, hosts[0], most or devices), 0, -1):
            for rest in _shapes(devices - first, hosts[1:], first):
                yield (first, *rest)


def read(path: Path, truth: Truth) -> Workload:
    """Read the jobs whose type and scale the truth holds, and count the others.

    Raises:
        InputError: the file cannot be read, or a line of it, or nothing of it can be run.
    """
    arrivals: list[Arrival] = []
    for line, row in rows(path, COLUMNS, delimiter="\t", header=False):
        try:
            scale = int(row["scale_factor"])
            arrival = Arrival(
                name=f"{line}-{row['job_type'].split(' ')[0]}",
                at_s=float(row["arrival_time_s"]),
                model=model_of(row["job_type"].strip(), scale),
                steps=int(row["total_steps"]),
                devices=scale,
            )
            if arrival.steps < 1 or scale < 1 or not arrival.at_s >= 0:
                raise ValueError("steps and scale must be at least 1, and the time not negative")
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}; correct the line or take it out") from None
        arrivals.append(arrival)
    return fit_to(arrivals, truth, [None] * len(arrivals), str(path))
