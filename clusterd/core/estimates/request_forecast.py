"""Forecast of a job without a performance model: one point, the devices that it requests, for its expected time.

So the same searches serve it as serve modelled jobs: reservation, eviction of others, return of loans. A running
elastic job of which no speed is known yet has smaller points beside it, on the assumption that speed is in proportion
to devices: those to which it may be shrunk for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product

from clusterd.core.estimates.expected_time import ends_of_request
from clusterd.core.estimates.first_fit import ChosenPlan, choose
from clusterd.core.estimates.job_forecast import Curve, Inventory, JobForecast, TimeLeft
from clusterd.core.ledger import of_ranks, per_host, shape_of
from clusterd.core.performance_table import Estimate, Shape
from clusterd.core.state import InspectionState, Job
from clusterd.core.view import View
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.types import Device, JobKind, Resources

HOSTS_SPLIT = 3
"""Hosts up to which every way of keeping some of a running job's devices is a point of its curve."""


class RequestCurves:
    """Cache of the curves of queued commands, valid while the cluster stays the same."""

    def __init__(self) -> None:
        self._there: Inventory | None = None
        self._known: dict[Resources, Curve] = {}

    def of(self, job: Job, there: Inventory) -> Curve:
        """Curve of a queued job of which no speed is known."""
        if job.spec.kind is not JobKind.COMMAND:
            return _curve(job, there)
        if there != self._there:
            self._there = there
            self._known.clear()
        wanted = job.spec.resources
        if (known := self._known.get(wanted)) is None:
            known = self._known[wanted] = _curve(job, there)
        return known


def _curve(job: Job, there: Inventory) -> Curve:
    offers = tuple(_offers(job, there))
    points = {x.devices: x for x in reversed(offers)} or {0: _estimate(Plan(), "", ())}
    return Curve(points, 1.0, offers)


def forecast_request(job: Job, view: View, there: Inventory, curves: RequestCurves) -> JobForecast:
    """Forecast of a job of which no speed is known, queued or running."""
    left = TimeLeft(ends_of_request(job, view.run_times, view.now_s))
    attempt = job.attempt
    if attempt is None:
        return JobForecast(job, curves.of(job, there), left)
    devices = of_ranks(view.hosts, attempt)
    now = _estimate(attempt.plan or len(devices), devices[0].name if devices else "", shape_of(devices))
    smaller = tuple(_smaller(job, devices)) if job.spec.kind is JobKind.ELASTIC else ()
    points = {len(devices): now} | {x.devices: x for x in reversed(smaller)}
    curve = Curve(points, 1.0, (now, *smaller))
    return JobForecast(job, curve, left, now, devices)


@lru_cache(maxsize=4096)  # every pass asks for those of all running jobs
def _estimate(plan: Plan | int, device_type: str, shape: Shape, slowdown: float = 1.0) -> Estimate:
    """Estimate whose step time is a multiple of the job's `TimeLeft`; a number is one of replicas."""
    return Estimate(
        plan=plan if isinstance(plan, Plan) else Plan(dp=max(plan, 1)),
        device_type=device_type,
        shape=shape,
        step_time_s=slowdown,
        lower_s=slowdown,
        upper_s=slowdown,
    )


def requested_plans(job: Job) -> tuple[Plan, ...]:
    """Plans under which a checkpointable job may start, best first."""
    wanted = job.spec.resources
    if job.pinned is not None:
        return (job.pinned,)
    return wanted.plans or (wanted.plan or Plan(dp=max(wanted.devices, 1)),)


def _offers(job: Job, there: Inventory) -> Iterator[Estimate]:
    """Shapes of one device type on which the job would start, best first."""
    wanted = job.spec.resources
    names = [n for n in sorted(there.kinds) if there.serves(wanted, n)]
    names.sort(key=lambda n: there.kinds[n] != "cuda")
    for name in names:
        hosts = there.shapes[name]
        if job.spec.kind is JobKind.CHECKPOINTABLE:
            for plan in requested_plans(job):
                yield from (_estimate(plan, name, shape) for shape in _shapes(plan.ranks, plan.tp, hosts))
        elif job.spec.kind is not JobKind.ELASTIC:
            each = wanted.per_node or _devices_beside(-(-wanted.cores // wanted.nodes), name, there)
            if sum(here >= each for here in hosts) >= wanted.nodes:
                yield _estimate(Plan(dp=each * wanted.nodes), name, (each,) * wanted.nodes)
        elif job.inspection.state is InspectionState.DONE and job.inspection.shape is not None:
            shape_of_model = ModelShape.from_dict(job.inspection.shape)
            asked = job.pinned or wanted.plan
            count = asked.ranks if asked is not None else max(wanted.devices, 1)
            found = choose(
                shape_of_model, count, there.kinds[name], there.memory_bytes[name], asked, job.failures.bounds
            )
            if isinstance(found, ChosenPlan):
                shapes = _shapes(found.plan.ranks, found.plan.tp, hosts)
                yield from (_estimate(found.plan, name, shape) for shape in shapes)


def _devices_beside(cpus: int, name: str, there: Inventory) -> int:
    """Devices whose cores a job without devices needs, were they lent to others with their devices."""
    each = max(there.cores_per_device.get(name, 1), 1)
    return -(-max(cpus, 1) // each)


def _shapes(count: int, group: int, hosts: Sequence[int]) -> list[Shape]:
    """Shapes of so many devices, in groups that stay on one host: fewest hosts first.

    Args:
        hosts: devices of each host, most first.
    """
    found: list[Shape] = []
    if hosts and hosts[0] >= count:
        found.append((count,))
    for split in range(2, len(hosts) + 1):
        each = count // split
        if each * split == count and each % group == 0 and each and hosts[split - 1] >= each:
            found.append((each,) * split)
            break
    packed, left = [], count
    for here in hosts:
        take = min(left, here - here % group)
        if take:
            packed.append(take)
            left -= take
    shape = tuple(sorted(packed, reverse=True))
    return [*found, shape] if left == 0 and shape not in found else found


def _smaller(job: Job, devices: Sequence[Device]) -> Iterator[Estimate]:
    """Points on fewer of a running elastic job's devices, largest first."""
    names = {device.name for device in devices}
    if job.inspection.shape is None or len(names) != 1 or job.pinned is not None or job.spec.guaranteed:
        return
    model = ModelShape.from_dict(job.inspection.shape)
    memory_bytes = min(device.memory_bytes for device in devices)
    for count in range(len(devices) - 1, 0, -1):
        found = choose(model, count, devices[0].kind, memory_bytes, None, job.failures.bounds)
        if isinstance(found, ChosenPlan):
            for shape in _parts(list(per_host(devices).values()), count):
                if all(here % found.plan.tp == 0 for here in shape):
                    yield _estimate(found.plan, devices[0].name, shape, len(devices) / count)


def _parts(held: Sequence[int], count: int) -> Iterable[Shape]:
    """Shapes of `count` of the devices held on each host."""
    if len(held) > HOSTS_SPLIT:
        return _shapes(count, 1, sorted(held, reverse=True))
    ways = product(*(range(here + 1) for here in held))
    found = {tuple(sorted((n for n in way if n), reverse=True)) for way in ways if sum(way) == count}
    return sorted(found, key=lambda shape: (len(shape), shape))
