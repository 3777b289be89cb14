"""Knowledge of one model on one type of device: ranked plans and trials worth running."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from plans.enumerate import legal_plans
from plans.memory import MemoryEstimate, estimate
from plans.model_shape import ModelShape
from plans.plan import Plan
from profiling.coefficients import Array
from profiling.design import DesignOptions, next_trials
from profiling.fleet import DeviceType
from profiling.model import Row, Rows
from profiling.online import OnlineFit
from profiling.workload import Workload

USABLE_SHARE = 0.92
"""Of a device's memory: fragmentation and the driver take the rest."""

BUDGET = 7
"""Plans that are tried of one model on one type of device."""

WORTH_KNOWING = 0.02
"""Expected loss of step time, for want of knowing better, below which no trial is worth its moves."""

WORTH_CORES = 0.03
"""Of the step time: what more CPU cores must save at least."""

_CORES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ACCUMULATIONS = tuple(2**i for i in range(11))
_LISTED = 400


@dataclass(frozen=True, slots=True)
class Ranked:
    """One plan on one shape of allocation, with what is believed of it."""

    plan: Plan
    shape: tuple[int, ...]
    step_time_s: float
    lower_s: float  # of the 90% interval
    upper_s: float
    width: float  # of the logarithm, without a measurement's noise
    memory: MemoryEstimate
    core_times: tuple[tuple[int, float], ...] = ()  # step time by cores beside each device; empty: all alike


@dataclass(slots=True)
class Knowledge:
    """A model (by its shape), a type of device, and the fit that goes on learning."""

    model: ModelShape
    workload: Workload
    devices: DeviceType
    online: OnlineFit
    refused: set[Plan] = field(default_factory=set)  # ran out of memory, or could not be run, when tried
    _plans: dict[int, list[Plan]] = field(default_factory=dict)
    _memory: dict[Plan, MemoryEstimate] = field(default_factory=dict)

    def plans(self, count: int) -> list[Plan]:
        """Legal ones on exactly so many devices."""
        if count not in self._plans:
            self._plans[count] = legal_plans(self.model, count, kind=self.devices.kind, accumulations=_ACCUMULATIONS)
        return self._plans[count]

    def memory(self, plan: Plan) -> MemoryEstimate:
        """Of its largest rank."""
        if plan not in self._memory:
            self._memory[plan] = estimate(plan, self.model, kind=self.devices.kind)
        return self._memory[plan]

    def fits(self, plan: Plan) -> bool:
        """True if the plan's largest rank fits in device memory."""
        return plan not in self.refused and self.memory(plan).device_bytes <= self.devices.memory_bytes * USABLE_SHARE

    def is_needless(self, plan: Plan) -> bool:
        """True if the plan saves memory needlessly: without that it fits and is never slower."""
        if plan.checkpointing and self.fits(replace(plan, checkpointing=False)):
            return True
        if plan.offload == "none":
            return False
        plain = replace(plan, offload="none", zero=plan.zero if plan.dp > 1 else 0)
        return self.fits(plain)

    def row(self, plan: Plan, shape: Iterable[int], cores: int | None = None) -> Row:
        """For the performance model; with so many cores beside each device, by default its share of the host's."""
        return Row(self.workload, plan, self.devices.allocation(shape, cores))

    def ranked(self, shapes: Sequence[tuple[int, ...]], keep: int, always: Iterable[Plan] = ()) -> list[Ranked]:
        """For each shape the `keep` fastest plans that fit, and those of `always` that have its number of ranks."""
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
        """The same, with step times on fewer and on more cores where these differ; devices with their own have none."""
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
        """The plan whose measurement on one of these shapes would teach most, and why; None: nothing is worth a trial.

        From `least` on, when the model as a whole is known, the one from which most is expected over what looks best.

        Args:
            shapes: that the job's own devices allow.
            tried: plans that were measured, or tried in vain.
            beside: plan whose ranks train on those devices until the tried plan's are ready: both must fit.
            least: trials before it is asked whether more are worth it.
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
        # What matters more is predicted better: slow plans are not candidates for anything.
        best = {c.shape: c.step_time_s for c in reversed(choices)}
        for c in choices:
            best[c.shape] = min(best[c.shape], c.step_time_s)
        near = [i for i, c in enumerate(choices) if c.step_time_s <= 2.0 * best[c.shape]]
        options = DesignOptions(budget=len(done) + 1, most_hosts=max(int(hosts.max()), 2))
        first = next_trials(self.online.fit, rows[near], rows, hosts, cost, done, options)
        return (choices[first[0]], f"trial {tried + 1} of at least {least}") if first else None


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan beside the one that looks best on the same shape.

    Attributes:
        gain: relative step time that is expected to be lost by running the best-looking one without knowing this one.
    """

    index: int
    best: int
    gain: float


def rivals(choices: Sequence[Ranked]) -> list[Rival]:
    """Every plan but the best-looking of each shape.

    Errors are taken as independent: an upper bound, as errors of plans alike go together.
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
    return replace(Workload.from_shape(model), name="model")
