"""Search for offers on mixed device types, without enumerating them.

Shapes whose plans are known on two types at least are laid over what is free, the fastest type first, each host giving
devices of one type; the batch is split in proportion to speed (`heterogeneous_speed`). A shape is looked at only if it
could be worth more than what has been found, were all its hosts of the fastest type: so few are. Types of different
kinds (cuda, cpu) are never mixed: torch's collectives do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from clusterd.core.estimates.first_fit import USABLE_SHARE
from clusterd.core.estimates.heterogeneous_speed import UNBOUNDED, predict_heterogeneous
from clusterd.core.estimates.job_forecast import EFFICIENT, Inventory, JobForecast, keeps
from clusterd.core.ledger import Ledger, per_host
from clusterd.core.performance_table import Estimate, PerformanceTable, Shape, evenly
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.plans.memory import estimate as memory_of
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import Device

MOST_CONSIDERED = 24
"""Jobs per pass for which mixed offers are searched."""

Cost = Callable[[float, int], float]
"""Cost of a step time in seconds on a number of devices; less is better."""

Found = tuple[Estimate, list[Device]]
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Known:
    """One shape with the estimates of its plans on each of several types."""

    shape: Shape
    devices: int
    fastest_s: float  # step time of the best plan, all on the best type
    order: tuple[str, ...]  # types, fastest first
    plans: Mapping[Plan, Mapping[str, Estimate]]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes on a device by samples of a micro-batch."""

    fixed: float
    per_sample: float


@dataclass(slots=True)
class _OfModel:
    """Derived values of one performance table; a newer table begins anew."""

    table: PerformanceTable
    shapes: dict[tuple[str, ...], tuple[Known, ...]] = field(default_factory=dict)
    blends: dict[tuple[Shape, tuple[str, ...], Plan], Estimate | None] = field(default_factory=dict)
    memory: dict[tuple[Plan, str], _Memory] = field(default_factory=dict)


class HeterogeneousEstimates:
    """Values derived from performance tables alone, cached between passes."""

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}
        self._there: Inventory | None = None

    def on(self, there: Inventory) -> None:
        """The cluster as it is now: devices may have less memory than they had."""
        if there != self._there:
            self._there = there
            self._models.clear()

    def shapes(self, model: str, table: PerformanceTable, types: tuple[str, ...]) -> tuple[Known, ...]:
        """Shapes of several hosts on which some plan is known for two of these types."""
        mine = self._of(model, table)
        if types not in mine.shapes:
            mine.shapes[types] = tuple(_known(table, types))
        return mine.shapes[types]

    def predict_heterogeneous(
        self, table: PerformanceTable, job: Job, known: Known, types: tuple[str, ...], plan: Plan, there: Inventory
    ) -> Estimate | None:
        """The plan with the best shares that fit the memory; None: there are none."""
        mine = self._of(job.inspection.model, table)
        key = (known.shape, types, plan)
        if key not in mine.blends:
            mine.blends[key] = self._blended(table, job, known, types, plan, there)
        return mine.blends[key]

    def _of(self, model: str, table: PerformanceTable) -> _OfModel:
        found = self._models.get(model)
        if found is None or found.table is not table:
            found = self._models[model] = _OfModel(table)
        return found

    def _blended(
        self, table: PerformanceTable, job: Job, known: Known, types: tuple[str, ...], plan: Plan, there: Inventory
    ) -> Estimate | None:
        alone = {name: known.plans[plan][name] for name in types}
        if any(one.device_bytes == 0 for one in alone.values()):
            return predict_heterogeneous(alone, types, table.global_batch)
        memory = {name: self._memory_of(table, job, plan, there.kinds[name]) for name in alone}
        most = {name: _most(memory[name], USABLE_SHARE * there.memory_bytes[name], plan) for name in alone}
        found = predict_heterogeneous(alone, types, table.global_batch, most)
        if found is None:
            return None
        share = max(found.plan.batch_shares(table.global_batch))
        needs = max(m.fixed + m.per_sample * -(-share // plan.accumulation) for m in memory.values())
        return replace(found, device_bytes=int(needs))

    def _memory_of(self, table: PerformanceTable, job: Job, plan: Plan, kind: str) -> _Memory:
        known = self._of(job.inspection.model, table).memory
        if (plan, kind) not in known:
            shape = ModelShape.from_dict(job.inspection.shape or {})
            batch = plan.dp * plan.accumulation
            one, two = (
                memory_of(plan, shape, global_batch=samples * batch, kind=kind).device_bytes for samples in (1, 2)
            )
            known[plan, kind] = _Memory(2.0 * one - two, two - one)
        return known[plan, kind]


def _known(table: PerformanceTable, types: tuple[str, ...]) -> list[Known]:
    found: list[Known] = []
    for shape, plans in table.mixable.items():
        if len(shape) < 2:
            continue
        here: dict[Plan, dict[str, Estimate]] = {}
        best: dict[str, float] = {}
        for plan, some in plans.items():
            mine = {name: one for name, one in some.items() if name in types}
            if len(mine) > 1 and all(count % plan.tp == 0 for count in shape):
                here[plan] = mine
                for name, one in mine.items():
                    best[name] = min(best.get(name, one.step_time_s), one.step_time_s)
        if here:
            order = tuple(sorted(best, key=lambda name: (best[name], name)))
            found.append(Known(shape, sum(shape), best[order[0]], order, here))
    return found


def _most(memory: _Memory, usable_bytes: float, plan: Plan) -> int:
    """Samples of a replica that fit."""
    if memory.per_sample <= 0:
        return UNBOUNDED
    return max(int((usable_bytes - memory.fixed) / memory.per_sample), 0) * plan.accumulation


class HeterogeneousSearch:
    """Search for mixed offers within one pass; leaves the ledger as it was."""

    def __init__(self, estimates: HeterogeneousEstimates, view: View, ledger: Ledger, there: Inventory) -> None:
        self.estimates, self.view, self.ledger, self.there = estimates, view, ledger, there
        by_kind: dict[str, list[str]] = {}
        for name, kind in sorted(there.kinds.items()):
            by_kind.setdefault(kind, []).append(name)
        self.groups = {kind: tuple(names) for kind, names in by_kind.items() if len(names) > 1}
        self.left = MOST_CONSIDERED
        estimates.on(there)

    def best(
        self,
        forecast: JobForecast,
        most: int,
        cost: Cost,
        under: float,
        accept: Callable[[Estimate], bool] = lambda _: True,
        limits: Mapping[str, int] | None = None,
    ) -> Found | None:
        """The mixed offer that costs least, with devices for it; None: none costs less than `under`.

        What a running job holds is to be free in the room.

        Args:
            most: devices.
            accept: what else must be true of an offer.
            limits: devices of each type, at most; default: what is free.
        """
        table = self.view.performance_tables[forecast.job.inspection.model]
        wanted, there = forecast.job.spec.resources, self.there
        held, own = per_host(forecast.devices), {d.id for d in forecast.devices}
        best: Found | None = None
        for types in self.groups.values():
            types = tuple(name for name in types if there.serves(wanted, name))
            most = min(most, wanted.max_devices or most)
            if len(types) < 2:
                continue
            free = self.free(forecast.job, types)
            if len(free) < 2:
                continue
            shapes = [
                (cost(k.fastest_s, k.devices), k)
                for k in self.estimates.shapes(forecast.job.inspection.model, table, types)
                if k.devices <= most
            ]
            for bound, known in sorted(shapes, key=lambda item: item[0]):
                if bound >= under:
                    break
                offer = self.lay(forecast.job, known, free, limits, lambda x: _is_fit(forecast, x))
                if offer is None or cost(offer.step_time_s, offer.devices) >= under or not accept(offer):
                    continue
                devices = self.ledger.find(forecast.job, offer, held, own)
                if devices is not None:
                    best, under = (offer, devices), cost(offer.step_time_s, offer.devices)
        return best

    def free(self, job: Job, types: Sequence[str]) -> dict[str, list[int]]:
        """Free devices on each host that the job admits, by type, fewest first."""
        found: dict[str, list[int]] = {}
        for host, here in self.ledger.devices.items():
            if not job.admits(self.ledger.hosts[host]):
                continue
            for name in types:
                if some := here.get(name):
                    found.setdefault(name, []).append(len(some))
        return {name: sorted(counts) for name, counts in found.items()}

    def lay(
        self,
        job: Job,
        known: Known,
        free: Mapping[str, list[int]],
        limits: Mapping[str, int] | None,
        accept: Callable[[Estimate], bool],
    ) -> Estimate | None:
        """The shape over these devices of each host, by type, under its fastest plan of those that are accepted."""
        types = _cover(known, free, limits)
        if types is None:
            return None
        table = self.view.performance_tables[job.inspection.model]
        best: Estimate | None = None
        for plan, alone in known.plans.items():
            if not all(name in alone for name in types):
                continue
            offer = self.estimates.predict_heterogeneous(table, job, known, types, plan, self.there)
            if offer is not None and (best is None or offer.step_time_s < best.step_time_s) and accept(offer):
                best = offer
        return best


def _is_fit(forecast: JobForecast, offer: Estimate) -> bool:
    """Worth its devices; of a guaranteed job, as fast as was promised; of a pinned one, its plan."""
    if forecast.job.pinned is not None and evenly(offer.plan) != evenly(forecast.job.pinned):
        return False
    if forecast.job.spec.guaranteed:
        return forecast.curve.promised is not None and keeps(offer, forecast.curve.promised)
    return forecast.curve.effort_s / (offer.step_time_s * offer.devices) >= EFFICIENT


def _cover(known: Known, free: Mapping[str, list[int]], limits: Mapping[str, int] | None) -> tuple[str, ...] | None:
    """A type for each host of the shape, the fastest first; None: there is no room, or one type has it alone."""
    left = {name: list(counts) for name, counts in free.items()}
    may = dict(limits) if limits is not None else None
    types: list[str] = []
    for count in known.shape:
        for name in known.order:
            hosts = left.get(name)
            if hosts is None or (may is not None and may.get(name, 0) < count):
                continue
            index = bisect_left(hosts, count)
            if index < len(hosts):
                hosts.pop(index)
                types.append(name)
                if may is not None:
                    may[name] -= count
                break
        else:
            return None
    return tuple(types) if len(set(types)) > 1 else None


def as_if_free(ledger: Ledger, forecast: JobForecast, look: Callable[[], Seen]) -> Seen:
    """Result of `look` while a running job's own devices are in the ledger."""
    attempt = forecast.job.attempt
    assert attempt is not None
    ledger.put(forecast.devices, attempt.booked)
    found = look()
    ledger.take(forecast.devices, attempt.booked)
    return found


def shared_by(offer: Estimate) -> str:
    """Phrase about the batch split of a mixed offer, to follow its plan; empty for a single type."""
    return f", {' and '.join(dict.fromkeys(offer.types))} by their speed" if offer.device_types else ""
