"""Split proof: the parts into which a plan cuts a model and a batch must train as the whole does.

Where a plan cuts the model, each rank computes a small batch with the whole model, as one process does, and all ranks
compute it together, with the plan's own collectives. Where it cuts the batch, every replica computes the whole of it
under the plan; then each computes its part, in its micro-batches. Losses and gradients must agree to rounding. Each is
done several times in a row, with the samples in other orders, so that what a forward pass leaves behind for the next
one (a queue, a running mean) counts too.

Nothing about the script is assumed, and nothing is read in it. Random numbers are fixed (`fixed_draws`), and batch
normalisation computes with fixed statistics: that it sees a replica's samples is known, and told. What still differs
between two runs of the whole batch is noise, and no difference below its multiple counts.

Numbers that each pass counts up (a counter of calls, a weight that grows) are then set as they will be in the middle
and at the end of training, and the same is compared again: a script may look at the batch from some step on. And
where there are hooks, gradients are enlarged: a hook may clip only what is large.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from clusterd.plans.plan import Coordinates, Plan
from clusterd.train.data.loader import order_of, pair_on_device
from clusterd.train.loop.alternating_step import AlternatingStepper
from clusterd.train.loop.evaluation import outputs_of
from clusterd.train.loop.peers import is_peer_loss
from clusterd.train.loop.step import Stepper, holders
from clusterd.train.parallel import build
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.gradient_sync import local_gradient, local_tensor
from clusterd.train.parallel.mesh import check_same_model
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.parallel.precision import own_autocast
from clusterd.train.process import held
from clusterd.train.process.context import Context
from clusterd.train.process.exits import PlanRefused, TrainError, UnevenParameterUse, classify_error, first_line
from clusterd.train.process.job import Job
from clusterd.train.process.seeding import generator_states, preserved_generators, seed_everything
from clusterd.train.proof.bends import Bends, Call, shifts_of
from clusterd.train.proof.cuts import BATCH, MODEL, PASSES, Cut, Side, Sides, choose_samples
from clusterd.train.proof.fixed_draws import FixedDraws
from clusterd.train.proof.results import DRAWS_TIMES, EVALUATION, NOISE_TIMES, OF_WRITES, UPDATE, Run, Verdict, differs
from clusterd.train.state.attributes import parts_of_loss
from clusterd.train.state.local_shards import box_of

LARGE = 1e4
"""Factor of gradients that are larger than the first ones."""


READS_MAX, READS_S = 512, 2.0
"""Samples among which those of a proof are chosen, and the time after which no more than it needs are read."""


def read_samples(job: Job, cut: Cut) -> list[Any]:
    """Samples of a proof: of one batch of the first epoch, those that differ most, or the first that there are."""
    order, started = order_of(job.data, job.global_batch, job.seed, job.sampler), time.monotonic()
    batches = max(len(job.data) // job.global_batch, 1)
    each = max(min(job.global_batch, READS_MAX // 2), cut.samples)
    read: list[list[Any]] = []
    is_late = False
    with preserved_generators(), held.preserved(job.data):
        for number in range(0, batches, -(-batches // max(READS_MAX // each, 1))):
            read.append([])
            for index in order.batch(number)[:each]:
                read[-1].append(job.data[int(index)])
                if (is_late := time.monotonic() > started + READS_S) and len(read[0]) >= cut.samples:
                    break
            if is_late:
                break
    return choose_samples([batch for batch in read if len(batch) >= cut.samples] or read, cut.samples)


def prove(
    job: Job, context: Context, device: torch.device, mesh: Any, samples: Sequence[Any], cut: Cut, *, sides: Sides
) -> Verdict:
    """Compare two sides of `samples` under the context's plan; every rank must call it."""
    trial = _Trial(job, context, device, mesh, samples, cut, sides)
    verdict = _proved(trial)
    last = job.steps - PASSES
    others = [(ahead, 1.0) for ahead in (last // 2, last) if verdict.counts and last > 1]
    for ahead, scale in [*others, *([(0, LARGE)] if verdict.hooks else [])]:
        if not (differs(verdict) or verdict.unclear):
            other = _proved(trial, ahead, scale)
            when = f"after {ahead} steps, by what the script counts" if ahead else "where gradients are large"
            if other.difference:
                verdict = replace(verdict, difference=f"{when}, {other.difference}")
            if other.of_model:
                verdict = replace(verdict, of_model=f"{when}, {other.of_model}")
    if sides == BATCH and not (differs(verdict) or verdict.unclear) and (name := trial.find_bends()):
        other = _proved(trial)
        when = f"with a mean over the samples at the bound of {name}()"
        if other.difference:
            verdict = replace(verdict, difference=f"{when}, {other.difference}")
    return verdict


def _proved(trial: _Trial, ahead: int = 0, scale: float = 1.0) -> Verdict:
    trial.scale, sides = scale, trial.sides
    whole = trial.run(sides[0], ahead=ahead)
    try:
        parts = trial.run(sides[1], reference=whole, ahead=ahead)
    except Exception as error:
        if is_peer_loss(error) or classify_error(error, where="") is not None:
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:  # a pipeline stage wraps the error
            cause = cause.__cause__
        what = f"{type(cause).__name__}: {first_line(cause)}"
        raise PlanRefused(f"{trial.plan} fails where {_LESS[sides]} does not: {what}") from error
    difference = parts.difference(whole)
    if difference.size <= whole.limit:
        if parts.leaves_other(whole) and trial.run(sides[0], reference=whole, ahead=ahead).leaves_other(whole):
            parts = replace(parts, left=None)  # it is another one in each run: a time, an identity
        return whole.verdict(parts, trial.cut, sides)
    again = trial.noise(whole, sides[0], (0, 0), ahead)
    if difference.size <= NOISE_TIMES * again:
        return Verdict(unclear=f"two runs of the same samples differ by {again:.0e}", repeats=True, draws=whole.draws)
    if whole.draws_by_sample:
        spread, agree = trial.other_draws(whole, ahead)
        if agree or difference.size < DRAWS_TIMES * spread:
            size = max(spread, agree * difference.size)
            return Verdict(unclear=f"random numbers that cannot be fixed change a step by {size:.0e}", draws=True)
    found = difference.verdict(trial.cut, sides, draws=whole.draws)
    return replace(found, difference=f"{found.difference}; {OF_WRITES}") if trial.writes and found.difference else found


_LESS = {MODEL: "one process", BATCH: "the whole batch"}
"""Name of the first side, for messages."""


def measure(
    job: Job,
    context: Context,
    device: torch.device,
    mesh: Any,
    samples: Sequence[Any],
    cut: Cut,
    *,
    sides: Sides,
    which: int,
) -> Run:
    """One side of a comparison alone, for a process that ends: nothing of the other one can be left in it."""
    return _Trial(job, context, device, mesh, samples, cut, sides).run(sides[which])


class Unclear(TrainError):
    """A proof can show nothing about this script; the message says why."""


class _Trial:
    """Runs of one process, which ends with them.

    Attributes:
        scale: of the gradients.
        writes: passes change trainable parameters.
    """

    def __init__(
        self,
        job: Job,
        context: Context,
        device: torch.device,
        mesh: Any,
        samples: Sequence[Any],
        cut: Cut,
        sides: Sides,
    ) -> None:
        self._job, self._context, self._device, self._mesh = job, context, device, mesh
        self._samples, self.cut, self.sides, self.plan = samples, cut, sides, context.plan
        self._draws: list[Any] = []  # of the reference
        self._evaluates = sides == MODEL and (job.evaluate is not None or job.own_loop)
        self._left: dict[str, torch.Tensor] = {}  # by the passes of the reference
        self._model: Callable[[], nn.Module | None] = lambda: None  # of the run before, whose memory it need not keep
        self._gradients: dict[tuple[str, str], torch.Tensor] = {}
        # Whole gradients of a model that is sharded for its size have no place in the host's memory.
        self._by_norms = sides == MODEL and self.plan.tp * self.plan.pp == 1
        self._rounding = torch.finfo(torch.float32).eps
        self._counters: dict[str, tuple[float, float]] | None = None  # first value, and what each pass adds
        self.scale, self._hooks, self.writes = 1.0, False, False
        self._calls: dict[Side, list[Call]] = {}  # of functions with a bend, in the first pass of each side
        self._shifts: dict[int, torch.Tensor] = {}
        for kind in ("register_hook", "register_post_accumulate_grad_hook"):
            setattr(torch.Tensor, kind, self._noticing(getattr(torch.Tensor, kind)))

    def run(self, side: Side, *, reference: Run | None = None, seed: int = 0, ahead: int = 0) -> Run:
        """Make the passes on a new model.

        Args:
            reference: the first run, from whose gradients the differences are measured.
            seed: of the random numbers that are not fixed.
            ahead: passes that counters have counted before.
        """
        plan, coordinates = self.plan, self._context.coordinates
        if side is Side.ALONE:
            plan, coordinates = Plan(), Coordinates(0, 0, 0)
        elif side is Side.WHOLE:
            plan = replace(plan, accumulation=1, schedule="gpipe" if plan.pp > 1 else plan.schedule)
        drawing, draws_by_sample = FixedDraws(alike=self.sides == MODEL), False
        losses: dict[tuple[int, str], torch.Tensor] = {}
        found = Run({}, {}, {}, {})
        metrics: dict[str, tuple[float, float]] = {}
        model = build.build_model(self._job.model, self._job.seed)
        if model is self._model():
            raise Unclear("model() returns the same module in each call")
        self._model = weakref.ref(model)
        places = self._places(model)
        self._set_counters(places, ahead)
        counted, kept = [_read(places)], {name: _version(value) for name, value in self._kept(model).items()}
        check_same_model(model, self._device)
        with _fixed_statistics([model, self._job.loss, *self._job.losses.values()]):
            stepper, parallel, optimizer = self._stepper(model, plan, coordinates, side)
            trainable = [(p, p._version) for _, p in parallel.parameters if p.requires_grad]
            # What the last pass of one process leaves behind is of no other one.
            for number in range(PASSES + (side is Side.ALONE and not self._by_norms)):
                seed_everything(seed)
                before = generator_states()
                bends = Bends(self._shifts, len(self._calls.get(Side.WHOLE, ())))
                with drawing, bends if self._shifts or (number == 0 and side not in self._calls) else nullcontext():
                    batch: tuple[Any, Any] = (None, None)
                    if stepper.wants_inputs:
                        batch = self._batch(number, side, coordinates.replica)
                    for part, update, value in _unless_frozen(stepper.gradients(*batch), parallel):
                        if number < PASSES:
                            losses[number, part] = value
                        if number == 0:
                            metrics |= update.own_metrics()
                        if number == PASSES - 1:
                            self._measure(found, part, self._gradients_of(parallel, side), parallel, side, reference)
                self._calls.setdefault(side, bends.seen)
                if (states := generator_states()) != before:
                    draws_by_sample = True
                    drawing.drawn.append(states)
                counted.append(_read(places))
                if number < PASSES:
                    drawn = list(drawing.drawn)
            left = self._compare_left(model, kept, reference) if self.sides == BATCH else None
            self.writes = self.writes or any(p._version != version for p, version in trainable)
            parallel.drop_buckets()
            seed_everything(seed)
            with drawing:
                if self._evaluates:
                    losses[0, EVALUATION] = self._evaluated(stepper, parallel, side)
            if not self._job.losses:
                self._measure(found, UPDATE, self._updates(parallel, optimizer), parallel, side, reference)
        if self._counters is None:
            self._counters = _counters(counted)
        draws_by_sample = draws_by_sample or drawing.is_free
        hooks = self._hooks or any(module._backward_hooks for module in model.modules())
        draws = bool(drawing.drawn)
        if reference is None:
            self._draws = drawn
        elif side is Side.WHOLE and coordinates.stage == 0:  # the first stage has the random numbers of one process
            draws = drawn != self._draws
        drew = draws, draws_by_sample, bool(self._counters), hooks
        totals = torch.stack([value.double() for value in losses.values()]).to(self._device)
        if dist.is_initialized():
            dist.all_reduce(totals)
        found.losses.update(zip(losses, totals.tolist(), strict=True))
        made = self._summed(replace(found, left=left), metrics, drew)
        return made.by_norms(reference) if self._by_norms and reference is not None else made

    def find_bends(self) -> str:
        """Let runs from here on have means over the samples at bends of functions; the name of one, if there is any."""
        whole, own = self._calls[Side.WHOLE], self._calls[Side.PARTS]
        coordinates, numbers = self._context.coordinates, []
        for place, number in enumerate(self.cut.of_replica(self.plan, coordinates.replica)):
            numbers.append((self.cut.sizes[number], own[place * len(whole) : (place + 1) * len(whole)]))
        every = self._gathered((coordinates.stage, numbers))
        parts = [part for stage, each in every if stage == coordinates.stage for part in each]
        self._shifts = shifts_of(whole, parts)
        names: list[str] = self._gathered(whole[min(self._shifts)][0] if self._shifts else "")
        return max(names)

    def noise(self, whole: Run, side: Side, seeds: Sequence[int], ahead: int) -> float:
        """The largest difference of further runs of a side: a single one may come close to it by chance."""
        runs = (self.run(side, reference=whole, seed=seed, ahead=ahead) for seed in seeds)
        return max(run.difference(whole).size for run in runs)

    def other_draws(self, whole: Run, ahead: int) -> tuple[float, bool]:
        """The largest difference that other random numbers make, and True if with some of them both sides agree."""
        spread, agree = 0.0, False
        for seed in (1, 2, 3, 4):
            other, parts = (self.run(side, reference=whole, seed=seed, ahead=ahead) for side in self.sides)
            spread = max(spread, other.difference(whole).size)
            agree = agree or parts.by_norms(other).difference(other).size <= whole.limit
        return spread, agree

    def _noticing(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(*arguments: Any, **options: Any) -> Any:
            self._hooks = True
            return register(*arguments, **options)

        return registered

    def _roots(self, model: nn.Module) -> dict[str, object]:
        losses = parts_of_loss(self._job.losses or self._job.loss)
        roots: dict[str, object] = {f"(loss).{name}": part for name, part in losses.items()}
        roots |= dict(model.named_modules())
        return roots | held.script_globals([*roots.values(), self._job.loss])

    def _places(self, model: nn.Module) -> dict[str, tuple[Any, Any]]:
        """Places of numbers that passes may count up: of modules, the loss, what they hold and read; buffers of one."""
        found = held.places(self._roots(model))
        buffers = {f"(buffer) {n}": (b, ...) for n, b in model.named_buffers() if b.numel() == 1 and not b.is_complex()}
        return found | buffers

    def _kept(self, model: nn.Module) -> dict[str, Any]:
        """Tensors and plain values that passes may leave: buffers, and attributes of modules, the loss and helpers."""
        found: dict[str, Any] = dict(model.named_buffers())
        for name, owner in held.owners(self._roots(model)).items():
            parts = {held.path(name, attribute): value for attribute, value in owner.attributes.items()}
            found |= {at: v for at, v in parts.items() if isinstance(v, torch.Tensor) or held.is_plain(v)}
        return found

    def _compare_left(
        self, model: nn.Module, before: dict[str, Any], reference: Run | None
    ) -> tuple[float, str, float, float] | None:
        """Largest difference from what the passes of the reference have left: its size, its name, and both norms."""
        now = {name: value for name, value in self._kept(model).items() if _version(value) != before.get(name)}
        left = {name: numbers for name, value in now.items() if (numbers := _numbers(value)) is not None}
        if reference is None:
            self._left = left
        sizes = {name: float(torch.linalg.vector_norm(numbers)) for name, numbers in left.items()}
        found = []
        for name, there in self._left.items():
            here, whole = left.get(name), float(torch.linalg.vector_norm(there))
            if here is not None and here.shape == there.shape:
                apart = float(torch.linalg.vector_norm(here - there)) / max(whole, sizes[name], 1e-12)
                found.append((apart, name, whole, sizes[name]))
        return max(found, default=None)

    def _set_counters(self, places: dict[str, tuple[Any, Any]], ahead: int) -> None:
        for name, (first, each) in (self._counters or {}).items():
            holder, key = places.get(name, (None, None))
            if isinstance(holder, torch.Tensor):
                holder.fill_(first + each * ahead)
            elif holder is not None:
                held.put(holder, key, first + each * ahead)

    def _stepper(
        self, model: nn.Module, plan: Plan, coordinates: Coordinates, side: Side
    ) -> tuple[Stepper, ParallelModel, RankOptimizer]:
        job = self._job
        types = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._rounding = max([self._rounding, *(torch.finfo(t).eps for t in types)])
        if plan.pp > 1:
            model = build.stage_of(model, job.layers, plan, coordinates.stage)
        parallel = ParallelModel(
            model,
            plan,
            self._device,
            mesh=self._mesh,
            tp_plan=job.tp_plan,
            find_unused_parameters=job.find_unused_parameters,
            alternates=bool(job.losses),
        )
        shares = (self.cut.samples,) * (self._context.world_size if side is Side.ALONE else plan.dp)
        if side is Side.PARTS:
            sizes = self.cut.sizes
            shares = tuple(sum(sizes[n] for n in self.cut.of_replica(plan, r)) for r in range(plan.dp))
        options: dict[str, Any] = {
            "coordinates": coordinates,
            "shares": shares,
            "clip_norm": None,
            "each_whole": side is not Side.PARTS,
        }
        optimizer = RankOptimizer(parallel, job.optimizer)  # which may update by hooks of gradients
        if job.losses:
            losses = {part: self._scaled(loss) for part, loss in job.losses.items()}
            return AlternatingStepper(parallel, optimizer, None, losses, **options), parallel, optimizer
        return Stepper(parallel, optimizer, None, self._scaled(job.loss), **options), parallel, optimizer

    def _scaled(self, loss: Any) -> Any:
        def scaled(*arguments: Any) -> Any:
            return _with_scale(loss(*arguments), self.scale)

        return scaled if self.scale != 1 else loss

    def _batch(self, number: int, side: Side, replica: int) -> tuple[Any, Any]:
        """Batch of this replica in a pass: all samples, or the parts of its micro-batches, one after another."""
        samples = list(self._samples)
        if number == PASSES:
            samples = samples[:1] * len(samples)
        elif number:
            random.Random(number).shuffle(samples)
        if side is Side.PARTS:
            ends = list(itertools.accumulate(self.cut.sizes))
            parts = [samples[end - size : end] for end, size in zip(ends, self.cut.sizes, strict=True)]
            samples = [sample for n in self.cut.of_replica(self.plan, replica) for sample in parts[n]]
        return pair_on_device(self._job.collate_fn(samples), self._device)

    def _evaluated(self, stepper: Stepper, parallel: ParallelModel, side: Side) -> torch.Tensor:
        """This rank's part of the norm of the output in evaluation mode; zero: the model has none for these inputs."""
        inputs, _ = self._batch(0, Side.WHOLE, 0)
        parallel.module.eval()
        coordinates, ranks = self._context.coordinates, self._context.world_size
        stage = 0 if side is Side.ALONE else coordinates.stage
        try:
            with torch.no_grad():
                outputs = outputs_of(parallel, stepper.stage_forward, stage, inputs)
        except Exception:
            if side is Side.WHOLE:
                raise
            self._evaluates = False
            return torch.zeros((), device=self._device)
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        size = math.sqrt(sum(_square(leaf) for leaf in leaves))
        if side is Side.ALONE:
            return torch.tensor(size / ranks, device=self._device)
        # The buffers of evaluations are those of replica 0.
        reports = coordinates.shard == coordinates.replica == 0 and coordinates.stage == self.plan.pp - 1
        return torch.tensor(size * reports, device=self._device)

    def _gradients_of(self, parallel: ParallelModel, side: Side) -> Iterator[torch.Tensor | None]:
        """This rank's part of the gradient of each parameter."""
        for _, parameter in parallel.parameters:
            gradient = None if parameter.grad is None else local_gradient(parameter).detach()
            if gradient is not None and side is Side.WHOLE and not parallel.averages:
                gradient = gradient / parallel.plan.dp  # each replica has added the gradient of the whole
            yield gradient

    def _updates(self, parallel: ParallelModel, optimizer: RankOptimizer) -> Iterator[torch.Tensor | None]:
        """This rank's part of the update of each parameter by the gradients of the reference, where it keeps them.

        Torch's own optimizers read nothing else; others may read what passes leave.
        """
        holder = optimizer.holder
        holder._optimizer_step_post_hooks.clear()  # what they keep, as averages, is of the whole, then of parts
        if type(holder).__module__.startswith("torch.") and not holder._optimizer_step_pre_hooks:
            return
        before = [local_tensor(parameter.detach()).clone() for _, parameter in parallel.parameters]
        for name, parameter in parallel.parameters:
            if parameter.grad is not None and (there := self._reference("", name, parameter)) is not None:
                local_gradient(parameter).copy_(there)
        seed_everything(0)
        optimizer.step()
        for old, (_, parameter) in zip(before, parallel.parameters, strict=True):
            yield local_tensor(parameter.detach()) - old

    def _reference(self, part: str, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of what the reference has for a parameter."""
        there = self._gradients.get((part, name))
        if there is not None and there.shape != local_tensor(parameter.detach()).shape:  # of the whole model
            there = there[tuple(slice(low, high) for low, high in box_of(parameter))]
        return None if there is None else there.to(parameter.device)

    def _measure(
        self,
        found: Run,
        part: str,
        values: Iterable[torch.Tensor | None],
        parallel: ParallelModel,
        side: Side,
        reference: Run | None,
    ) -> None:
        """Squares of this rank's part of each gradient, or update, and of its distance from the reference."""
        for (name, parameter), gradient in zip(parallel.parameters, values, strict=False):
            there = self._reference(part, name, parameter)
            if reference is None and not self._by_norms and gradient is not None:
                self._gradients[part, name] = gradient.to("cpu" if side is Side.ALONE else gradient.device, copy=True)
            apart = gradient if there is None else there if gradient is None else gradient - there
            if apart is not None:
                copies = self._context.world_size if side is Side.ALONE else holders(parameter, parallel.plan)
                found.norms[part, name] = 0.0 if gradient is None else _square(gradient) / copies
                found.apart[part, name] = _square(apart) / copies

    def _gathered(self, own: Any) -> list[Any]:
        every: list[Any] = [own]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
        return every

    def _summed(self, own: Run, own_metrics: dict[str, tuple[float, float]], drew: tuple[bool, ...]) -> Run:
        """The run of all ranks: norms over what each of them holds."""
        every = self._gathered((own_metrics, own.norms, own.apart, own.left, drew))
        metrics: dict[str, list[float]] = {}
        norms: dict[tuple[str, str], float] = {}
        apart: dict[tuple[str, str], float] = {}
        for values, squares, distances, *_ in every:
            for name, (total, weight) in values.items():
                entry = metrics.setdefault(name, [0.0, 0.0])
                entry[0], entry[1] = entry[0] + total, entry[1] + weight
            for key, square in squares.items():
                norms[key] = norms.get(key, 0.0) + square
                apart[key] = apart.get(key, 0.0) + distances[key]
        draws, by_sample, counts, hooks = (any(each[-1][which] for each in every) for which in range(4))
        return Run(
            own.losses,
            {name: total / weight for name, (total, weight) in metrics.items() if weight},
            {key: math.sqrt(square) for key, square in norms.items()},
            {key: math.sqrt(square) for key, square in apart.items()},
            max([self._rounding, *(torch.finfo(each).eps for each in own_autocast)]),
            draws,
            by_sample,
            counts,
            hooks,
            max((each[-2] for each in every if each[-2] is not None), default=None),
        )


@contextmanager
def _fixed_statistics(parts: Sequence[Any]) -> Iterator[None]:
    """Let batch normalisation compute with fixed statistics; a synchronised one has those of the whole batch anyway."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    norms = [m for m in modules if isinstance(m, kind) and not isinstance(m, nn.SyncBatchNorm) and m.training]
    for norm in norms:
        norm.eval()
        if norm.running_mean is None:
            norm.running_mean, norm.running_var = torch.zeros(norm.num_features), torch.ones(norm.num_features)
    yield
    for norm in norms:
        norm.train()


def _unless_frozen(gradients: Iterator[Any], parallel: ParallelModel) -> Iterator[Any]:
    """The same gradients; where the model has frozen parameters meanwhile, steps find what that means for a plan."""
    try:
        yield from gradients
    except UnevenParameterUse:
        if parallel.newly_frozen():
            raise Unclear("the model freezes parameters in one of the first passes") from None
        raise


class _Scale(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


def _with_scale(value: Any, scale: float) -> Any:
    """Result of a loss, with gradients of another size."""
    if isinstance(value, torch.Tensor):
        return _Scale.apply(value, scale)
    if isinstance(value, Mapping):
        return {**value, "loss": _with_scale(value["loss"], scale)}
    return (_with_scale(value[0], scale), *value[1:]) if isinstance(value, tuple) else value


def _read(places: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Numbers in places, by name."""
    own = {n: place for n, place in places.items() if not isinstance(place[0], build.Elsewhere)}
    values = {n: h.item() if isinstance(h, torch.Tensor) else h.get(k) for n, (h, k) in own.items()}
    return {n: v for n, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _counters(passes: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Numbers to which each pass has added the same: the first value, and what is added."""
    found = {}
    for name in set(passes[0]).intersection(*passes[1:]):
        values = [numbers[name] for numbers in passes]
        added = values[1] - values[0]
        if added and all(math.isclose(b - a, added, rel_tol=1e-6) for a, b in itertools.pairwise(values)):
            found[name] = values[0], added
    return found


def _version(value: Any) -> Any:
    """Mark that differs for another tensor, or content of one, or another plain value."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)


def _numbers(value: Any) -> torch.Tensor | None:
    """The numbers of a tensor or a plain value; None: it has others."""
    if isinstance(value, torch.Tensor):
        is_plain = not (value.device.type == "meta" or value.is_complex() or hasattr(value, "placements"))
        return value.detach().double().cpu() if is_plain and value.layout == torch.strided else None
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, (int, float))]
    return torch.tensor(leaves, dtype=torch.float64) if leaves else None


def _square(tensor: torch.Tensor) -> float:
    """Square of the 2-norm."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square()) if values.numel() else 0.0
