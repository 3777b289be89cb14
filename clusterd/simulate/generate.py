"""Generated workloads: models with a plain law of speed, and jobs whose widths, lengths and arrivals are drawn.

A policy that is judged on published traces alone may be shaped by them. The axes of a specification are those on which
schedulers differ: models that run on many devices only, heavy-tailed work, bursts and days, unknown ends, guarantees,
one model, a scarce type of device.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

from clusterd.errors import UsageError
from clusterd.plans.plan import Plan
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.truth import Key, ModelTruth, Truth
from clusterd.simulate.workload import (
    Arrival,
    Workload,
    at_load,
    partly_early,
    partly_guaranteed,
    partly_predictable,
    with_forecasts,
)

WORK = ("lognormal", "pareto", "uniform")
ARRIVALS = ("poisson", "bursts", "days")


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a workload, as in ``jobs=200,wide=0.3,work=pareto``; times in seconds."""

    jobs: int = 150
    models: int = 8
    seed: int = 0
    wide: float = 0.0  # share of models that run on a quarter of the largest type's devices or more only
    work: str = "lognormal"  # distribution of run times as requested
    median: float = 600.0  # run time
    spread: float = 1.5  # sigma of lognormal; for pareto 1/shape
    arrivals: str = "poisson"
    load: float = 1.0  # device-seconds requested over those offered until the last arrival
    unknown: float = 0.0  # share of jobs whose end is not known to the policies
    early: float = 0.0  # share of jobs that end after a small part of the declared steps
    auc: float = 0.5  # of the forecast which jobs end early; 1: the truth; 0.5: no forecast
    guaranteed: float = 0.0  # share of guaranteed jobs
    scarce: float = 0.0  # share of jobs that run on the type with fewest devices only

    def __post_init__(self) -> None:
        for name in ("wide", "unknown", "early", "guaranteed", "scarce"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"--generate: {name}={getattr(self, name):g} must be a share from 0 to 1")
        if not 0.5 <= self.auc <= 1.0:
            raise UsageError(f"--generate: auc={self.auc:g} must be from 0.5 (no forecast) to 1 (the truth)")
        for name, most in (("jobs", 100_000), ("models", 1000)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"--generate: {name}={getattr(self, name)} must be from 1 to {most}")
        for name, top in (("median", 1e7), ("spread", 5.0), ("load", 100.0)):
            if not 0.0 < getattr(self, name) <= top:
                raise UsageError(f"--generate: {name}={getattr(self, name):g} must be above 0, and at most {top:g}")
        for name, known in (("work", WORK), ("arrivals", ARRIVALS)):
            if getattr(self, name) not in known:
                raise UsageError(f"--generate: {name}={getattr(self, name)} is unknown; there are {', '.join(known)}")


def parse_spec(text: str) -> Spec:
    """Parse ``KEY=VALUE,...``; what is left out has its default.

    Raises:
        UsageError: names the key.
    """
    defaults = dataclasses.asdict(Spec())
    kinds = {name: type(value) for name, value in defaults.items()}
    given: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in kinds:
            raise UsageError(f"--generate: there is no {key!r}; there are {', '.join(kinds)}")
        try:
            given[key] = kinds[key](value)
        except ValueError:
            raise UsageError(
                f"--generate: {key}={value} must be a number, as in {key}={getattr(Spec(), key)}"
            ) from None
    return Spec(**given)  # type: ignore[arg-type]  # by the fields' own types


def generate(spec: Spec, cluster: Cluster) -> tuple[Truth, Workload]:
    """Truth and workload of a specification on a cluster; the same for the same seed."""
    models = {f"m{number}": _model(spec, cluster, number) for number in range(spec.models)}
    random_ = random.Random(f"jobs {spec.seed}")
    scarcest = min(sorted(cluster.types), key=lambda name: cluster.types[name])
    arrivals: list[Arrival] = []
    for number, at_s in enumerate(_times(spec, random.Random(f"arrivals {spec.seed}"))):
        model = models[f"m{random_.randrange(spec.models)}"]
        kind = scarcest if random_.random() < spec.scarce else None
        kinds = {key[1] for key in model.step_times_s}
        kind = kind if kind in kinds else None
        sizes = sorted({sum(shape) for _, name, shape in model.step_times_s if kind in (None, name)})
        devices = random_.choices(sizes, [1.0 / (1 + index) for index in range(len(sizes))])[0]
        best = model.best(devices, kind)
        assert best is not None, "a size of the model has a step time"
        steps = max(round(_run_s(spec, random_) / best[1]), 1)
        arrivals.append(
            Arrival(name=f"job{number}", at_s=at_s, model=model.name, steps=steps, devices=devices, device_type=kind)
        )
    truth = Truth(models, f"generated: {spec}")
    workload = partly_early(Workload(tuple(arrivals)), spec.early, random.Random(f"early {spec.seed}"))
    if spec.auc > 0.5:
        workload = with_forecasts(workload, spec.auc, random.Random(f"forecasts {spec.seed}"))
    if len(arrivals) > 1 and arrivals[-1].at_s > arrivals[0].at_s:
        workload = at_load(workload, truth, cluster, spec.load)
    workload = partly_predictable(workload, 1.0 - spec.unknown, random.Random(f"unknown {spec.seed}"))
    return truth, partly_guaranteed(workload, spec.guaranteed, random.Random(f"guaranteed {spec.seed}"))


def _model(spec: Spec, cluster: Cluster, number: int) -> ModelTruth:
    """A model: Amdahl's law over devices, and a share of the step for each further host.

    ``t(n, h) = t1 (s + (1 - s) / n) (1 + c (h - 1))``, divided by the speed of the device type, with a serial share s
    of 1 to 10% and a cost c of 0.5 to 6% per host. Under ZeRO steps take a twelfth longer, on half the devices or more.
    """
    random_ = random.Random(f"model {spec.seed} {number}")
    serial, per_host = random_.uniform(0.01, 0.1), random_.uniform(0.005, 0.06)
    one_s = math.exp(random_.uniform(math.log(0.5), math.log(20.0)))
    is_wide = random_.random() < spec.wide
    times: dict[Key, float] = {}
    for kind, hosts in sorted(cluster.sizes.items()):
        speed = random.Random(f"type {spec.seed} {kind}").uniform(0.5, 1.0)
        total = sum(hosts)
        least = max(total // 4, 1) if is_wide else min(random_.choice([1, 1, 1, 2, 4]), max(hosts))
        for shape in _shapes(sorted(hosts, reverse=True)):
            count = sum(shape)
            step_s = one_s * (serial + (1.0 - serial) / count) * (1.0 + per_host * (len(shape) - 1)) / speed
            if count >= least:
                times[Plan(dp=count), kind, shape] = step_s
            if count > 1 and 2 * count >= least:
                times[Plan(dp=count, zero=2), kind, shape] = step_s * 13.0 / 12.0
    batch = math.lcm(*(sum(shape) for _, _, shape in times))  # any number of replicas divides it
    return ModelTruth(name=f"m{number}", global_batch=batch, step_times_s=times, parameters=10**8)


def _shapes(hosts: list[int]) -> list[tuple[int, ...]]:
    """Powers of two of devices on one host, and whole hosts; half hosts on two hosts as well."""
    largest = hosts[0]
    found: list[tuple[int, ...]] = [(1 << power,) for power in range(largest.bit_length()) if 1 << power <= largest]
    if (largest,) not in found:
        found.append((largest,))
    found += [(largest,) * count for count in range(2, len(hosts) + 1) if hosts[count - 1] == largest]
    if len(hosts) > 1 and largest > 1 and hosts[1] >= largest // 2:
        found.append((largest // 2,) * 2)
    return found


def _run_s(spec: Spec, random_: random.Random) -> float:
    if spec.work == "uniform":
        return random_.uniform(0.1, 1.9) * spec.median
    if spec.work == "pareto":
        least_s: float = spec.median / 2.0**spec.spread
        return min(least_s * random_.paretovariate(1.0 / spec.spread), 300.0 * spec.median)
    return random_.lognormvariate(math.log(spec.median), spec.spread)


def _times(spec: Spec, random_: random.Random) -> list[float]:
    """Times of arrival in units that `at_load` scales."""
    now_s, found = 0.0, []
    for number in range(spec.jobs):
        if spec.arrivals == "bursts":
            now_s += random_.expovariate(1.0 / 20.0) if number % 10 == 0 else 0.01
        elif spec.arrivals == "days":
            busy = 1.0 + 0.9 * math.sin(2.0 * math.pi * number / (spec.jobs / 3.0))
            now_s += random_.expovariate(max(busy, 0.1))
        else:
            now_s += random_.expovariate(1.0)
        found.append(now_s)
    return found
