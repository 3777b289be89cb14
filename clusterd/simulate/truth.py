"""True speed of jobs: step times by model, plan, device type and shape of allocation.

Progress follows the truth. A plan on a shape without an entry cannot run, and no policy is offered it.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterd.core.performance_table import Estimate, PerformanceTable, Shape
from clusterd.plans.plan import Plan, replicas
from clusterd.profiling.coefficients import Prior
from clusterd.profiling.evaluate import Method, profile
from clusterd.profiling.fit import DEFAULT_FIT, Prediction
from clusterd.profiling.model import Rows
from clusterd.profiling.table import Measured, TableError, read_table
from clusterd.simulate.errors import InputError

Key = tuple[Plan, str, Shape]

TRIALS = 7
"""Limit of trial runs from which a model's speed is learned."""


@dataclass(frozen=True, slots=True)
class ModelTruth:
    """Step times of one model, and the part of them that a policy may see."""

    name: str
    global_batch: int
    step_times_s: Mapping[Key, float]
    parameters: int = 0
    samples: int = 0  # of its data set: an epoch; 0: not known
    families: Mapping[str, tuple[Key, ...]] = field(default_factory=dict)  # as the table's author groups plans
    rows: Mapping[str, tuple[Measured, ...]] = field(default_factory=dict)  # by device type: what trials pick from
    known: Mapping[Key, float] | None = None  # what policies see of it, where that is not the truth
    beyond: Mapping[Key, float] = field(default_factory=dict)  # on shapes that only hosts of several types make up

    def step_time_s(self, plan: Plan, device_type: str, shape: Iterable[int]) -> float | None:
        """Seconds per step of a plan on a shape; None where it is not known to run."""
        return self.step_times_s.get((plan, device_type, tuple(sorted(shape, reverse=True))))

    def pace_s(self, plan: Plan | None, hosts: Sequence[Sequence[str]]) -> float | None:
        """Seconds per step of a plan with these device types on each host; None where it is not known to run."""
        return mixed_step_time_s(self, plan, hosts) if plan is not None else None

    def best(self, devices: int, device_type: str | None = None) -> tuple[Key, float] | None:
        """The fastest plan and shape with this many devices."""
        some = [
            (key, time)
            for key, time in self.step_times_s.items()
            if sum(key[2]) == devices and device_type in (None, key[1])
        ]
        return min(some, key=lambda item: (item[1], len(item[0][2])), default=None)


@dataclass(frozen=True, slots=True)
class Truth:
    """Step times of all models."""

    models: Mapping[str, ModelTruth]
    source: str = ""

    def on(self, sizes: Mapping[str, Sequence[int]]) -> Truth:
        """The part of the truth that can be placed on hosts with these device counts, by type."""
        runnable: dict[str, ModelTruth] = {}
        hosts = {kind: sorted(counts, reverse=True) for kind, counts in sizes.items()}
        together = sorted((count for counts in sizes.values() for count in counts), reverse=True)

        def holds(some: Sequence[int], shape: Shape) -> bool:
            return len(shape) <= len(some) and all(n <= m for n, m in zip(shape, some, strict=False))

        for name, model in self.models.items():
            times = {k: t for k, t in model.step_times_s.items() if holds(hosts.get(k[1], []), k[2])}
            if times:
                families = {f: tuple(k for k in keys if k in times) for f, keys in model.families.items()}
                beyond = {
                    k: t
                    for k, t in model.step_times_s.items()
                    if k not in times and k[1] in hosts and holds(together, k[2])
                }
                runnable[name] = replace(model, step_times_s=times, families=families, beyond=beyond)
        return Truth(runnable, self.source)


def by_count(model: ModelTruth) -> ModelTruth:
    """The same truth, of which policies see the step time by number of devices alone, that on fewest hosts.

    Many published schedulers model speed so and place afterwards; true progress still depends on the placement.
    """
    packed: dict[tuple[Plan, str, int], tuple[Shape, float]] = {}
    for (plan, kind, shape), time in model.step_times_s.items():
        key = (plan, kind, sum(shape))
        if key not in packed or (len(shape), [-n for n in shape]) < (len(packed[key][0]), [-n for n in packed[key][0]]):
            packed[key] = shape, time
    known = {key: packed[key[0], key[1], sum(key[2])][1] for key in model.step_times_s}
    return replace(model, known=known, beyond={})


def read_truth(path: Path, device_type: str) -> Truth:
    """A table of measured step times (`profiling.table`), with an optional column `device_type`.

    Args:
        device_type: of rows that name none.
    Raises:
        InputError: it cannot be read, with file, line and column.
    """
    try:
        table = read_table(path)
    except TableError as error:
        raise InputError(str(error)) from None
    types = _types_by_line(path)
    models: dict[str, ModelTruth] = {}
    for name, rows in table.items():
        found: dict[Key, list[float]] = {}
        families: dict[str, dict[Key, None]] = {}
        by_type: dict[str, list[Measured]] = {}
        for one in rows:
            kind = types.get(one.line) or device_type
            counts = tuple(sorted(one.row.allocation.counts, reverse=True))
            key = (one.row.plan, kind, counts)
            found.setdefault(key, []).append(one.step_time_s)
            families.setdefault(one.family, {})[key] = None
            by_type.setdefault(kind, []).append(one)
        workload = rows[0].row.workload
        models[name] = ModelTruth(
            name=name,
            global_batch=workload.global_batch,
            # The median of several measurements of one plan on one shape.
            step_times_s={key: statistics.median(times) for key, times in found.items()},
            parameters=workload.parameters,
            families={family: tuple(keys) for family, keys in families.items()},
            rows={kind: tuple(some) for kind, some in by_type.items()},
        )
    return Truth(models, str(path))


def _types_by_line(path: Path) -> dict[int, str]:
    reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
    if "device_type" not in (reader.fieldnames or []):
        return {}
    found: dict[int, str] = {}
    for row in reader:
        found[reader.line_num] = (row.get("device_type") or "").strip()
    return found


def oracle(model: ModelTruth) -> PerformanceTable:
    """The truth itself as the performance table."""
    known = model.known if model.known is not None else model.step_times_s
    return PerformanceTable(
        _certain(known), model.global_batch, measured=len(known), beyond=_certain(model.beyond), is_whole=True
    )


def _certain(times: Mapping[Key, float]) -> tuple[Estimate, ...]:
    return tuple(
        Estimate(plan=plan, device_type=kind, shape=shape, step_time_s=t, lower_s=t, upper_s=t)
        for (plan, kind, shape), t in times.items()
    )


def learned(model: ModelTruth, seed: int, trials: int = TRIALS) -> PerformanceTable:
    """Predictions of the performance model for every row after at most `trials` trial runs.

    A truth that says more than single step times (`known`), or has no rows to choose trials from, is used as it is.
    """
    if model.known is not None or not model.rows:
        return oracle(model)
    estimates: dict[Key, Estimate] = {}
    beyond: dict[Key, Estimate] = {}
    measured = 0
    for kind, rows in model.rows.items():
        usable = [one for one in rows if _key(one, kind) in model.step_times_s]
        if not usable:
            continue
        outcome = profile(usable, Method(Prior.typical(), DEFAULT_FIT), trials, seed)
        measured += len(outcome.chosen)
        estimates |= _predicted(outcome.prediction, usable, kind)
        if others := [one for one in rows if _key(one, kind) in model.beyond]:
            beyond |= _predicted(outcome.fit.predict(Rows.of(one.row for one in others)), others, kind)
    return PerformanceTable(
        tuple(estimates.values()), model.global_batch, measured, tuple(beyond.values()), is_whole=True
    )


def _predicted(prediction: Prediction, rows: Sequence[Measured], kind: str) -> dict[Key, Estimate]:
    low, high = prediction.interval(0.9)
    found: dict[Key, Estimate] = {}
    for index, one in enumerate(rows):
        plan, _, shape = key = _key(one, kind)
        found[key] = Estimate(
            plan=plan,
            device_type=kind,
            shape=shape,
            step_time_s=float(prediction.median_s[index]),
            lower_s=float(low[index]),
            upper_s=float(high[index]),
        )
    return found


def _key(one: Measured, kind: str) -> Key:
    return one.row.plan, kind, tuple(sorted(one.row.allocation.counts, reverse=True))


def mixed_step_time_s(model: ModelTruth, plan: Plan, hosts: Sequence[Sequence[str]]) -> float | None:
    """Seconds per step of a plan with these device types on each host; None where it is not known to run.

    On mixed types every replica lies on one type and takes a share of the batch; the slowest sets the pace. A replica's
    speed is that of the same plan on the same shape with all devices of its type, so traffic between replicas counts
    once, at the pace of the slower type.
    """
    kinds = sorted({kind for some in hosts for kind in some})
    shape = [len(some) for some in hosts]
    if len(kinds) == 1:
        as_it_is = model.step_time_s(plan, kinds[0], shape)
        return as_it_is if as_it_is is not None else model.step_time_s(replace(plan, shares=()), kinds[0], shape)
    shares = plan.batch_shares(model.global_batch)
    per_replica = plan.ranks // plan.dp
    ranks = [kind for some in hosts for kind in some]
    worst = 0.0
    for replica, share in enumerate(shares):
        mine = {ranks[plan.rank_of(stage, replica, shard)] for stage in range(plan.pp) for shard in range(plan.tp)}
        if len(mine) != 1 or per_replica * plan.dp != len(ranks):
            return None
        alone = _alone(model, plan, mine.pop(), shape)
        if alone is None:
            return None
        worst = max(worst, alone[0] * share / alone[1])
    return worst


def _alone(model: ModelTruth, plan: Plan, kind: str, shape: Sequence[int]) -> tuple[float, int] | None:
    """Step time of the plan on one type with an even batch split, and the largest share there."""
    even = replicas(plan.dp, model.global_batch).shares
    cuts = [replace(plan, shares=shares) for shares in dict.fromkeys(((), even))]
    key = tuple(sorted(shape, reverse=True))
    for table in (model.step_times_s, model.beyond):
        for cut in cuts:
            if (cut, kind, key) in table:
                return table[cut, kind, key], -(-model.global_batch // plan.dp)
    return None
