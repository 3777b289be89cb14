"""A job under a plan on one rank, between steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clusterd.train.data import loader
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.data.stream import Stream, first_samples, is_stream
from clusterd.train.inspect import describe
from clusterd.train.loop.alternating_step import AlternatingStepper
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.step import Stepper
from clusterd.train.parallel import build, precision
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.mesh import same_on_all_ranks
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process.context import Context
from clusterd.train.process.control import SIGNALS
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.job import Job
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.process.seeding import seed_step
from clusterd.train.state import first_steps
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.evaluations import Evaluations
from clusterd.train.state.first_steps import FirstSteps
from clusterd.train.state.registered import Registered
from plans.model_shape import ModelShape
from plans.plan import Plan


class Training:
    """A job under a plan on this rank, between steps: the object that a migration takes apart and rebuilds.

    Attributes:
        parallel: the module and its parallelization; parameters have global names.
        optimizer: the optimizer over this rank's shards.
        attributes: plain attributes that the modules and the optimizer change.
        step: number of the last step done; with the seed it determines the data position and the RNG.
        fingerprint: of the data set.
        stream: the data, if they are a stream.
        evaluations: schedule and results of the evaluations.
        registered: objects of the script.
        first_steps: of the job, as recorded; None: they cannot be compared.
        repeated_steps: the same steps under this plan, if they were repeated here.
        first_steps_limit: the loop records so many of them.

    Args:
        on_meta: build without values; they come from other ranks or a checkpoint.
        uninitialized: values come from there, whether or not the model is built with some.
        repeats_first_steps: the rehearsal consists of the job's first steps.
        shape: of the whole model, if known.
    """

    def __init__(
        self,
        job: Job,
        context: Context,
        device: torch.device,
        mesh: Any,
        *,
        uninitialized: bool = False,
        on_meta: bool = False,
        repeats_first_steps: bool = False,
        shape: ModelShape | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        plan = context.plan
        self.job, self.context, self.device, self.step = job, context, device, 0
        self.fingerprint = fingerprint
        self.stream = Stream(job.data) if is_stream(job.data) else None
        per_epoch = loader.epoch_steps(job.data, job.global_batch) if self.stream is None else 0
        self.registered = Registered()
        self.evaluations = Evaluations(job.evaluate, steps=job.steps, steps_per_epoch=per_epoch)
        self._prefetched: Iterator[tuple[Any, Any]] | None = None
        self._shape, self._repeats = shape, repeats_first_steps
        model = build.build_model(job.model, job.seed, meta=on_meta)
        if not uninitialized and not same_on_all_ranks(build.fingerprint(model), device):
            raise PlanRefused(
                "model() made different weights on different ranks; it must draw them from torch's generator only"
            )
        self.first_steps: FirstSteps | None = None
        self.repeated_steps: FirstSteps | None = None
        self.first_steps_limit = 1 if job.own_loop else first_steps.STEPS
        self._no_steps = FirstSteps(
            plan,
            None if on_meta or job.init_from is not None else build.fingerprint(model),
            plan.dp * plan.accumulation if _batch_norm_of(model) is not None else 1,
        )
        if context.rank == 0:
            _warn_of_batch_norm(model, plan)
        if plan.pp > 1:
            model = build.Stage(model, build.stage_paths(model, job.layers, plan.pp)[context.coordinates.stage])
        model.forward = precision.with_precision(job.precision, device.type, model.forward)
        modules = dict(model.named_modules())  # before some plans wrap them under other names
        self.parallel = ParallelModel(
            model,
            plan,
            device,
            mesh=mesh,
            tp_plan=job.tp_plan,
            find_unused_parameters=job.find_unused_parameters,
            alternates=bool(job.losses),
        )
        if plan != Plan() or context.launcher == "clusterd":
            self.parallel.guard_parameters(self.shape)
        if not any(p.requires_grad for _, p in self.parallel.parameters):
            raise Refused("the model has no trainable parameter (requires_grad is False for all)")
        self.optimizer = RankOptimizer(self.parallel, job.optimizer)
        self.scheduler = job.scheduler(self.optimizer.optimizer) if job.scheduler is not None else None
        self.attributes = Attributes(modules, self.optimizer.holder, job.losses or job.loss)
        options: dict[str, Any] = {
            "coordinates": context.coordinates,
            "global_batch": job.global_batch,
            "clip_norm": job.clip_norm,
        }
        parts = self.parallel, self.optimizer, self.scheduler
        in_precision = partial(precision.with_precision, job.precision, device.type)
        self.stepper: Stepper
        if job.losses:
            losses = {part: in_precision(loss) for part, loss in job.losses.items()}
            self.stepper = AlternatingStepper(*parts, losses, **options)
        else:
            self.stepper = Stepper(*parts, in_precision(job.loss), **options)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Batches of this replica's share, one per remaining step."""
        if self._prefetched is not None:
            prefetched, self._prefetched = self._prefetched, None
            return prefetched
        if self.stream is not None:
            return self.stream.batches(
                self.job,
                self.context.plan,
                self.context.coordinates.replica,
                self.device,
                self.step,
                collates=self.stepper.wants_inputs,
            )
        if not self.stepper.wants_inputs:
            return itertools.repeat((None, None), self.job.steps - self.step)
        return self._read(self.step, self.job.steps, self.job.num_workers)

    def _read(self, first_step: int, steps: int, num_workers: int) -> Iterator[tuple[Any, Any]]:
        return loader.batches(
            self.job.data,
            self.context.plan,
            self.context.coordinates.replica,
            self.device,
            global_batch=self.job.global_batch,
            seed=self.job.seed,
            first_step=first_step,
            steps=steps,
            num_workers=num_workers,
            collate_fn=self.job.collate_fn,
        )

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        if self._shape is None:
            self._shape = run_in_fork(lambda: describe.describe(self.job, tp_degrees=[], trace=False, pipeline=False))
        return self._shape

    def read_ahead(self) -> None:
        """Read the samples of the next step in advance."""
        remaining = iter(self.batches())
        first = next(remaining, None)
        self._prefetched = itertools.chain([first], remaining) if first is not None else remaining

    @property
    def parameter_names(self) -> list[str]:
        """Global names of all parameters of the whole model."""
        return [parameter.name for parameter in self.shape.parameters]

    def record_first_steps(self) -> None:
        """Have the loop record the first steps, which begin with the initial weights."""
        self.first_steps = self._no_steps

    def record(self, step: int, loss: float) -> None:
        """Record one of the job's first steps, if they are recorded."""
        if self.first_steps is not None and step == len(self.first_steps.losses) + 1:
            self.first_steps = self.first_steps.with_step(loss, self.stepper.gradient_norms)

    def repeat_first_steps(self) -> None:
        """Make the first steps of the job under this plan, from its initial weights; see `Stepper.rehearsal`."""
        job, coordinates, found = self.job, self.context.coordinates, self._no_steps
        batches: Iterator[tuple[Any, Any]] = itertools.repeat((None, None), first_steps.STEPS)
        if self.stepper.wants_inputs:
            batches = self._read(0, first_steps.STEPS, num_workers=0)
        losses: list[torch.Tensor] = []
        self.stepper.measured_parameters = self.parameter_names
        with self.stepper.rehearsal():
            for step, (inputs, targets) in enumerate(batches):
                seed_step(job.seed, step, coordinates.replica, coordinates.stage)
                self.stepper.step(inputs, targets, losses.append)
                loss, _ = StepConsensus(losses[step], [0.0] * len(SIGNALS)).result()
                found = found.with_step(loss, self.stepper.gradient_norms)
        self.repeated_steps = found

    def rehearse(self) -> None:
        """Run a step on copies of the first sample; see `Stepper.rehearsal`."""
        if self._repeats:
            self.repeat_first_steps()
            return
        share = self.context.plan.batch_shares(self.job.global_batch)[self.context.coordinates.replica]
        batch: tuple[Any, Any] = (None, None)
        if self.stepper.wants_inputs:
            batch = loader.pair_on_device(self.job.collate_fn(first_samples(self.job.data, 1) * share), self.device)
        with self.stepper.rehearsal():
            self.stepper.step(*batch)


def _warn_of_batch_norm(model: torch.nn.Module, plan: Plan) -> None:
    """Log where batch normalisation sees a part of the global batch only."""
    found = _batch_norm_of(model)
    parts = plan.dp * plan.accumulation
    if found is not None and parts > 1:
        print(
            f"clusterd: {found or 'the model'} normalises over the samples that it gets, under {plan} one of {parts} "
            "parts of each batch: losses differ from those of one process, and running statistics are replica 0's; "
            "group and layer normalisation do not depend on the plan",
            flush=True,
        )


def _batch_norm_of(model: torch.nn.Module) -> str | None:
    """Name of the first batch normalisation that computes its statistics; None: there is none."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return next((name for name, part in model.named_modules() if isinstance(part, kind) and part.training), None)
