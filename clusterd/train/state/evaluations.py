"""Results of a job's evaluations that decide what follows: when the next is due, the best one, and an early end."""

from __future__ import annotations

import math
from typing import Any

from clusterd.train.process.evaluation import Evaluation
from clusterd.train.process.exits import Refused


class Evaluations:
    """Schedule and best result of a job's evaluations; part of the state that migrates.

    Attributes:
        request: of the script; None: it evaluates nothing.
        step: of the last evaluation; 0: none yet.
        best: best value of the monitored metric; None: none yet.
        best_step: of that value.
        without_improvement: evaluations since then.
    """

    def __init__(self, request: Evaluation | None, *, steps: int, steps_per_epoch: int) -> None:
        self.request, self._steps = request, steps
        self._every = request.steps_between(steps_per_epoch) if request is not None else 0
        self.step = self.best_step = self.without_improvement = 0
        self.best: float | None = None

    def is_due(self, step: int) -> bool:
        """True if the model must be evaluated after this step, and was not."""
        if self.request is None or step <= self.step:
            return False
        return (step >= self._steps and self.request.at_end) or bool(self._every and step % self._every == 0)

    def monitored(self, metrics: dict[str, float]) -> str:
        """Name of the metric that decides.

        Raises:
            Refused: there is none of that name.
        """
        assert self.request is not None
        name = self.request.monitor or next(iter(metrics))
        if name not in metrics:
            raise Refused(f"Evaluation: monitor is {name!r}, but the metrics are {', '.join(metrics)}")
        return name

    def record(self, step: int, metrics: dict[str, float]) -> bool:
        """Record an evaluation; return True if it is the best so far.

        Raises:
            Refused: there is no metric of the monitored name.
        """
        assert self.request is not None
        self.step, value = step, metrics[self.monitored(metrics)]
        sign = 1 if self.request.mode == "min" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.without_improvement = value, step, 0
            return True
        self.without_improvement += 1
        return False

    @property
    def ends_training(self) -> bool:
        """True if the metric has not improved for as many evaluations as the script allows."""
        patience = self.request.patience if self.request is not None else None
        return patience is not None and self.without_improvement >= patience

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`."""
        return {
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
            "without_improvement": self.without_improvement,
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state` of other ranks; None: they had none."""
        if state:
            self.step, self.best_step = int(state["step"]), int(state["best_step"])
            self.best, self.without_improvement = state["best"], int(state["without_improvement"])
