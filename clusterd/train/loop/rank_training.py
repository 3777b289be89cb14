"""A job under a plan on one rank, between steps."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.plans.sample_order import Indices
from clusterd.train.data import loader
from clusterd.train.data.fingerprint import Fingerprint
from clusterd.train.data.stream import Stream, first_samples, keep_first_samples
from clusterd.train.inspect import describe
from clusterd.train.loop.alternating_step import AlternatingStepper
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.step import Stepper
from clusterd.train.parallel import build, precision
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.mesh import check_same_model
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.parallel.schedule import Schedule
from clusterd.train.process.context import Context
from clusterd.train.process.control import SIGNALS
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.job import Job
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.process.seeding import UPDATE_STAGE, all_generator_states, seed_step
from clusterd.train.process.start_phases import StartPhases
from clusterd.train.state.attributes import COLLATE, DATA, SAMPLER, Attributes
from clusterd.train.state.evaluations import Evaluations
from clusterd.train.state.next_steps import NextSteps
from clusterd.train.state.registered import Registered


class Training:
    """A job under a plan on this rank, between steps: the object that a migration takes apart and rebuilds.

    Attributes:
        parallel: the module and its parallelization; parameters have global names.
        optimizer: the optimizer over this rank's shards.
        schedule: steps of the scheduler; None: there is none.
        normalises_parts: batch normalisation sees the parts into which a plan cuts the batch.
        attributes: plain attributes that the modules and the optimizer change.
        step: number of the last step done; with the seed it determines the data position and the RNG.
        fingerprint: of the data set.
        stream: the data, if they are a stream.
        evaluations: schedule and results of the evaluations.
        registered: objects of the script.
        started: phases of the start, until the first step is recorded; None: another rank's state goes on here.

    Args:
        on_meta: build without values; they come from other ranks or a checkpoint.
        uninitialized: values come from there, whether or not the model is built with some.
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
        shape: ModelShape | None = None,
        fingerprint: Fingerprint | None = None,
        stream: Stream | None = None,
    ) -> None:
        plan = context.plan
        self.job, self.context, self.device, self.step = job, context, device, 0
        self.fingerprint = fingerprint
        self.stream = stream
        per_epoch = 0
        if self.stream is None:
            per_epoch = loader.order_of(job.data, job.global_batch, job.seed, job.sampler).steps_per_epoch
        self.registered = Registered()
        self.started: StartPhases | None = None
        self.compared_metrics: set[str] = set()
        self.evaluations = Evaluations(job.evaluate, steps=job.steps, steps_per_epoch=per_epoch)
        self.workers_are_stale = False  # the script's loop has changed the data set
        self._prefetched: Iterator[tuple[Any, Any]] | None = None
        self._shape = shape
        model = build.build_model(job.model, job.seed, meta=on_meta)
        if not uninitialized:
            check_same_model(model, device)
        self.normalises_parts = _batch_norm_of(model) is not None
        self._rounds_as = precision.rounds_as(job.precision, model)
        if context.rank == 0:
            _warn_of_batch_norm(model, plan)
        if plan.pp > 1:
            weights = shape.layer_weights() if shape is not None else ()
            model = build.stage_of(model, job.layers, plan, context.coordinates.stage, weights)
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
        self.optimizer = RankOptimizer(self.parallel, job.optimizer, own_loop=job.own_loop)
        if context.rank == 0:
            _warn_of_hooks(self.optimizer.optimizer, plan)
        self.scheduler = job.scheduler(self.optimizer.optimizer) if job.scheduler is not None else None
        makes_batches = {SAMPLER: job.sampler}
        if not job.num_workers or self.stream is None:  # the worker of a stream sees nothing that changes here
            makes_batches |= {COLLATE: job.collate_fn} | ({DATA: job.data} if self.stream is None else {})
        self.attributes = Attributes(modules, self.optimizer.holder, job.losses or job.loss, makes_batches)
        options: dict[str, Any] = {
            "coordinates": context.coordinates,
            "shares": plan.batch_shares(job.global_batch),
            "clip_norm": job.clip_norm,
        }
        self.schedule: Schedule | None = None
        if self.scheduler is not None:
            evaluates = job.evaluate is not None
            self.schedule = Schedule(self.scheduler, lambda: self.step + 1, per_epoch, evaluates=evaluates)
        parts = self.parallel, self.optimizer, self.schedule
        in_precision = partial(precision.with_precision, job.precision, device.type)
        self.stepper: Stepper
        if job.losses:
            losses = {part: in_precision(loss) for part, loss in job.losses.items()}
            self.stepper = AlternatingStepper(*parts, losses, **options)
        else:
            self.stepper = Stepper(*parts, in_precision(job.loss), **options)
        # What an optimizer draws must be the same on all replicas.
        self.stepper.before_update = lambda: seed_step(job.seed, self.step, 0, UPDATE_STAGE)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Batches of this replica's share, one per remaining step."""
        if self._prefetched is not None:
            prefetched, self._prefetched = self._prefetched, None
            return prefetched
        # A loop of the script's own takes its batch apart on every rank.
        reads = self.stepper.wants_inputs or self.job.own_loop
        if self.stream is not None:
            return self.stream.batches(
                self.job,
                self.context.plan,
                self.context.coordinates.replica,
                self.device,
                self.step,
                collates=reads,
            )
        if not reads:
            return itertools.repeat((None, None), self.job.steps - self.step)
        return self._read(self.step, self.job.steps, self.job.num_workers)

    def _read(
        self, first_step: int, steps: int, num_workers: int, draws_seed: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        return loader.batches(
            self.job.data,
            self.context.plan,
            self.context.coordinates.replica,
            self.device,
            global_batch=self.job.global_batch,
            seed=self.job.seed,
            draws_seed=draws_seed,
            first_step=first_step,
            steps=steps,
            num_workers=num_workers,
            collate_fn=self.job.collate_fn,
            sampler=self.job.sampler,
            on_epoch=self._compare_order,
            is_stale=self._has_new_data,
        )

    def _has_new_data(self) -> bool:
        """True once after the script's loop has changed what data-loader workers have a copy of."""
        is_stale, self.workers_are_stale = self.workers_are_stale, False
        return is_stale

    def _compare_order(self, epoch: int, numbers: Indices) -> None:
        """Compare what the script's sampler has yielded for an epoch with the other replicas.

        Raises:
            PlanRefused: on all of them, if some have another order.
        """
        group, plan = self.parallel.dp_group, self.context.plan
        if group is None:
            return
        every: list[Any] = [None] * plan.dp
        dist.all_gather_object(every, zlib.crc32(numbers.tobytes()), group=group)
        if len(set(every)) > 1:
            raise PlanRefused(
                f"replicas have other orders of the samples of epoch {epoch}: what the sampler yields may depend on "
                f"the epoch and on random numbers, not on what was computed, of which a replica of {plan} has a part"
            )

    @property
    def rounds_as(self) -> str:
        """Precision whose rounding the losses have."""
        return "bf16" if precision.own_autocast else self._rounds_as

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        if self._shape is None:
            if self.stream is None:
                keep_first_samples(self.job.data)
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

    def rates(self) -> dict[str, float]:
        """Learning rate of each parameter that this rank updates, where it is known on the host."""
        names = {id(plain): name for name, _, plain in self.optimizer.local}
        return {
            names[id(parameter)]: float(group["lr"])
            for group in self.optimizer.optimizer.param_groups
            for parameter in group["params"]
            if isinstance(group.get("lr"), (int, float)) and id(parameter) in names
        }

    def measured_norms(self) -> dict[str, float]:
        """Norm of each parameter's gradient, where the last step has measured them: not with several losses."""
        return dict(zip(self.parameter_names, self.stepper.gradient_norms, strict=False))

    def try_steps(
        self, count: int, seed: int, batches: Iterator[tuple[Any, Any]] | None = None, autocast: str = ""
    ) -> NextSteps:
        """Make the next steps; the caller restores the state afterwards.

        Args:
            seed: in place of the job's, for random numbers in a step.
            batches: of these steps, or more; None: they are read.
            autocast: see `NextSteps`.
        """
        coordinates, made = self.context.coordinates, NextSteps()
        if not self.stepper.wants_inputs:
            batches = itertools.repeat((None, None), count)
        elif batches is None:
            batches = self._read(self.step, self.step + count, num_workers=0, draws_seed=seed)
        for number, (inputs, targets) in enumerate(itertools.islice(batches, count)):
            seed_step(seed, self.step + number, coordinates.replica, coordinates.stage)
            if number == 0:
                self.stepper.measured_parameters = self.parameter_names
            else:
                made.rates = self.rates()
            with precision.again(autocast, self.device.type):  # of each step: it keeps casts of weights to its end
                loss, drew = self._step_alone(inputs, targets)
            made.losses.append(loss)
            made.drew = made.drew or drew
            if number == 0:
                made.norms = self.measured_norms()
        return made

    def _step_alone(self, inputs: Any, targets: Any) -> tuple[float, bool]:
        """Make a step; returns its loss over the global batch, and True if this rank drew random numbers in it."""
        fresh = all_generator_states()
        reached: list[tuple[torch.Tensor, bool]] = []
        self.stepper.step(inputs, targets, lambda loss: reached.append((loss, all_generator_states() != fresh)))
        contribution, drew = reached[0]
        return StepConsensus(contribution, [0.0] * len(SIGNALS)).result()[0], drew

    def rehearse(self) -> None:
        """Run a step on copies of the first sample; see `Stepper.rehearsal`."""
        share = self.context.plan.batch_shares(self.job.global_batch)[self.context.coordinates.replica]
        batch: tuple[Any, Any] = (None, None)
        if self.stream is None and self.stepper.wants_inputs:
            batch = loader.pair_on_device(self.job.collate_fn(first_samples(self.job.data, 1) * share), self.device)
        with self.stepper.rehearsal():
            if self.stream is None:  # which is read to train on it only
                self.stepper.step(*batch)


def _warn_of_batch_norm(model: torch.nn.Module, plan: Plan) -> None:
    """Log where batch normalisation sees a part of the global batch only."""
    found = _batch_norm_of(model)
    parts = plan.dp * plan.accumulation
    if found is not None and parts > 1:
        print(
            f"clusterd: {found or 'the model'} is batch normalisation, which sees one of {parts} parts of each batch "
            f"under {plan}: losses differ from those of one process, and running statistics are replica 0's. On GPUs, "
            "without accumulation, torch.nn.SyncBatchNorm.convert_sync_batchnorm sees all of them; group and layer "
            "normalisation do not depend on the plan",
            flush=True,
        )


def _warn_of_hooks(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Log hooks of the optimizer's steps that see a part of the model."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if hooks and (plan.zero or plan.tp > 1 or plan.pp > 1):
        names = ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook in hooks)
        print(
            f"clusterd: under {plan} the optimizer's hooks ({names}) see this rank's part of the parameters: what they "
            "compute, an average of the weights for one, may differ from one process",
            flush=True,
        )


def _batch_norm_of(model: torch.nn.Module) -> str | None:
    """Name of the first batch normalisation that computes its statistics; None: there is none."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return next((name for name, part in model.named_modules() if isinstance(part, kind) and part.training), None)
