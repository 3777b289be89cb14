"""Knowledge of one model on one type of device: ranked plans and trials worth running."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from clusterd.plans.enumerate import legal_plans
from clusterd.plans.memory import OVERHEAD, MemoryEstimate, Overhead, estimate
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import Array
from clusterd.profiling.design import DesignOptions, next_trials
from clusterd.profiling.fleet import DeviceType
from clusterd.profiling.model import Row, Rows
from clusterd.profiling.online import OnlineFit
from clusterd.profiling.workload import Workload

USABLE_SHARE = 0.92
"""Usable part of a device's memory; fragmentation and the driver take the rest."""

BUDGET = 7
"""Most plans tried of one model on one type of device."""

WORTH_KNOWING = 0.02
"""Expected relative gain in step time below which a trial is not worth its migrations."""

WORTH_CORES = 0.03
"""Smallest part of the step time that more CPU cores must save."""

_CORES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ACCUMULATIONS = tuple(2**i for i in range(11))
_LISTED = 400


@dataclass(frozen=True, slots=True)
class Ranked:
    """Prediction for one plan on one shape of allocation."""

    plan: Plan
    shape: tuple[int, ...]
    step_time_s: float
    lower_s: float  # of the 90% interval
    upper_s: float
    width: float  # standard deviation of the logarithm, without the noise of a measurement
    memory: MemoryEstimate
    core_times: tuple[tuple[int, float], ...] = ()  # step time by cores per device; empty: independent of cores


@dataclass(slots=True)
class Knowledge:
    """Shape of a model, a type of device, and the online fit of their measurements."""

    model: ModelShape
    workload: Workload
    devices: DeviceType
    online: OnlineFit
    refused: set[Plan] = field(default_factory=set)  # ran out of memory or failed in a trial
    overhead: Overhead = OVERHEAD  # device memory of a rank that no tensor uses
    _plans: dict[int, list[Plan]] = field(default_factory=dict)
    _memory: dict[Plan, MemoryEstimate] = field(default_factory=dict)

    def plans(self, count: int) -> list[Plan]:
        """Legal plans on exactly `count` devices."""
        if count not in self._plans:
            self._plans[count] = legal_plans(self.model, count, kind=self.devices.kind, accumulations=_ACCUMULATIONS)
        return self._plans[count]

    def memory(self, plan: Plan) -> MemoryEstimate:
        """Estimated memory of the plan's largest rank."""
        if plan not in self._memory:
            self._memory[plan] = estimate(plan, self.model, kind=self.devices.kind, overhead=self.overhead)
        return self._memory[plan]

    def set_overhead(self, overhead: Overhead) -> None:
        """Estimate memory with another overhead from now on."""
        self.overhead = overhead
        self._memory.clear()

    def fits(self, plan: Plan) -> bool:
        """True if the plan's largest rank fits in device memory."""
        return plan not in self.refused and self.memory(plan).device_bytes <= self.devices.memory_bytes * USABLE_SHARE

    def is_needless(self, plan: Plan) -> bool:
        """True if the plan saves memory needlessly: without the saving it fits too and is never slower."""
        if plan.checkpointing and self.fits(replace(plan, checkpointing=False)):
            return True
        if plan.offload == "none":
            return False
        plain = replace(plan, offload="none", zero=plan.zero if plan.dp > 1 else 0)
        return self.fits(plain)

    def row(self, plan: Plan, shape: Iterable[int], cores: int | None = None) -> Row:
        """Row for the performance model, with `cores` per device (default: the device's share of its host's)."""
        return Row(self.workload, plan, self.devices.allocation(shape, cores))

    def ranked(self, shapes: Sequence[tuple[int, ...]], keep: int, always: Iterable[Plan] = ()) -> list[Ranked]:
        """For each shape the `keep` fastest plans that fit, and the plans of `always` with its number of ranks."""
        wanted = list(always)
        pairs = [(plan, shape) for shape in shapes for plan in self._of(sum(shape), wanted)]
        if not pairs:
            return []
        prediction = self.online.fit.predict(Rows.of(self.row(plan, shape) for plan, shape in pairs))
        low, high = prediction.interval(0.9)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, (_, shape) in enumerate(pairs):
            by_shape.setdefault(shape, []).append(index)
        found: list[Ranked] = []
        for shape, indices in by_shape.items():
            count = 0
            for i in sorted(indices, key=lambda i: float(prediction.median_s[i])):
                plan = pairs[i][0]
                special = plan in wanted
                if (count >= keep and not special) or not self.fits(plan) or (not special and self.is_needless(plan)):
                    continue
                count += not special
                found.append(
                    Ranked(
                        plan, shape, float(prediction.median_s[i]), float(low[i]), float(high[i]),
                        math.sqrt(max(float(prediction.width[i]) ** 2 - self.online.fit.noise**2, 1e-8)),
                        self.memory(plan),
                    )
                )  # fmt: skip
        return found

    def with_cores(self, found: list[Ranked]) -> list[Ranked]:
        """Add step times by cores per device to plans whose speed depends on them; CPU devices are left as they are."""
        if not self.devices.cores_most:
            return found

        def step_times(asked: list[tuple[Ranked, int]]) -> list[float]:
            times: list[float] = []
            if asked:
                rows = Rows.of(self.row(one.plan, one.shape, cores) for one, cores in asked)
                times = self.online.fit.predict(rows).median_s.tolist()
            return times

        most = [max(self.devices.cores_most // max(one.shape), 1) for one in found]
        fewest_s = step_times([(one, 1) for one in found])
        most_s = step_times(list(zip(found, most, strict=True)))
        matters = [i for i in range(len(found)) if most_s[i] < (1.0 - WORTH_CORES) * fewest_s[i]]
        asked = [(i, cores) for i in matters for cores in _CORES if cores <= most[i]]
        ladders: dict[int, list[tuple[int, float]]] = {}
        for (i, cores), step_s in zip(asked, step_times([(found[i], n) for i, n in asked]), strict=True):
            ladder = ladders.setdefault(i, [])
            if not ladder or step_s < (1.0 - WORTH_CORES) * ladder[-1][1]:
                ladder.append((cores, step_s))
        return [replace(one, core_times=tuple(ladders.get(i, ()))) for i, one in enumerate(found)]

    def _of(self, count: int, wanted: Iterable[Plan]) -> list[Plan]:
        legal = self.plans(count)
        return [*legal, *(p for p in wanted if p.ranks == count and p not in legal)]

    def next_trial(
        self,
        shapes: Sequence[tuple[int, ...]],
        tried: int,
        *,
        beside: Plan | None = None,
        least: int = 5,
        budget: int = BUDGET,
    ) -> tuple[Ranked, str] | None:
        """Next plan to try on one of these shapes, and the reason; None if no trial is worth its cost.

        The first `least` trials are the most informative ones about the whole model. Later trials must offer an
        expected gain over the plan with the best prediction.

        Args:
            shapes: shapes of the job's devices.
            tried: number of plans that were measured or failed in a trial.
            beside: plan whose ranks train on these devices until those of the tried plan are ready: both must fit.
            least: number of trials that need no expected gain.
            budget: most trials.
        """
        if tried >= budget:
            return None
        choices = self.ranked(shapes, keep=_LISTED // max(len(shapes), 1))
        if beside is not None:
            free_bytes = self.devices.memory_bytes * USABLE_SHARE - self.memory(beside).device_bytes
            choices = [choice for choice in choices if choice.memory.device_bytes <= free_bytes]
        if not choices:
            return None
        measured = {(o.row.plan, o.row.allocation.counts) for o in self.online.observations}
        done = [i for i, c in enumerate(choices) if (c.plan, c.shape) in measured]
        if tried >= least:
            for rival in sorted(rivals(choices), key=lambda rival: -rival.gain):
                unknown = [i for i in (rival.index, rival.best) if i not in done]
                if unknown and rival.gain >= WORTH_KNOWING:
                    chosen = choices[max(unknown, key=lambda i: choices[i].width)]
                    return chosen, f"the best plan may be {rival.gain:.0%} faster than the one that looks best"
            return None
        rows = Rows.of(self.row(c.plan, c.shape) for c in choices)
        cost = np.array([c.step_time_s * sum(c.shape) for c in choices])
        hosts = np.array([len(c.shape) for c in choices])
        options = DesignOptions(budget=len(done) + 1)
        first = next_trials(self.online.fit, rows, rows, hosts, cost, done, options)
        return (choices[first[0]], f"trial {tried + 1} of about {least}") if first else None


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan that may be faster than the plan with the best prediction on the same shape.

    Attributes:
        index, best: indices of this plan and of the best prediction.
        gain: expected relative improvement of the step time over the best prediction, 0 if this plan is slower.
    """

    index: int
    best: int
    gain: float


def rivals(choices: Sequence[Ranked]) -> list[Rival]:
    """Every plan but the one with the best prediction, of each shape.

    Prediction errors are treated as independent, which makes `gain` an upper bound: those of similar plans correlate.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, choice in enumerate(choices):
        by_shape.setdefault(choice.shape, []).append(index)
    found: list[Rival] = []
    for some in by_shape.values():
        at = min(some, key=lambda i: choices[i].step_time_s)
        best, others = choices[at], [i for i in some if i != at]
        slower: Array = np.array([math.log(choices[i].step_time_s / best.step_time_s) for i in others])
        width: Array = np.array([math.hypot(choices[i].width, best.width) for i in others])
        z = slower / width
        gain = width * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) - slower * scipy.special.ndtr(-z)
        found += [Rival(i, at, float(value)) for i, value in zip(others, gain, strict=True)]
    return found


def workload_of(model: ModelShape) -> Workload:
    """Workload of a model, for the performance model."""
    return Workload.from_shape(model)
