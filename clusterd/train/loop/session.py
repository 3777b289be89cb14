"""Training with the script's own loop: one batch at a time, with evaluation and logging between the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from clusterd.train.data.loader import as_batch, as_pair
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.loop_state import script_frames
from clusterd.train.loop.training_loop import TrainingLoop
from clusterd.train.process.job import Outcome


class Stopped(SystemExit):
    """The agent stopped this rank between two steps; the process exits with code 0."""


class StepOutput:
    """Result of a step, summed over all ranks; reading it waits for the step."""

    def __init__(self, consensus: StepConsensus, read_values: Callable[[list[float]], dict[str, Any]]) -> None:
        self._consensus, self._read_values = consensus, read_values

    @property
    def loss(self) -> float:
        """Loss over the global batch."""
        return self._consensus.result()[0]

    @property
    def metrics(self) -> dict[str, float]:
        """Further values that the loss function returned, and the gradient norm if it is limited."""
        values = self._read_values(self._consensus.sums())
        norm = {"grad_norm": values["grad_norm"]} if "grad_norm" in values else {}
        return {**values.get("metrics", {}), **norm}


class Session:
    """A training run whose loop the script owns; every rank must go through the same calls.

    Attributes:
        outcome: after the ``with`` block: last step, its loss, and the reason for a stop, if any.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self.outcome: Outcome | None = None
        loop.own_loop.variables.opened_in = next(script_frames(), None)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which should print and write files."""
        return self._loop.training.context.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._loop.training.device

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Number and batch of each remaining step, this replica's share of its global batch.

        Between two of them, the run acts on stops, migrations and checkpoints.

        Raises:
            Stopped: under clusterd, after a stop.
        """
        training = self._loop.training
        for inputs, targets in self._loop.batches():
            yield training.step + 1, as_batch(inputs, targets)
        if self._loop.stopped and training.context.launcher == "clusterd":
            raise Stopped(0)

    def step(self, batch: Any, only: str | Sequence[str] = ()) -> StepOutput:
        """Forward and backward pass, update and scheduler step under the plan; once for each batch.

        Args:
            only: of a job with several losses: those of this step, the same on all ranks; others make no update.
        """
        inputs, targets = as_pair(batch)
        consensus = self._loop.step(inputs, targets, [only] if isinstance(only, str) else only)
        return StepOutput(consensus, self._loop.training.stepper.read_values)

    def evaluate(
        self,
        data: Any,
        metric: Callable[[Any, Any], Any] | None = None,
        *,
        batch: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        whole: bool = False,
    ) -> Any:
        """Evaluate the model on a data set; see `clusterd.train.Evaluation` for the arguments.

        Returns:
            The mean over all samples, the same on every rank; a dict by name if the metric has several.
        """
        with self._loop.pause():
            self._loop.all_call("called run.evaluate()")
            self._loop.training.optimizer.share_writes()
            found = self._loop.evaluator.means(data, metric, batch=batch, collate_fn=collate_fn, whole=whole)
        return next(iter(found.values())) if len(found) == 1 else found

    def log(self, **metrics: Any) -> None:
        """Record metrics of the last step, as rank 0 has them; a dict gives one for each of its entries."""
        values: dict[str, float] = {}
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                values |= {f"{name}.{key}": float(part) for key, part in value.items()}
            else:
                values[name] = float(value)
        self._loop.log(values)

    def register(self, name: str, value: Any) -> None:
        """Make the state of an object (``state_dict``, ``load_state_dict``) part of the training state.

        It travels with migrations and is in checkpoints, as rank 0 has it; a state that this run continues from is
        loaded at once. Call it before the loop.
        """
        self._loop.training.registered.add(name, value)


class SkippedSession(Session):
    """Session of a stage of the script that another job trains: it has no step, and does nothing."""

    def __init__(self) -> None:
        self.outcome = Outcome(step=0, loss=float("nan"), skipped=True)

    is_main = False
    device = torch.device("cpu")

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(())

    def evaluate(self, *_: Any, **__: Any) -> Any:
        """Return NaN."""
        return float("nan")

    def log(self, **_: Any) -> None:
        """Record nothing."""

    def register(self, *_: Any) -> None:
        """Register nothing."""
