"""Interface of a job under training on one rank, as seen by what saves, restores and migrates it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.data.stream import Stream
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process.context import Context
from clusterd.train.process.job import Job
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.evaluations import Evaluations
from clusterd.train.state.first_steps import FirstSteps
from clusterd.train.state.registered import Registered
from plans.model_shape import ModelShape


class Training(Protocol):
    """The parts of `clusterd.train.loop.rank_training.Training` below the training loop.

    Attributes:
        parallel: the module and its parallelization; parameters have global names.
        optimizer: the optimizer over this rank's shards.
        attributes: plain attributes that modules and the optimizer change.
        step: number of the last step done.
        fingerprint: of the data set; None: unknown.
        stream: the data, if they are a stream.
        evaluations: schedule and results of the evaluations.
        registered: objects of the script.
        first_steps: of the job, as recorded; None: they cannot be compared.
        repeated_steps: the same steps under this rank's plan, if it has repeated them.
    """

    job: Job
    context: Context
    device: torch.device
    parallel: ParallelModel
    optimizer: RankOptimizer
    attributes: Attributes
    scheduler: Any
    step: int
    fingerprint: Fingerprint | None
    stream: Stream | None
    evaluations: Evaluations
    registered: Registered
    first_steps: FirstSteps | None
    repeated_steps: FirstSteps | None

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""

    def rehearse(self) -> None:
        """Run a step whose result is discarded."""

    def read_ahead(self) -> None:
        """Read the samples of the next step in advance."""
