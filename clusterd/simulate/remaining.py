"""Distributions of the remaining run times of jobs, from which roll-outs draw.

Of an elastic job with a performance model the steps that are left are known, or foreseen from its loss, and its step
time is lognormal about the prediction, by the prediction's own interval; a measured step time moves it. Of other jobs
the total run time is drawn from jobs of the same name, of the same user, and a wide prior, and is above what the job
has run already. In one course what was drawn for a job counts for the next ones like a finished run (Blackwell and
MacQueen's urn): jobs of one batch are long or short together, and those that still run tell of them, too. A time limit
bounds both: its timer is part of the state.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clusterd.core.estimates.attained_service import STEPS_TO_TRUST, total_steps
from clusterd.core.estimates.expected_time import FIRST_GUESS_S, RunTimes, limit_left_s, run_key
from clusterd.core.estimates.heterogeneous_speed import pace
from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.core.state import InspectionState, Job, State
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.simulate.runs import Run
from clusterd.types import JobId, JobKind

INTERVAL_SIGMAS = 2.0 * statistics.NormalDist().inv_cdf(0.95)
"""Width of a 90% interval in standard deviations."""

LOSS_SPREAD = 0.1
"""Relative error of the steps that a loss curve foretells: smaller changes of the forecast are not reported."""

PRIOR_SPREAD = 2.0
"""Standard deviation of the logarithm of a run time of which nothing is known: 95% lie within a factor of 50."""

PRIOR_LEAST = 0.01
"""Smallest part of its time limit that a job of which nothing else is known is taken to run."""

PRIOR_POINTS = 31

BANDWIDTH_LEAST, BANDWIDTH_ALONE = 0.05, 0.5
"""Standard deviation of the logarithm by which an earlier run time is blurred: at least, and of a single one."""


class Chance(random.Random):
    """Random numbers of one course, and the run times that were drawn in it, by `run_key` and by user."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.drawn: dict[str, list[float]] = {}


Draw = Callable[[Chance], Run]
"""Function that draws one course of a job."""


@dataclass(frozen=True, slots=True)
class Elapsing:
    """Speed of a job of which no speed is known: a second per second, on fewer devices in proportion."""

    devices: int = 0  # on which its time is known; 0: the number makes no difference
    parameters: int = 0

    def pace_s(self, plan: Plan | None, hosts: Sequence[Sequence[str]]) -> float | None:
        """Seconds of work time per second."""
        held = sum(map(len, hosts))
        return self.devices / held if self.devices and held else 1.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Speed of a job by its performance model, off by one draw: a model that is too slow here is so everywhere."""

    table: PerformanceTable
    deviation: float  # in standard deviations of each estimate
    scale: float  # measured step time over the predicted one
    measured: tuple[Plan, tuple[int, ...]] | None  # plan and shape under which it was measured
    alone_s: float  # device-seconds per step, for plans without an estimate
    parameters: int

    def pace_s(self, plan: Plan | None, hosts: Sequence[Sequence[str]]) -> float | None:
        """Seconds per step; of a plan without an estimate in proportion to the devices."""
        shape = tuple(sorted(map(len, hosts), reverse=True))
        found = _estimate(self.table, plan, hosts) if plan is not None else None
        if found is None:
            return self.alone_s / max(sum(shape), 1)
        if (plan, shape) == self.measured:
            return found.step_time_s * self.scale
        sigma = math.log(max(found.upper_s / found.lower_s, 1.0)) / INTERVAL_SIGMAS
        return found.step_time_s * self.scale * math.exp(self.deviation * sigma)


def _estimate(table: PerformanceTable, plan: Plan, hosts: Sequence[Sequence[str]]) -> Estimate | None:
    names = {name for types in hosts for name in types}
    known = table.of(plan, names.pop(), map(len, hosts)) if len(names) == 1 else None
    places = [(str(host), name) for host, types in enumerate(hosts) for name in types]
    return known if known is not None or not (names or plan.shares) else pace(table, plan, places)


def courses_of(state: State, now_s: float) -> dict[JobId, Draw]:
    """Distributions of the courses of all jobs that are not over, by job.

    A job that is held, or whose model nobody has inspected yet, has none: nothing tells when it may start.
    """
    found: dict[JobId, Draw] = {}
    for job_id in (*state.active, *state.queue):
        job = state.jobs[job_id]
        described = job.spec.kind is not JobKind.ELASTIC or job.inspection.state is InspectionState.DONE
        if job.attempt is not None or (job.held_by is None and described):
            found[job_id] = _course(job, state, now_s)
    return found


def _course(job: Job, state: State, now_s: float) -> Draw:
    table = state.performance_tables.get(job.inspection.model)
    if job.spec.kind is JobKind.ELASTIC and table is not None and table.estimates:
        return _by_model(job, table, state)
    return _by_history(job, state.run_times, now_s)


def _by_model(job: Job, table: PerformanceTable, state: State) -> Draw:
    """Course of a job with a performance model."""
    shape = ModelShape.from_dict(job.inspection.shape) if job.inspection.shape is not None else None
    parameters = sum(math.prod(p.shape) for p in shape.parameters) if shape is not None else 0
    alone_s = min(x.step_time_s * x.devices for x in table.estimates)
    measured, scale = _measured(job, table, state)
    if measured is not None and job.progress.step_time_s is not None:
        alone_s = job.progress.step_time_s * sum(measured[1])

    def draw(random_: Chance) -> Run:
        speed = Predicted(table, random_.gauss(0.0, 1.0), scale, measured, alone_s, parameters)
        done = float(job.progress.step)
        steps = max(_total_steps(job, random_), done + 1.0)
        return Run(job=job.id, name=job.spec.name, steps=steps, speed=speed, done=done, saved=done)

    return draw


def _measured(job: Job, table: PerformanceTable, state: State) -> tuple[tuple[Plan, tuple[int, ...]] | None, float]:
    """Plan and shape under which a running job's step time was measured, and its ratio to the prediction."""
    attempt, step_time_s = job.attempt, job.progress.step_time_s
    if attempt is None or attempt.plan is None or step_time_s is None or job.progress.step < STEPS_TO_TRUST:
        return None, 1.0
    hosts: dict[str, list[str]] = {}
    there = [state.hosts[host] for host in attempt.hosts if host in state.hosts]
    names = {device.id: device.name for host in there for device in host.devices}
    for rank in attempt.ranks.values():
        if rank.place.device is not None:
            hosts.setdefault(rank.place.host, []).append(names.get(rank.place.device, "lost"))
    shape = tuple(sorted(map(len, hosts.values()), reverse=True))
    known = _estimate(table, attempt.plan, list(hosts.values()))
    return (attempt.plan, shape), step_time_s / known.step_time_s if known is not None else 1.0


def _total_steps(job: Job, random_: random.Random) -> float:
    """Steps of a job from start to end, drawn."""
    done, total = float(job.progress.step), total_steps(job)
    if not total:  # heavy-tailed: as likely as not it makes as many steps again (after Tiresias)
        return max(done, 100.0) / (1.0 - random_.random())
    if job.progress.predictable is False:  # mostly explorations that end early
        return done + max(total - done, 0.0) * random_.random()
    declared = int((job.inspection.shape or {}).get("steps") or 0)
    if job.progress.predicted_steps is None or total == declared:
        return float(total)
    foreseen = done + max(total - done, 1.0) * random_.lognormvariate(0.0, LOSS_SPREAD)
    return min(foreseen, float(declared)) if declared else foreseen


def _by_history(job: Job, run_times: RunTimes, now_s: float) -> Draw:
    """Course of a job without a performance model, by run times of its like."""
    attempt = job.attempt
    elapsed_s = now_s - attempt.started_s if attempt is not None else 0.0
    total_s = total_time(job, run_times, elapsed_s, elapsed_s + limit_left_s(job, now_s))
    is_elastic = job.spec.kind is JobKind.ELASTIC
    held = len(attempt.ranks) if attempt is not None else max(job.spec.resources.devices, 1)
    speed = Elapsing(held if is_elastic else 0)

    def draw(random_: Chance) -> Run:
        return Run(
            job=job.id,
            name=job.spec.name,
            steps=total_s(random_),
            speed=speed,
            has_steps=False,
            keeps_state=job.spec.kind is not JobKind.COMMAND,
            done=elapsed_s,
            saved=elapsed_s if job.spec.kind is not JobKind.COMMAND else 0.0,
        )

    return draw


def total_time(job: Job, run_times: RunTimes, elapsed_s: float, limit_s: float) -> Callable[[Chance], float]:
    """Distribution of a job's run time in seconds, given that it has run for `elapsed_s` and is not over.

    With n runs of its name, finished or drawn, the next one is of their kind n times in n + 1; else it is of the kind
    of its user's runs, by the same rule, and else of the prior's.
    """
    levels: list[tuple[str, list[float], float]] = []
    for key in (run_key(job), job.spec.user):
        known = [max(seconds, 1e-3) for seconds in run_times.get(key, ())]
        levels.append((key, known, _bandwidth(known)))
    prior = [seconds for seconds in _prior(limit_s) if seconds > elapsed_s]

    def draw(random_: Chance) -> float:
        weight = 1.0
        alive: list[tuple[float, float, int]] = []  # run time, blur, first level that it is news for
        weights: list[float] = []
        for number, (key, known, blur) in enumerate(levels):
            if runs := known + random_.drawn.get(key, []):
                each = weight / (len(runs) + 1.0)
                some = [(seconds, blur, number) for seconds in runs if seconds > elapsed_s]
                alive += some
                weights += [each] * len(some)
                weight = each
        alive += [(seconds, 0.0, len(levels)) for seconds in prior]
        weights += [weight / PRIOR_POINTS] * len(prior)
        level = len(levels)
        if not alive:  # longer than anything known: as likely as not as long again
            total_s = min(elapsed_s / (1.0 - random_.random()), max(limit_s, elapsed_s + 1.0)) + 1.0
        else:
            ((seconds, blur, level),) = random_.choices(alive, weights)
            total_s = seconds * random_.lognormvariate(0.0, blur)
            total_s = total_s if total_s > elapsed_s else seconds
        for key, _, _ in levels[: level + 1]:
            random_.drawn.setdefault(key, []).append(total_s)
        return total_s

    return draw


def _bandwidth(known: Sequence[float]) -> float:
    """Blur of a sample of run times, by Silverman's rule on their logarithms."""
    if len(known) <= 1:
        return BANDWIDTH_ALONE
    return float(max(statistics.stdev(map(math.log, known)) * len(known) ** -0.2, BANDWIDTH_LEAST))


def _prior(limit_s: float) -> list[float]:
    """Quantiles of a run time of which only the limit is known: log-uniform below it; without one, lognormal."""
    shares = [(index + 0.5) / PRIOR_POINTS for index in range(PRIOR_POINTS)]
    if limit_s < math.inf:
        return [max(limit_s, 1.0) * PRIOR_LEAST ** (1.0 - share) for share in shares]
    normal = statistics.NormalDist(math.log(FIRST_GUESS_S), PRIOR_SPREAD)
    return [math.exp(normal.inv_cdf(share)) for share in shares]
