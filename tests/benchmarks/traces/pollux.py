"""Pollux's published measurements and workloads: applications on T4 GPUs, by placement and batch size.

A job names an application, a batch and a number of devices; its model here is ``APPLICATION_BATCH``. A step is one
update with that batch on any number of replicas, and how many there are follows from the authors' records of
statistical progress. The arithmetic is that of Pollux (Qiao et al., OSDI 2021, sections 2.2 and 5.3): an update of a
batch M advances as far as gain(M) = (var + sqr) / (var / s + sqr) updates of the smallest batch M0, where s = M / M0
and the gradient's variance and square are those recorded in each epoch.

Batches are divided evenly over replicas, rounded up; what does not fit a device is accumulated. Where rounding makes
the batch larger than asked for, an update advances further, and that is counted as a faster step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

from clusterd.core.performance_table import Shape
from clusterd.plans.plan import replicas
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.trace import rows
from clusterd.simulate.truth import Key, ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload, fit_to

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
DEVICE_TYPE = "t4"
LOCAL_MAX = {"yolov3": 8}
"""Largest batch per device, where the authors' simulator allows less than was measured."""

ONE_DEVICE = frozenset({"ncf"})
"""Applications that the authors' simulator never gives more than one device to when it chooses the number."""

DEVICES_MAX = 64

Times = tuple[float, float]
"""Seconds of a step and of its synchronization."""


@dataclass(frozen=True)
class Progress:
    """Progress and gradient statistics by epoch, with one batch size."""

    progress: np.ndarray[Any, np.dtype[np.float64]]
    sqr: np.ndarray[Any, np.dtype[np.float64]]
    var: np.ndarray[Any, np.dtype[np.float64]]


class Application:
    """Measurements of one application."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError: a file of it cannot be read, or is wrong."""
        self.name = folder.name
        self.validation = dict(sorted(_validation(folder)))
        if not self.validation:
            raise InputError(f"{folder}: no validation-BATCH.csv; give the folder of Pollux's measurements (t4)")
        self.epochs = min(len(one.progress) for one in self.validation.values())
        self.batch_min, self.batch_max = min(self.validation), max(self.validation)
        placed: dict[Shape, list[tuple[float, float, float]]] = {}
        points: dict[tuple[int, int, float], list[Times]] = {}
        for line, row in rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
            local, times = _measured(folder / "placements.csv", line, row)
            placement = row["placement"].strip()
            if not placement.isdigit():
                raise InputError(f"{folder / 'placements.csv'}, line {line}: {placement!r} are no counts per host")
            counts = tuple(map(int, placement))
            placed.setdefault(counts, []).append((local, *times))
            points.setdefault((len(counts), sum(counts), local), []).append(times)
        self._placed = {counts: np.array(sorted(some)).T for counts, some in placed.items()}
        self.local_min = int(min(key[2] for key in points))
        self.local_max = LOCAL_MAX.get(self.name, int(max(key[2] for key in points)))
        where = [[float(x) for x in key] for key in points]
        times_s = [[float(np.mean([t[i] for t in some])) for i in (0, 1)] for some in points.values()]
        scaling = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for line, row in rows(folder / "scalability.csv", scaling):
            local, times = _measured(folder / "scalability.csv", line, row)
            if not (row["num_nodes"].strip().isdigit() and row["num_replicas"].strip().isdigit()):
                raise InputError(f"{folder / 'scalability.csv'}, line {line}: nodes and replicas are no whole numbers")
            where.append([float(row["num_nodes"]), float(row["num_replicas"]), local])
            times_s.append(list(times))
        try:
            self._elsewhere = LinearNDInterpolator(np.array(where), np.array(times_s))
        except QhullError:
            raise InputError(
                f"{folder}: too few measurements to read between them; give several numbers of nodes, replicas and "
                "batches in placements.csv and scalability.csv"
            ) from None
        self.updates = cache(self._updates)

    def times(self, places: Sequence[tuple[Shape, int]]) -> list[Times | None]:
        """Step time on these hosts at this batch per device; None where it can be neither read nor interpolated.

        A placement does not depend on the order of hosts; unmeasured placements are interpolated over numbers of hosts
        and devices.
        """
        found = [self._on(shape, local) for shape, local in places]
        between = {(len(shape), sum(shape), local): () for shape, local in places}
        read_s = self._elsewhere(np.array(list(between), dtype=float))
        elsewhere = {key: (float(step), float(sync)) for key, (step, sync) in zip(between, read_s, strict=True)}
        answers: list[Times | None] = []
        for (shape, local), one in zip(places, found, strict=True):
            step, sync = one if one is not None else elsewhere[len(shape), sum(shape), local]
            answers.append((step, sync) if math.isfinite(step) and math.isfinite(sync) and step > 0 else None)
        return answers

    def _on(self, shape: Shape, local: int) -> Times | None:
        """Step time measured on exactly this placement; NaN where no batch so large was measured."""
        turned = min(shape[n:] + shape[:n] for n in range(len(shape)))
        measured = self._placed.get(turned)
        if measured is None:
            return None
        sizes, steps, syncs = measured
        if not sizes[0] <= local <= sizes[-1]:
            return math.nan, math.nan
        return float(np.interp(local, sizes, steps)), float(np.interp(local, sizes, syncs))

    def split(self, batch: int, devices: int) -> tuple[int, int]:
        """Micro-batch of each device, and the number of accumulation steps before the last."""
        local = math.ceil(batch / devices - 1e-8)
        more = math.ceil(local / self.local_max - 1e-8) - 1
        if devices == 1 and batch > self.batch_min:
            more = max(more, 1)  # one gradient sample has no variance
        at_once = math.ceil(local / (more + 1) - 1e-8)
        return min(at_once, self.batch_max // (devices * (more + 1))), more

    def _updates(self, batch: int) -> float:
        """Updates at this batch until the last epoch is complete."""
        scale = batch / self.batch_min
        low = max((b for b in self.validation if b <= batch), default=self.batch_min)
        high = min((b for b in self.validation if b >= batch), default=self.batch_max)
        share = (batch - low) / (high - low) if high > low else 0.0
        epochs = self.epochs
        sqr, var = (
            (1 - share) * getattr(self.validation[low], name)[:epochs]
            + share * getattr(self.validation[high], name)[:epochs]
            for name in ("sqr", "var")
        )
        gain = (var + sqr) / (var / scale + sqr)
        reached = np.min([one.progress[:epochs] for one in self.validation.values()], axis=0)
        return float(np.sum(np.diff(reached, prepend=0.0) / gain))

    def step_times_s(self, some: Iterable[Shape], batch: int) -> dict[Shape, float]:
        """Seconds per update of this batch on every known placement."""
        split = {
            shape: self.split(batch, sum(shape)) for shape in some if sum(shape) <= max(batch // self.local_min, 1)
        }
        split = {shape: (local, more) for shape, (local, more) in split.items() if local >= 1}
        found: dict[Shape, float] = {}
        times = self.times([(shape, local) for shape, (local, _) in split.items()])
        for (shape, (local, more)), one in zip(split.items(), times, strict=True):
            if one is not None:
                step, sync = one
                further = self.updates(batch) / self.updates(local * sum(shape) * (more + 1))
                found[shape] = (step + (step - sync) * more) / further
        return found


def shapes(hosts: int, each: int, devices_max: int) -> Iterator[Shape]:
    """All ways to distribute up to this many devices over equal hosts, largest first."""

    def more(left: int, most: int, hosts_left: int) -> Iterator[Shape]:
        yield ()
        if hosts_left:
            for first in range(min(most, left), 0, -1):
                for rest in more(left - first, first, hosts_left - 1):
                    yield (first, *rest)

    return (shape for shape in more(devices_max, each, hosts) if shape)


def read(path: Path, folder: Path, cluster: Cluster) -> tuple[Truth, Workload]:
    """Read step times of every application and batch that the workload names, and its jobs.

    Args:
        folder: of measurements, with a folder for each application (``t4``).
    Raises:
        InputError: a file cannot be read, a line is wrong, nothing can be run, or the hosts are not alike.
    """
    if len(cluster.groups) != 1 or cluster.groups[0].device_type != DEVICE_TYPE:
        raise InputError(f"Pollux's measurements are of one kind of host: write --cluster HOSTSxDEVICES:{DEVICE_TYPE}")
    if not folder.is_dir():
        raise InputError(f"{folder}: no folder; give that of Pollux's measurements (t4)")
    given: list[tuple[Arrival, str, int]] = []
    for line, row in rows(path, COLUMNS):
        try:
            name, batch = row["application"].strip(), int(row["batch_size"])
            at_s, devices = float(row["time"]), int(row["num_replicas"])
            if batch < 1 or devices < 1 or not at_s >= 0:
                raise ValueError("batch and replicas must be at least 1, and the time not negative")
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}; correct the line or take it out") from None
        model = f"{name}_{batch}"
        given.append((Arrival(name=row["name"].strip(), at_s=at_s, model=model, steps=1, devices=devices), name, batch))
    known = {one.name for one in folder.iterdir() if one.is_dir()}
    applications = {name: Application(folder / name) for name in sorted({name for _, name, _ in given} & known)}
    some = list(shapes(cluster.groups[0].hosts, cluster.groups[0].devices, min(cluster.devices, DEVICES_MAX)))
    models: dict[str, ModelTruth] = {}
    steps: dict[str, int] = {}
    for arrival, name, batch in given:
        app = applications.get(name)
        if app is None or arrival.model in models or not app.batch_min <= batch <= app.batch_max:
            continue
        allowed = [(1,)] if name in ONE_DEVICE else some
        plans = {n: replicas(n, batch) for n in {sum(shape) for shape in allowed}}
        times: dict[Key, float] = {
            (plans[sum(shape)], DEVICE_TYPE, shape): step_s
            for shape, step_s in app.step_times_s(allowed, batch).items()
        }
        steps[arrival.model] = max(round(app.updates(batch)), 1)
        samples = round(steps[arrival.model] / app.epochs) * batch
        models[arrival.model] = ModelTruth(arrival.model, batch, times, samples=samples)
    truth = Truth(models, str(folder))
    arrivals = [replace(arrival, steps=steps.get(arrival.model, 1)) for arrival, _, _ in given]
    return truth, fit_to(arrivals, truth, [None] * len(arrivals), str(path))


def _validation(folder: Path) -> Iterator[tuple[int, Progress]]:
    for path in sorted(folder.glob("validation-*.csv")):
        batch = path.stem.partition("-")[2]
        if not batch.isdigit():
            raise InputError(f"{path}: it is named for no batch size; name it validation-BATCH.csv")
        columns = ("progress", "grad_sqr", "grad_var")
        found: dict[str, list[float]] = {name: [] for name in columns}
        for line, row in rows(path, columns):
            for name in columns:
                try:
                    found[name].append(float(row[name]))
                except ValueError:
                    raise InputError(f"{path}, line {line}: {name} {row[name]!r} is no number") from None
        yield int(batch), Progress(*(np.array(found[name]) for name in columns))


def _measured(path: Path, line: int, row: Mapping[str, str]) -> tuple[float, Times]:
    try:
        local, step, sync = (float(row[name]) for name in ("local_bsz", "step_time", "sync_time"))
        if not (local > 0 and step > 0 and sync >= 0):
            raise ValueError("batch and step time must be positive")
    except ValueError as error:
        raise InputError(f"{path}, line {line}: {error}; correct the line or take it out") from None
    return local, (step, sync)
