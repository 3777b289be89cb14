"""Split proof: the parts into which a plan cuts a batch must train as the whole batch does.

Under the plan itself, with its own collectives, every replica computes the whole of a small batch, which gives what one
process gets; then each computes its part, in its micro-batches. Losses and gradients must agree to rounding. Each is
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clusterd.plans.plan import Plan
from clusterd.train.data.loader import order_of, pair_on_device
from clusterd.train.loop.alternating_step import AlternatingStepper
from clusterd.train.loop.step import Stepper, holders
from clusterd.train.parallel import build
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.parallel.gradient_sync import local_gradient
from clusterd.train.parallel.mesh import check_same_model
from clusterd.train.process import held
from clusterd.train.process.context import Context
from clusterd.train.process.exits import TrainError, UnevenParameterUse
from clusterd.train.process.job import Job
from clusterd.train.process.seeding import generator_states, seed_everything
from clusterd.train.proof.fixed_draws import FixedDraws
from clusterd.train.state.attributes import parts_of_loss
from clusterd.train.state.next_steps import relative_difference

SAMPLES = 8
"""Of the batch, or two for each part."""

PARTS_MAX = 8

ROUNDING, ROUNDING_MAX = 1e-5, 2e-4
"""Relative difference that rounding in float32 makes at least, and at most: where it is measured, by summing in other
orders, it lies between. Equal parts of 100 scripts differed by less than 1e-6. Both grow with the square root of the
rounding error of other types."""

NOISE_TIMES = 20.0
"""Differences count from this multiple of those between two runs of the whole batch on."""

DRAWS_TIMES = 4.0
"""The same for two runs with other random numbers of those that cannot be fixed for each sample: Python's, NumPy's."""

LARGE = 1e4
"""Factor of gradients that are larger than the first ones."""

PASSES = 4
"""Of the same samples in other orders, so that other ones are in a part together: half of the ways to cut eight samples
in two put as many of the hardest four into each part."""


@dataclass(frozen=True)
class Cut:
    """Parts of the batch that a proof compares: contiguous, in the order of replicas and their micro-batches.

    Several micro-batches compute the same part where the plan has more of them. Where replicas take unequal shares of a
    batch, those with more get one sample more in each part.

    Attributes:
        sizes: samples of each part.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, global_batch: int, *, gathers: bool = False, small: bool = False, most: int = 0) -> Cut:
        """Cut of `plan`.

        Args:
            gathers: replicas see each other's samples, so that no two may have the same.
            small: no micro-batch has more samples than in training.
            most: number of samples that there are; 0: enough.
        """
        pieces = plan.dp * plan.accumulation
        parts = pieces
        least = min(plan.shares, default=0)
        more = [int(share > least) for share in plan.shares for _ in range(plan.accumulation)]
        if pieces > PARTS_MAX and not (gathers or any(more)):
            divisors = [n for n in range(2, pieces) if pieces % n == 0]
            parts = max((n for n in divisors if n <= PARTS_MAX), default=min(divisors, default=pieces))
        in_training = max((least // plan.accumulation) if least else global_batch // pieces, 1)
        each = max(in_training // parts, 1) if small else min(max(2, SAMPLES // parts), in_training)
        if most:
            each = max(min(each, (most - sum(more)) // parts), 1)
        return cls(tuple(each + extra for extra in more) if any(more) else (each,) * parts)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Samples of the whole batch."""
        return sum(self.sizes)

    def of_replica(self, plan: Plan, replica: int) -> list[int]:
        """Numbers of the parts that a replica's micro-batches compute."""
        first = replica * plan.accumulation
        return [number % self.parts for number in range(first, first + plan.accumulation)]


@dataclass(frozen=True)
class Verdict:
    """Result of a proof.

    Attributes:
        difference: in words, with numbers; empty: parts train as the whole.
        unclear: why no difference could be shown or ruled out.
        metrics: which further value of the loss is no mean over samples, with numbers.
        repeats: it is unclear because two runs in one process differ.
        draws: random numbers are drawn in a step.
        counts: passes count something up.
        hooks: there are hooks on gradients.
    """

    difference: str = ""
    unclear: str = ""
    metrics: str = ""
    repeats: bool = False
    draws: bool = False
    counts: bool = False
    hooks: bool = False


def cuts(plan: Plan) -> bool:
    """True if a plan cuts the batch."""
    return plan.dp * plan.accumulation > 1


def read_samples(job: Job, cut: Cut) -> list[Any]:
    """Samples of a proof: the first of the job's first batch."""
    order = order_of(job.data, job.global_batch, job.seed, job.sampler)
    return [job.data[int(i)] for i in order.batch(0)[: cut.samples]]


def prove(job: Job, context: Context, device: torch.device, mesh: Any, samples: Sequence[Any], cut: Cut) -> Verdict:
    """Compare the whole of `samples` with its parts under the context's plan; every rank must call it."""
    trial = _Trial(job, context, device, mesh, samples, cut)
    verdict = _proved(trial, cut)
    last = job.steps - PASSES
    others = [(ahead, 1.0) for ahead in (last // 2, last) if verdict.counts and last > 1]
    for ahead, scale in [*others, *([(0, LARGE)] if verdict.hooks else [])]:
        if not (verdict.difference or verdict.unclear) and (other := _proved(trial, cut, ahead, scale)).difference:
            when = f"after {ahead} steps, by what the script counts" if ahead else "where gradients are large"
            return replace(verdict, difference=f"{when}, {other.difference}")
    return verdict


def _proved(trial: _Trial, cut: Cut, ahead: int = 0, scale: float = 1.0) -> Verdict:
    trial.scale = scale
    whole = trial.run(in_parts=False, ahead=ahead)
    parts = trial.run(in_parts=True, reference=whole, ahead=ahead)
    difference = parts.difference(whole)
    if difference.size <= whole.limit:
        return whole.verdict(parts, cut)
    again = trial.noise(whole, (0, 0), ahead)
    if difference.size <= NOISE_TIMES * again:
        return Verdict(unclear=f"two runs of the same samples differ by {again:.0e}", repeats=True, draws=whole.draws)
    if whole.draws_by_sample:
        spread = trial.noise(whole, (1, 2, 3, 4), ahead)
        if difference.size < DRAWS_TIMES * spread:
            return Verdict(unclear=f"random numbers that cannot be fixed change a step by {spread:.0e}", draws=True)
    return Verdict(difference.words(cut), draws=whole.draws)


def measure(
    job: Job, context: Context, device: torch.device, mesh: Any, samples: Sequence[Any], cut: Cut, *, in_parts: bool
) -> Run:
    """One side of the comparison alone, for a process that ends: nothing of the other one can be left in it."""
    return _Trial(job, context, device, mesh, samples, cut).run(in_parts=in_parts)


def judge(whole: Run, again: Sequence[Run], parts: Run, cut: Cut) -> Verdict:
    """Verdict from measurements of a process each, of the whole several times, by the norms of gradients."""
    difference = parts.by_norms(whole).difference(whole)
    noise = max(run.by_norms(whole).difference(whole).size for run in again)
    if difference.size <= whole.limit:
        return whole.verdict(parts, cut)
    if difference.size <= NOISE_TIMES * noise:
        return Verdict(unclear=f"two runs of the same samples differ by {noise:.0e}", draws=whole.draws)
    return Verdict(difference.words(cut), draws=whole.draws)


class Unclear(TrainError):
    """A proof can show nothing about this script; the message says why."""


@dataclass(frozen=True)
class _Difference:
    size: float
    what: str  # differs
    whole: float
    parts: float
    later: bool  # only once a forward pass has left something for the next

    def words(self, cut: Cut) -> str:
        after = "after an earlier forward pass, " if self.later else ""
        numbers = f"{self.whole:.6g} of {cut.samples} samples, {self.parts:.6g} of their {cut.parts} parts"
        text = f"{after}{self.what} is {numbers}"
        if relative_difference(self.parts * cut.parts, self.whole) < ROUNDING_MAX and self.what == "the loss":
            return f"{text}: it is their sum, not their mean"
        return text


@dataclass(frozen=True)
class Run:
    """Results of the passes of one run, the same on all ranks.

    Attributes:
        losses: by pass and loss of the job.
        metrics: further values of the losses in the first pass.
        norms: of each gradient in the last pass, by loss and parameter.
        apart: norm of the difference of each from the reference.
        rounding: of the type with the largest rounding error in the model.
        draws, draws_by_sample: random numbers are drawn, by any library, or by one whose numbers cannot be fixed.
        counts: passes count something up.
        hooks: there are hooks on gradients.
    """

    losses: dict[tuple[int, str], float]
    metrics: dict[str, float]
    norms: dict[tuple[str, str], float]
    apart: dict[tuple[str, str], float]
    rounding: float = 0.0
    draws: bool = False
    draws_by_sample: bool = False
    counts: bool = False
    hooks: bool = False

    @property
    def limit(self) -> float:
        """Relative difference that rounding explains."""
        scale = math.sqrt(self.rounding / torch.finfo(torch.float32).eps)
        return scale * min(ROUNDING_MAX, max(ROUNDING, NOISE_TIMES * self.spread))

    def verdict(self, parts: Run, cut: Cut) -> Verdict:
        """Verdict where the parts agree with this whole."""
        metrics = _metric_difference(self, parts, self.limit, cut)
        return Verdict(metrics=metrics, draws=self.draws, counts=self.counts, hooks=self.hooks)

    def by_norms(self, reference: Run) -> Run:
        """The same with the differences of norms in place of the norms of differences."""
        keys = self.norms.keys() | reference.norms.keys()
        return replace(self, apart={k: abs(self.norms.get(k, 0.0) - reference.norms.get(k, 0.0)) for k in keys})

    @property
    def spread(self) -> float:
        """Largest difference between passes over the same samples in another order."""
        first = {part: loss for (number, part), loss in self.losses.items() if number == 0}
        return max(relative_difference(loss, first[part]) for (_, part), loss in self.losses.items())

    def difference(self, whole: Run) -> _Difference:
        """The largest difference."""
        found = [
            _Difference(
                relative_difference(self.losses[key], one), _loss_name(key[1]), one, self.losses[key], key[0] > 0
            )
            for key, one in whole.losses.items()
        ]
        first = [each for each in found if not each.later and each.size > ROUNDING_MAX]
        largest = max(whole.norms.values(), default=0.0) or 1.0
        for key, apart in self.apart.items():
            what = f"the norm of the gradient of {key[1]}"
            size = apart / largest if math.isfinite(apart) else math.inf
            found.append(_Difference(size, what, whole.norms.get(key, 0.0), self.norms.get(key, 0.0), False))
        return max(first or found, key=lambda each: each.size)


class _Trial:
    """Runs of one process, which ends with them.

    Attributes:
        scale: of the gradients.
    """

    def __init__(
        self, job: Job, context: Context, device: torch.device, mesh: Any, samples: Sequence[Any], cut: Cut
    ) -> None:
        self._job, self._context, self._device, self._mesh = job, context, device, mesh
        self._samples, self._cut = samples, cut
        self._model: nn.Module | None = None  # of the run before
        self._gradients: dict[tuple[str, str], torch.Tensor] = {}
        self._rounding = torch.finfo(torch.float32).eps
        self._counters: dict[str, tuple[float, float]] | None = None  # first value, and what each pass adds
        self.scale, self._hooks = 1.0, False
        for kind in ("register_hook", "register_post_accumulate_grad_hook"):
            setattr(torch.Tensor, kind, self._noticing(getattr(torch.Tensor, kind)))

    def run(self, *, in_parts: bool, reference: Run | None = None, seed: int = 0, ahead: int = 0) -> Run:
        """Make the passes on a new model.

        Args:
            reference: the first run, from whose gradients the differences are measured.
            seed: of the random numbers that are not fixed.
            ahead: passes that counters have counted before.
        """
        plan, coordinates = self._context.plan, self._context.coordinates
        if not in_parts:
            plan = replace(plan, accumulation=1, schedule="gpipe" if plan.pp > 1 else plan.schedule)
        drawing, draws_by_sample = FixedDraws(), False
        losses: dict[tuple[int, str], torch.Tensor] = {}
        found = Run({}, {}, {}, {})
        metrics: dict[str, tuple[float, float]] = {}
        model = build.build_model(self._job.model, self._job.seed)
        if model is self._model:
            raise Unclear("model() returns the same module in each call")
        self._model = model
        places = self._places(model)
        self._set_counters(places, ahead)
        counted = [_read(places)]
        check_same_model(model, self._device)
        with _fixed_statistics([model, self._job.loss, *self._job.losses.values()]):
            stepper, parallel = self._stepper(model, plan, in_parts)
            for number in range(PASSES):
                seed_everything(seed)
                before = generator_states()
                with drawing:
                    batch: tuple[Any, Any] = (None, None)
                    if stepper.wants_inputs:
                        batch = self._batch(number, in_parts, coordinates.replica)
                    for part, update, value in _unless_frozen(stepper.gradients(*batch), parallel):
                        losses[number, part] = value
                        if number == 0:
                            metrics |= update.own_metrics()
                        if number == PASSES - 1:
                            self._measure(found, part, parallel, in_parts, keeps=reference is None)
                draws_by_sample = draws_by_sample or generator_states() != before
                counted.append(_read(places))
            parallel.drop_buckets()
        if self._counters is None:
            self._counters = _counters(counted)
        draws_by_sample = draws_by_sample or drawing.is_free
        hooks = self._hooks or any(module._backward_hooks for module in model.modules())
        drew = draws_by_sample or drawing.drawn, draws_by_sample, bool(self._counters), hooks
        totals = torch.stack([value.double() for value in losses.values()]).to(self._device)
        if dist.is_initialized():
            dist.all_reduce(totals)
        found.losses.update(zip(losses, totals.tolist(), strict=True))
        return self._summed(found, metrics, drew)

    def noise(self, whole: Run, seeds: Sequence[int], ahead: int) -> float:
        """The largest difference of further runs of the whole: a single one may come close to it by chance."""
        runs = (self.run(in_parts=False, reference=whole, seed=seed, ahead=ahead) for seed in seeds)
        return max(run.difference(whole).size for run in runs)

    def _noticing(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(*arguments: Any, **options: Any) -> Any:
            self._hooks = True
            return register(*arguments, **options)

        return registered

    def _places(self, model: nn.Module) -> dict[str, tuple[Any, Any]]:
        """Places of numbers that passes may count up: of modules, the loss, what they hold and read; buffers of one."""
        job = self._job
        losses = parts_of_loss(job.losses or job.loss)
        roots: dict[str, object] = {f"(loss).{name}": part for name, part in losses.items()}
        roots |= dict(model.named_modules())
        found = held.places(roots | held.script_globals([*roots.values(), job.loss]))
        buffers = {f"(buffer) {n}": (b, ...) for n, b in model.named_buffers() if b.numel() == 1 and not b.is_complex()}
        return found | buffers

    def _set_counters(self, places: dict[str, tuple[Any, Any]], ahead: int) -> None:
        for name, (first, each) in (self._counters or {}).items():
            holder, key = places.get(name, (None, None))
            if isinstance(holder, torch.Tensor):
                holder.fill_(first + each * ahead)
            elif holder is not None:
                held.put(holder, key, first + each * ahead)

    def _stepper(self, model: nn.Module, plan: Plan, in_parts: bool) -> tuple[Stepper, ParallelModel]:
        job, coordinates = self._job, self._context.coordinates
        types = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._rounding = max([self._rounding, *(torch.finfo(t).eps for t in types)])
        if plan.pp > 1:
            model = build.Stage(model, build.stage_paths(model, job.layers, plan.pp)[coordinates.stage])
        parallel = ParallelModel(
            model,
            plan,
            self._device,
            mesh=self._mesh,
            tp_plan=job.tp_plan,
            find_unused_parameters=job.find_unused_parameters,
            alternates=bool(job.losses),
        )
        shares = (self._cut.samples,) * plan.dp
        if in_parts:
            sizes = self._cut.sizes
            shares = tuple(sum(sizes[n] for n in self._cut.of_replica(plan, r)) for r in range(plan.dp))
        options: dict[str, Any] = {
            "coordinates": coordinates,
            "shares": shares,
            "clip_norm": None,
            "each_whole": not in_parts,
        }
        optimizer: Any = _NoOptimizer(parallel)
        if job.losses:
            losses = {part: self._scaled(loss) for part, loss in job.losses.items()}
            return AlternatingStepper(parallel, optimizer, None, losses, **options), parallel
        return Stepper(parallel, optimizer, None, self._scaled(job.loss), **options), parallel

    def _scaled(self, loss: Any) -> Any:
        def scaled(*arguments: Any) -> Any:
            return _with_scale(loss(*arguments), self.scale)

        return scaled if self.scale != 1 else loss

    def _batch(self, number: int, in_parts: bool, replica: int) -> tuple[Any, Any]:
        """Batch of this replica in a pass: all samples, or the parts of its micro-batches, one after another."""
        samples = list(self._samples)
        if number:
            random.Random(number).shuffle(samples)
        if in_parts:
            ends = list(itertools.accumulate(self._cut.sizes))
            parts = [samples[end - size : end] for end, size in zip(ends, self._cut.sizes, strict=True)]
            samples = [sample for n in self._cut.of_replica(self._context.plan, replica) for sample in parts[n]]
        return pair_on_device(self._job.collate_fn(samples), self._device)

    def _measure(self, found: Run, part: str, parallel: ParallelModel, in_parts: bool, *, keeps: bool) -> None:
        """Squares of this rank's part of each gradient, and of its distance from the reference."""
        for name, parameter in parallel.parameters:
            if parameter.grad is None:
                continue
            gradient = local_gradient(parameter).detach()
            if not (in_parts or parallel.averages):  # each replica has added the gradient of the whole
                gradient = gradient / parallel.plan.dp
            there = self._gradients.get((part, name))
            copies = holders(parameter, parallel.plan)
            found.norms[part, name] = _square(gradient) / copies
            found.apart[part, name] = _square(gradient if there is None else gradient - there) / copies
            if keeps:
                self._gradients[part, name] = gradient.clone()
        for key, there in self._gradients.items():
            if key[0] == part and key not in found.norms:
                found.norms[key], found.apart[key] = 0.0, _square(there)  # no gradient in this run

    def _summed(self, own: Run, own_metrics: dict[str, tuple[float, float]], drew: tuple[bool, ...]) -> Run:
        """The run of all ranks: norms over what each of them holds."""
        every: list[Any] = [(own_metrics, own.norms, own.apart, drew)]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, (own_metrics, own.norms, own.apart, drew))
        metrics: dict[str, list[float]] = {}
        norms: dict[tuple[str, str], float] = {}
        apart: dict[tuple[str, str], float] = {}
        for values, squares, distances, _ in every:
            for name, (total, weight) in values.items():
                entry = metrics.setdefault(name, [0.0, 0.0])
                entry[0], entry[1] = entry[0] + total, entry[1] + weight
            for key, square in squares.items():
                norms[key] = norms.get(key, 0.0) + square
                apart[key] = apart.get(key, 0.0) + distances[key]
        return Run(
            own.losses,
            {name: total / weight for name, (total, weight) in metrics.items() if weight},
            {key: math.sqrt(square) for key, square in norms.items()},
            {key: math.sqrt(square) for key, square in apart.items()},
            self._rounding,
            *(any(each[-1][which] for each in every) for which in range(len(drew))),
        )


class _NoOptimizer:
    """In place of an optimizer: a proof changes no parameter."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel

    def zero_grad(self) -> None:
        for _, parameter in self._parallel.parameters:
            parameter.grad = None


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
    values = {n: h.item() if isinstance(h, torch.Tensor) else h.get(k) for n, (h, k) in places.items()}
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


def _metric_difference(whole: Run, parts: Run, limit: float, cut: Cut) -> str:
    for name, value in whole.metrics.items():
        if relative_difference(value, parts.metrics.get(name, math.nan)) > limit:
            numbers = f"{value:.6g} of {cut.samples} samples as a whole, {parts.metrics.get(name, math.nan):.6g} as the"
            return f"{name} is {numbers} mean of their {cut.parts} parts"
    return ""


def _loss_name(part: str) -> str:
    return f"the loss of {part}" if part else "the loss"


def _square(tensor: torch.Tensor) -> float:
    """Square of the 2-norm."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=torch.float64).square()) if values.numel() else 0.0
