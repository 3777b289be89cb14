"""Steps of a learning-rate scheduler: after each update, each epoch or each evaluation, as it needs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from clusterd.train.process.exits import Refused
from clusterd.train.process.job import SchedulerFactory

STEPS_TRIED, RISES = 100_000, 1.05
"""Steps that are tried beyond the end of a schedule, and the factor from which on its rate counts as rising again."""


class Schedule:
    """A scheduler, stepped by its kind, the same on every rank.

    Args:
        step: number of the step whose update it follows.
        steps_per_epoch: 0: unknown, of a stream.
        evaluates: the script evaluates while it trains.
    Raises:
        Refused: nothing in the training can step it.
    """

    def __init__(self, scheduler: Any, step: Callable[[], int], steps_per_epoch: int, *, evaluates: bool) -> None:
        self._scheduler, self._step, self._steps_per_epoch = scheduler, step, steps_per_epoch
        kind = type(scheduler).__name__
        needs = _needs(scheduler)
        if needs and needs[0] in ("metric", "metrics"):
            if not evaluates:
                raise Refused(
                    f"{kind} needs a metric: pass evaluate=train.Evaluation(data=..., every=...), whose monitored "
                    "metric it gets after each evaluation"
                )
        elif len(needs) > 1 or (needs and needs[0] not in ("epoch", "t", "step", "num_updates")):
            raise Refused(
                f"{kind}.step() needs {', '.join(needs)}: a scheduler is stepped with nothing, an epoch or a metric"
            )
        self.by_metric = bool(needs) and needs[0] in ("metric", "metrics")
        self._by_number = bool(needs) and not self.by_metric

    def step(self) -> None:
        """Step it after an update."""
        self._follow(self._step())

    def advance(self, steps: int) -> None:
        """Step a new scheduler as often as if so many updates had been made."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about steps without an update
            for number in range(1, steps + 1):
                self._follow(number)

    def _follow(self, number: int) -> None:
        if self.by_metric:
            return
        if not self._by_number:
            self._scheduler.step()
            return
        if not callable(getattr(self._scheduler, "step_update", None)):
            self._scheduler.step(number)
            return
        self._scheduler.step_update(number)  # as timm's: by updates or by epochs, one of the two does nothing
        if self._steps_per_epoch and number % self._steps_per_epoch == 0:
            self._scheduler.step(number // self._steps_per_epoch)

    def evaluated(self, value: float) -> None:
        """Step it after an evaluation, with the value of the monitored metric."""
        if self.by_metric:
            self._scheduler.step(value)


def rate_beyond(factory: SchedulerFactory, made_for: int, steps: int) -> str:
    """Behaviour of a schedule beyond the steps it was made for, in words; empty: nothing to tell, or unknown."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)
    rates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failure = _rates(factory, optimizer, rates, min(steps, made_for + STEPS_TRIED))
    if len(rates) < made_for or (failure and len(rates) == made_for == steps):
        return ""
    if failure:
        return f"the schedule ends at step {len(rates)} ({failure})"
    end, beyond = rates[made_for - 1], rates[made_for:]
    if not beyond or max(beyond) <= RISES * end:
        return ""
    highest = made_for + 1 + beyond.index(max(beyond))
    share = f"{max(beyond) / max(rates):.0%} of its highest"
    return f"the learning rate rises again beyond step {made_for}, to {share} at step {highest}"


def _rates(factory: SchedulerFactory, optimizer: torch.optim.Optimizer, rates: list[float], steps: int) -> str:
    """Append the rate of each step; the error that ended it, if one did."""
    try:
        schedule = Schedule(factory(optimizer), lambda: len(rates), 0, evaluates=True)
        for _ in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step()
    except Exception as error:  # any of the factory's or the scheduler's
        return f"{type(error).__name__}: {error}"
    return ""


def step_once(scheduler: Any) -> None:
    """Step an example of a scheduler, so that its state is complete."""
    schedule = Schedule(scheduler, lambda: 1, 1, evaluates=True)
    schedule.step()
    schedule.evaluated(1.0)


def _needs(scheduler: Any) -> list[str]:
    """Names of the arguments that its ``step`` must be given."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return ["metrics"]
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]
