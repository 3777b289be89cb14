"""Interface of a job under training on one rank, as seen by what saves, restores and migrates it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from clusterd.plans.model_shape import ModelShape
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.data.stream import Stream
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.parallel.schedule import Schedule
from clusterd.train.process.context import Context
from clusterd.train.process.job import Job
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.evaluations import Evaluations
from clusterd.train.state.next_steps import NextSteps
from clusterd.train.state.registered import Registered


class Training(Protocol):
    """The parts of `clusterd.train.loop.rank_training.Training` below the training loop.

    Attributes:
        parallel: the module and its parallelization; parameters have global names.
        optimizer: the optimizer over this rank's shards.
        attributes: plain attributes that modules and the optimizer change.
        schedule: steps of the scheduler.
        step: number of the last step done.
        fingerprint: of the data set; None: unknown.
        stream: the data, if they are a stream.
        evaluations: schedule and results of the evaluations.
        registered: objects of the script.
        workers_are_stale: the script's loop has changed what data-loader workers have a copy of.
        normalises_parts: batch normalisation sees the parts into which a plan cuts the batch.
    """

    job: Job
    context: Context
    device: torch.device
    parallel: ParallelModel
    optimizer: RankOptimizer
    attributes: Attributes
    scheduler: Any
    schedule: Schedule | None
    step: int
    fingerprint: Fingerprint | None
    stream: Stream | None
    evaluations: Evaluations
    registered: Registered
    workers_are_stale: bool
    normalises_parts: bool
    stepper: Any

    @property
    def rounds_as(self) -> str:
        """Precision whose rounding the losses have."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""

    def rehearse(self) -> None:
        """Run a step whose result is discarded."""

    @property
    def parameter_names(self) -> list[str]:
        """Global names of all parameters of the whole model."""

    def rates(self) -> dict[str, float]:
        """Learning rate of each parameter that this rank updates."""

    def measured_norms(self) -> dict[str, float]:
        """Norm of each parameter's gradient, where the last step has measured them."""

    def try_steps(
        self, count: int, seed: int, batches: Iterator[tuple[Any, Any]] | None = None, autocast: str = ""
    ) -> NextSteps:
        """Make the next steps, of these batches or the same read anew; the caller restores the state afterwards."""

    def read_ahead(self) -> None:
        """Read the samples of the next step in advance."""
