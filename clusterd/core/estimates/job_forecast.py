"""Forecast of a job with a performance model: remaining work, sensitivity curve, guaranteed speed.

Everything that depends on the model and the wish alone is remembered between passes; a pass only multiplies.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterd.core.estimates.attained_service import likely_steps_left
from clusterd.core.estimates.candidate_plans import CandidatePlans, CandidatePlansCache, PlanFreedom, is_alike, may_fit
from clusterd.core.estimates.expected_time import Ends, ends_of_modelled
from clusterd.core.estimates.heterogeneous_speed import believed
from clusterd.core.ledger import by_type, needs, of_ranks
from clusterd.core.performance_table import Estimate, PerformanceTable, Shape, evenly
from clusterd.core.state import Job
from clusterd.core.view import View
from clusterd.types import Device, JobKind, Resources

EFFICIENT = 0.1
"""Least efficiency of an offer, as a share of the job's best progress per device-second."""

WORTHWHILE = 0.03
"""Share of the step time that further devices must save at least."""


STALE = 1.5
"""A measured step time off its prediction by this factor is taken for that of another plan."""


Reach = tuple[tuple[str, Shape], ...]
"""Shapes that a job may use, by device type; empty: all."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Usable devices by type, with kind and memory of each type."""

    count: Mapping[str, int]
    kinds: Mapping[str, str]
    memory_bytes: Mapping[str, int]  # of the smallest device
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # devices on each host, most first
    cores_per_device: Mapping[str, int] = field(default_factory=dict)  # of the host with fewest
    capabilities: Mapping[str, str] = field(default_factory=dict)  # compute capability of each type

    def serves(self, wanted: Resources, name: str) -> bool:
        """True where devices of this type serve the request."""
        return wanted.admits(self.kinds[name], name, self.memory_bytes[name], self.capabilities.get(name, ""))

    def holds(self, estimate: Estimate) -> bool:
        """True where the estimate's shape would fit if nothing else ran."""
        here = self.shapes.get(estimate.device_type, ())
        return len(estimate.shape) <= len(here) and all(n <= m for n, m in zip(estimate.shape, here, strict=False))

    @property
    def total(self) -> int:
        """Number of devices of all types."""
        return sum(self.count.values())


def _serves(job: Job, device: Device) -> bool:
    return job.spec.resources.admits(device.kind, device.name, device.memory_bytes, device.compute_capability)


def take_inventory(view: View, job: Job | None = None) -> Inventory:
    """Count the devices of usable hosts, busy ones included.

    Args:
        job: count only devices that this job may use, with the cores and memory that it requests per device.
    """
    kinds: dict[str, str] = {}
    memory_bytes: dict[str, int] = {}
    counts: dict[str, list[int]] = {}
    cores: dict[str, int] = {}
    capabilities: dict[str, str] = {}
    each_cores, each_bytes = needs(job, None) if job is not None else (1, 0)
    for host in view.hosts.values():
        if host.unusable is not None or host.facts is None or (job is not None and not job.admits(host)):
            continue
        most = min(host.facts.cpu_cores // each_cores, host.facts.memory_bytes // max(each_bytes, 1))
        serve = [d for d in host.devices if not d.foreign and (job is None or _serves(job, d))]
        for name, devices in by_type(serve).items():
            counts.setdefault(name, []).append(min(len(devices), most) if job is not None else len(devices))
            kinds[name], capabilities[name] = devices[0].kind, devices[0].compute_capability
            cores[name] = min(cores.get(name, 1 << 30), host.facts.cpu_cores // len(host.devices))
            memory_bytes[name] = min(memory_bytes.get(name, 1 << 62), *(d.memory_bytes for d in devices))
    shapes = {name: tuple(sorted(some, reverse=True)) for name, some in counts.items()}
    return Inventory(
        {name: sum(some) for name, some in shapes.items()}, kinds, memory_bytes, shapes, cores, capabilities
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """Sensitivity curve of a job: its worthwhile offers on this cluster."""

    points: Mapping[int, Estimate]  # the fastest for each number of devices where more devices pay
    effort_s: float  # device-seconds per step where a step takes fewest
    offers: tuple[Estimate, ...]  # all plans and shapes that are worth it, fastest first
    promised: Estimate | None = None  # what a guaranteed job asks for
    is_pinned: bool = False  # to a plan, of which there are no smaller ones
    _upto: dict[int, tuple[Estimate, ...]] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """Fewest devices on which the job may run."""
        return min(self.points)

    def upto(self, devices: int) -> tuple[Estimate, ...]:
        """Offers on at most so many devices, fastest first, without any that takes more devices than a faster one."""
        known = self._upto.get(devices)
        if known is None:
            chosen: list[Estimate] = []
            fewest = devices + 1
            for offer in self.offers:
                if offer.devices < fewest:
                    chosen.append(offer)
                    fewest = offer.devices
                elif (
                    offer.devices <= devices
                    and chosen
                    and (self.is_pinned or offer.step_time_s <= 1.1 * chosen[0].step_time_s or _saves(offer, chosen[0]))
                ):
                    chosen.append(offer)
            self._upto[devices] = known = tuple(chosen)
        return known


def _saves(offer: Estimate, best: Estimate) -> bool:
    """True for the best plan and shape with fewer cores or less host memory."""
    return (offer.plan, offer.shape) == (best.plan, best.shape)


@dataclass(frozen=True, slots=True)
class StepsLeft:
    """Remaining work of a job with a performance model."""

    steps: float

    def seconds(self, step_time_s: float) -> float:
        """Seconds left at this step time."""
        return self.steps * step_time_s


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Expected remaining time of a job of which no speed is known, on the devices that it requests.

    The step times of its estimates are multiples of this time.
    """

    ends: Ends

    def seconds(self, slowdown: float) -> float:
        """Seconds left on devices that take so many times as long."""
        return self.ends.expected_s * slowdown


@dataclass(slots=True)
class JobForecast:
    """A job with its curve, remaining work and current devices."""

    job: Job
    curve: Curve
    left: StepsLeft | TimeLeft
    now: Estimate | None = None  # what it runs as
    devices: list[Device] = field(default_factory=list)  # that it holds, by rank

    @property
    def has_model(self) -> bool:
        """True where a performance model predicts the job's speed."""
        return isinstance(self.left, StepsLeft)

    @property
    def steps_left(self) -> float:
        """Steps still to train, of a job with a performance model."""
        assert isinstance(self.left, StepsLeft), f"{self.job.id} has no performance model"
        return self.left.steps

    def ends(self, view: View) -> Ends:
        """Its end by each measure."""
        if isinstance(self.left, TimeLeft):
            return self.left.ends
        return ends_of_modelled(self.job, self.now_s, view.now_s)

    @property
    def work_s(self) -> float:
        """Remaining device-seconds at the most efficient size."""
        return self.left.seconds(self.curve.effort_s)

    def left_s(self, estimate: Estimate) -> float:
        """Seconds left under an estimate."""
        return self.left.seconds(estimate.step_time_s)

    @property
    def now_s(self) -> float:
        """Seconds left under the current plan, by the measured step time where that is known."""
        if self.now is None:
            return self.left_s(next(iter(self.curve.points.values())))
        if isinstance(self.left, TimeLeft):
            return self.left.ends.expected_s
        measured_s, believed_s = self.job.progress.step_time_s, self.now.step_time_s
        # Far off the prediction it is news from before the last move.
        fits = measured_s is not None and STALE > measured_s / believed_s > 1.0 / STALE
        return self.left.seconds(measured_s if measured_s is not None and fits else believed_s)


class Curves:
    """Cache of curves, valid while performance tables and the cluster stay the same."""

    def __init__(self) -> None:
        self._candidates = CandidatePlansCache()
        self._known: dict[object, tuple[CandidatePlans, Curve | None]] = {}
        self._census: Inventory | None = None
        self._view: View | None = None  # of the pass
        self._restricted: dict[object, Inventory] = {}  # in it, of jobs for which not every host would do

    def of(self, job: Job, view: View, there: Inventory) -> Curve | None:
        """Curve of a job; None: it has no performance model, or no known offer fits this cluster."""
        if not job.inspection.model or job.spec.kind is not JobKind.ELASTIC or job.inspection.shape is None:
            return None
        if there is not self._census:  # one object for all jobs of a pass
            if there != self._census:
                self._known.clear()
            self._census = there
        candidates = self._candidates.of(job, view.performance_tables, PlanFreedom.ANY)
        if candidates is None:
            return None
        there, reach = self._there_for(job, view, there)
        wanted = job.spec.resources
        limits = (wanted.min_devices, wanted.max_devices)
        key = (id(candidates), job.spec.guaranteed, job.pinned, reach, limits)
        known = self._known.get(key)
        if known is None or known[0] is not candidates:
            known = (candidates, _curve(job, candidates, there, view.performance_tables[job.inspection.model]))
            self._known[key] = known
        return known[1]

    def _there_for(self, job: Job, view: View, there: Inventory) -> tuple[Inventory, Reach]:
        """Inventory of the devices that this job may use, and the key of the cache that follows from it."""
        wanted = job.spec.resources
        of_devices = wanted.device_name or wanted.device_memory_bytes or wanted.compute_capability
        if not (
            wanted.hosts
            or wanted.exclude
            or wanted.constraint
            or wanted.cores
            or wanted.memory_bytes
            or job.failures.excluded_hosts
            or of_devices
        ):
            return there, ()
        if view is not self._view:
            self._view, self._restricted = view, {}
        devices = (wanted.kind, wanted.device_name, wanted.device_memory_bytes, wanted.compute_capability)
        names = (wanted.hosts, wanted.exclude, tuple(job.failures.excluded_hosts))
        key = (names, wanted.constraint, needs(job, None), devices)
        if key not in self._restricted:
            self._restricted[key] = take_inventory(view, job)
        mine = self._restricted[key]
        return mine, tuple(sorted(mine.shapes.items()))


def _curve(job: Job, candidates: CandidatePlans, there: Inventory, table: PerformanceTable) -> Curve | None:
    wanted = job.spec.resources

    def is_there(x: Estimate) -> bool:
        return there.holds(x) and (wanted.kind is None or there.kinds.get(x.device_type) == wanted.kind)

    possible = [x for some in candidates.by_speed.values() for x in some if is_there(x)]
    promised = _promised(job, table, there) if job.spec.guaranteed else None
    if job.spec.guaranteed:
        asked = max(wanted.devices, 1)
        keeping = [promised] if promised is not None else []
        keeping += [x for x in possible if promised is not None and x != promised and keeps(x, promised)]
        possible = keeping or [x for x in possible if x.devices >= asked]
    most = wanted.max_devices or sys.maxsize
    possible = [x for x in possible if may_fit(job, x) and wanted.min_devices <= x.devices <= most]
    if job.pinned is not None:
        pinned = [x for x in table.estimates if x.plan == evenly(job.pinned) and is_there(x) and may_fit(job, x)]
        possible = pinned or possible  # where its plan cannot be had, the pin is over
    if not possible:
        return None
    effort_s = min(x.step_time_s * x.devices for x in possible)
    # What was promised is promised, efficient or not.
    offers = [x for x in possible if job.spec.guaranteed or effort_s / (x.step_time_s * x.devices) >= EFFICIENT]
    offers.sort(key=lambda x: (x.step_time_s, x.devices, x.cores_per_device))
    points: dict[int, Estimate] = {}
    fastest: dict[int, Estimate] = {}
    for offer in offers:
        fastest.setdefault(offer.devices, offer)
    least_s = float("inf")
    for count, offer in sorted(fastest.items()):
        if offer.step_time_s < least_s * (1.0 - WORTHWHILE):
            points[count] = offer
            least_s = offer.step_time_s
    return Curve(points, effort_s, tuple(offers), promised, job.pinned is not None)


def _promised(job: Job, table: PerformanceTable, there: Inventory) -> Estimate | None:
    """Estimate of the requested plan and devices on as few hosts as possible; None: unknown."""
    wanted = job.spec.resources
    asked = [
        x
        for x in table.estimates
        if x.devices == max(wanted.devices, 1)
        and there.holds(x)
        and (wanted.plan is None or is_alike(x.plan, wanted.plan))
    ]
    return min(asked, key=lambda x: (len(x.shape), x.step_time_s), default=None)


def keeps(estimate: Estimate, promised: Estimate) -> bool:
    """True where an estimate keeps the guarantee at the pessimistic ends of both intervals."""
    return estimate.upper_s <= promised.lower_s


def forecast_job(job: Job, curve: Curve, view: View) -> JobForecast:
    """Forecast of a job in this view."""
    found = JobForecast(job, curve, StepsLeft(max(likely_steps_left(job), 1.0)))
    attempt = job.attempt
    if attempt is not None and attempt.plan is not None:
        found.devices = of_ranks(view.hosts, attempt)
        found.now = believed(view.performance_tables[job.inspection.model], attempt.plan, found.devices)
    return found
