"""Workload of a simulation: its jobs and their arrivals, and transformations of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist

from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.truth import ModelTruth, Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One job of a trace."""

    name: str
    at_s: float
    model: str
    steps: int
    devices: int  # asked for
    plan: Plan | None = None  # asked for
    device_type: str | None = None  # asked for
    guaranteed: bool = False
    priority: int = 0
    tenant: str = "default"
    cpus: int = 0
    after: tuple[str, ...] = ()  # names of jobs that must have finished before it starts
    predictable: bool = True  # its number of steps is known to the scheduler
    declared_steps: int | None = None  # by its user, of a job that ends early; None: those that it makes
    forecast: bool | None = None  # of the classifier at its submission: it makes the declared steps; None: none

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"it arrives at {self.at_s:g} s; that must be a number of seconds from 0 on")


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival, and what was left out or changed to make them runnable."""

    arrivals: tuple[Arrival, ...]
    left_out: dict[str, int] = field(default_factory=dict)  # jobs by model that the truth does not hold
    replaced: int = 0  # jobs whose plan the truth does not hold on what they ask for

    def asked_s(self, truth: Truth) -> dict[str, float]:
        """Seconds that each job would take with what it asks for, alone."""
        return {a.name: a.steps * asked_step_s(truth.models[a.model], a) for a in self.arrivals}


def asked_step_s(model: ModelTruth, arrival: Arrival) -> float:
    """Step time of a job under the plan and on the devices it asks for, on as few hosts as possible."""
    some = [
        (len(shape), time)
        for (plan, kind, shape), time in model.step_times_s.items()
        if sum(shape) == arrival.devices and arrival.plan in (None, plan) and (arrival.device_type in (None, kind))
    ]
    if arrival.plan is None:
        return min(time for _, time in some)
    return min(some)[1]


def load_of(workload: Workload, truth: Truth, cluster: Cluster) -> float | None:
    """Device-seconds asked for over what the cluster offers from the first arrival to the last; None: all at once."""
    asked = workload.asked_s(truth)
    total = sum(asked[a.name] * a.devices for a in workload.arrivals)
    span_s = workload.arrivals[-1].at_s - workload.arrivals[0].at_s
    return total / (cluster.devices * span_s) if span_s > 0 else None


def at_load(workload: Workload, truth: Truth, cluster: Cluster, load: float) -> Workload:
    """The same jobs, arriving so much faster or slower that they ask for `load` times what the cluster offers.

    Raises:
        InputError: they arrive all at once.
    """
    given = load_of(workload, truth, cluster)
    if given is None:
        raise InputError("--load moves arrivals apart, and all jobs of this workload arrive at one time; leave it out")
    factor = given / load
    first = workload.arrivals[0].at_s
    arrivals = tuple(replace(a, at_s=first + (a.at_s - first) * factor) for a in workload.arrivals)
    return replace(workload, arrivals=arrivals)


def with_steps(workload: Workload, factor: float) -> Workload:
    """The same jobs with so many times as many steps, at least one each."""
    return replace(
        workload,
        arrivals=tuple(
            replace(
                a,
                steps=max(round(a.steps * factor), 1),
                declared_steps=max(round(a.declared_steps * factor), 1) if a.declared_steps is not None else None,
            )
            for a in workload.arrivals
        ),
    )


def with_pattern(workload: Workload, pattern: str, random_: random.Random) -> Workload:
    """Other arrivals over the same span: ``trace`` as given, ``poisson``, ``burst`` (five crowds), ``day`` (one wave).

    The order of the jobs is shuffled with the times for all but ``trace``.
    """
    if pattern == "trace":
        return workload
    first, last = workload.arrivals[0].at_s, workload.arrivals[-1].at_s
    span_s, count = last - first, len(workload.arrivals)
    if pattern == "poisson":
        times = [random_.uniform(0, span_s) for _ in range(count)]
    elif pattern == "burst":
        times = [random_.randrange(5) * span_s / 5 + random_.uniform(0, span_s / 100) for _ in range(count)]
    else:  # "day": rises to the middle and falls
        times = [random_.triangular(0, span_s, span_s / 2) for _ in range(count)]
    jobs = list(workload.arrivals)
    random_.shuffle(jobs)
    arrivals = [replace(a, at_s=first + t) for a, t in zip(jobs, sorted(times), strict=True)]
    return replace(workload, arrivals=tuple(arrivals))


def resampled(workload: Workload, random_: random.Random) -> Workload:
    """Another trace of the same kind: jobs drawn with replacement, the gaps between arrivals shuffled."""
    times = [a.at_s for a in workload.arrivals]
    gaps = [b - a for a, b in pairwise(times)]
    random_.shuffle(gaps)
    at_s, arrivals = times[0], []
    for number, one in enumerate(random_.choices(workload.arrivals, k=len(times))):
        arrivals.append(replace(one, name=f"{one.model}-{number}", at_s=at_s))
        at_s += gaps[number] if number < len(gaps) else 0.0
    return replace(workload, arrivals=tuple(arrivals))


def partly_predictable(workload: Workload, share: float, random_: random.Random) -> Workload:
    """The number of steps of all but a `share` of the jobs is hidden from the scheduler."""
    arrivals = tuple(replace(a, predictable=random_.random() < share) for a in workload.arrivals)
    return replace(workload, arrivals=arrivals)


def partly_early(workload: Workload, share: float, random_: random.Random) -> Workload:
    """A `share` of the jobs ends early, after 1 to 30% of the declared steps, as explorations that their users stop."""
    arrivals = []
    for a in workload.arrivals:
        made = round(a.steps * 0.01 * 30.0 ** random_.random()) if random_.random() < share else a.steps
        ends_early = 1 <= made < a.steps
        arrivals.append(replace(a, steps=made, declared_steps=a.steps) if ends_early else a)
    return replace(workload, arrivals=tuple(arrivals))


def with_forecasts(workload: Workload, auc: float, random_: random.Random) -> Workload:
    """Each job has the forecast of a calibrated classifier of this AUC: 1 tells the truth, 0.5 the more frequent class.

    The classifier sees a normal variable whose mean differs between the classes by sqrt(2) times the quantile of AUC.
    """
    if auc == 1.0:
        return replace(
            workload, arrivals=tuple(replace(a, forecast=a.declared_steps is None) for a in workload.arrivals)
        )
    early = sum(a.declared_steps is not None for a in workload.arrivals)
    complete = len(workload.arrivals) - early
    prior = math.log((complete + 0.5) / (early + 0.5))
    distance = math.sqrt(2.0) * NormalDist().inv_cdf(auc)
    arrivals = []
    for a in workload.arrivals:
        mean = 0.5 if a.declared_steps is None else -0.5
        odds = prior + distance * (mean * distance + random_.gauss(0.0, 1.0))
        arrivals.append(replace(a, forecast=odds >= 0.0))
    return replace(workload, arrivals=tuple(arrivals))


def partly_guaranteed(workload: Workload, share: float, random_: random.Random) -> Workload:
    """A `share` of the jobs is guaranteed, instead of those that the trace says."""
    arrivals = tuple(replace(a, guaranteed=random_.random() < share) for a in workload.arrivals)
    return replace(workload, arrivals=arrivals)


def fit_to(
    arrivals: Iterable[Arrival], truth: Truth, families: Sequence[str | Plan | None], source: str = "the workload"
) -> Workload:
    """The jobs that the truth can run, each with a plan that the truth holds.

    A job's plan, or the name of its family, is looked up on as many devices as it asks for. Where there is none, the
    fastest that the truth holds there stands for it, and the job counts as replaced; where the truth holds nothing on
    so many devices, the next larger size that it holds, or else the largest.

    Raises:
        InputError: it can run none of them.
    """
    retained: list[Arrival] = []
    left_out: dict[str, int] = {}
    replaced = 0
    for one, requested in zip(arrivals, families, strict=True):
        model = truth.models.get(one.model)
        if model is None:
            left_out[one.model] = left_out.get(one.model, 0) + 1
            continue
        sizes = sorted({sum(shape) for _, kind, shape in model.step_times_s if one.device_type in (None, kind)})
        device_type = one.device_type
        if not sizes:
            sizes, device_type = sorted({sum(shape) for _, _, shape in model.step_times_s}), None
        devices = next((n for n in sizes if n >= one.devices), sizes[-1])
        plan = _held(model, devices, device_type, requested)
        if plan is None and requested is not None:
            best = model.best(devices, device_type)
            assert best is not None, "sizes come from the same table"
            plan = best[0][0]
            replaced += 1
        elif devices != one.devices:
            replaced += 1
        cpus = -(-one.cpus * devices // one.devices)  # as many beside each
        retained.append(replace(one, devices=devices, cpus=cpus, plan=plan, device_type=device_type))
    if not retained:
        raise InputError(
            f"{source}: none of its models ({', '.join(sorted(left_out)) or 'no jobs'}) is in {truth.source}: "
            "give the truth that belongs to it"
        )
    retained.sort(key=lambda a: a.at_s)
    return Workload(tuple(retained), left_out, replaced)


def until(workload: Workload, horizon_s: float) -> Workload:
    """Without the jobs that would arrive later.

    Raises:
        InputError: none arrives before.
    """
    retained = tuple(a for a in workload.arrivals if a.at_s <= horizon_s)
    if not retained:
        raise InputError(
            f"the first job arrives at {workload.arrivals[0].at_s:g} s, after the horizon: give a later one"
        )
    return replace(workload, arrivals=retained)


def _held(model: ModelTruth, devices: int, device_type: str | None, requested: str | Plan | None) -> Plan | None:
    keys = [k for k in model.step_times_s if sum(k[2]) == devices and device_type in (None, k[1])]
    if isinstance(requested, str):
        family = set(model.families.get(requested, ()))
        keys = [k for k in keys if k in family]
    elif requested is not None:
        keys = [k for k in keys if (k[0].dp, k[0].tp, k[0].pp) == (requested.dp, requested.tp, requested.pp)]
    else:
        return None
    # The shape on fewest hosts speaks for the plan; of several measurements of a family the first.
    return min(keys, key=lambda k: len(k[2]))[0] if keys else None
