"""Steps of a job with several losses: for one part of the model after another, gradients and an update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from clusterd.train.data.loader import as_batch
from clusterd.train.loop.step import Stepper
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process.job import LossFunction
from clusterd.train.process.weighted_means import WeightedMeans


class AlternatingStepper(Stepper):
    """Executes the steps of one rank, each of several updates.

    The loss of a step is the sum of all losses; each is a metric too, under the name of its part. A step that fails
    after its first update leaves no state that belongs to a step: `updating` is true from there on.

    Attributes:
        only: losses of the next step; empty: all.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: RankOptimizer,
        scheduler: Any,
        losses: Mapping[str, LossFunction],
        **options: Any,
    ) -> None:
        super().__init__(parallel, optimizer, scheduler, _no_loss, **options)
        self.only: Collection[str] = ()
        self._updates = {part: _Update(parallel, optimizer, None, loss, **options) for part, loss in losses.items()}
        for update in self._updates.values():
            update.phases = self.phases

    def step(
        self,
        inputs: Any,
        targets: Any,
        on_gradients: Callable[[torch.Tensor], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Run one step; see `Stepper.step`."""
        total = torch.zeros((), device=self._parallel.device)
        self._metrics = WeightedMeans()
        *_, last = self._chosen()
        for part, update, loss in self.gradients(inputs, targets):
            total += loss
            self._metrics.add({part: (loss, float(self._is_first))})
            self._metrics.merge(update._metrics)
            if part == last:
                self.gradient_norm = update.gradient_norm
                self.metric_names = sorted(
                    {*self._updates, *(n for u in self._updates.values() for n in u.metric_names)}
                )
                on_gradients(total)
                self.phases.lap("agree")
            else:
                on_change()
            self.updating = True
            self.before_update()
            self._optimizer.step(part)
            self.phases.lap("optimizer")
        if self._scheduler is not None:
            self._scheduler.step()
        self.updating = False

    def gradients(self, inputs: Any, targets: Any) -> Iterator[tuple[str, Stepper, torch.Tensor]]:
        """Compute the gradients of each loss in turn; see `Stepper.gradients`."""
        for part in self._chosen():
            update = self._updates[part]
            with self._parallel.training_only(part):
                loss = update.compute_gradients(inputs, targets)
            yield part, update, loss

    def _chosen(self) -> list[str]:
        return [part for part in self._updates if part in self.only or not self.only]


class _Update(Stepper):
    """Gradients of one loss, which is given the model and the batch."""

    def _loss_of(self, inputs: Any, targets: Any, samples: int) -> torch.Tensor:
        return self._contribution(self._parallel.module, as_batch(inputs, targets), samples)


def _no_loss(*_: Any) -> Any:
    raise AssertionError("each update has its own loss")
