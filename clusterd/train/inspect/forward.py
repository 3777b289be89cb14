"""Forward passes of one sample through fake models: no memory, no values, no ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from clusterd.train.data.loader import as_pair, call, check_sliceable, map_batch
from clusterd.train.data.stream import first_samples
from clusterd.train.inspect import loss_mean
from clusterd.train.inspect.gradient_linearity import GradientLinearityTracer
from clusterd.train.inspect.operations import OperationRecorder
from clusterd.train.inspect.parameter_mutation import ParameterMutationTracer
from clusterd.train.inspect.tp_gradients import TpGradientTracer
from clusterd.train.inspect.trace import LOSS, CudaAutocast, Trace
from clusterd.train.parallel import build
from clusterd.train.parallel.precision import with_precision
from clusterd.train.parallel.tp_shards import shard_model
from clusterd.train.parallel.tp_styles import GATHERING, ROWWISE
from clusterd.train.process.exits import Refused, first_line
from clusterd.train.process.job import Job
from clusterd.train.process.seeding import all_generator_states, generator_states, seed_everything
from clusterd.train.process.weighted_means import is_pair, mean_of, split_loss


class FakeForward:
    """Forward passes of a job's model on its first sample, with whole tensors or shards."""

    def __init__(self, job: Job, fake: FakeTensorMode) -> None:
        self._job, self._fake = job, fake
        with self.real():
            self._inputs, self._target = as_pair(job.collate_fn(first_samples(job.data, 1)))
        self._inputs, self._target = self._faked(self._inputs), self._faked(self._target)
        self._runs: bool | None = None
        self._last: nn.Module | None = None

    def real(self) -> AbstractContextManager[Any]:
        """Context in which tensors are real."""
        return unset_fake_temporarily()  # type: ignore[no-any-return]

    def _computing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return with_precision(self._job.precision, "cpu", function)

    def _loss(self, outputs: Any, target: Any) -> Any:
        return mean_of(self._job.loss(outputs, target))

    def model(self) -> nn.Module:
        """The job's model, without memory."""
        with self.real(), torch.random.fork_rng(devices=[]):
            try:
                with self._fake:
                    model = build.build_model(self._job.model, self._job.seed)
            except Refused:
                raise
            except Exception:  # some factories compute with initial values; building for real costs memory for a moment
                return self._faked_module(build.build_model(self._job.model, self._job.seed))
            is_same, self._last = model is self._last, model
            if is_same or not all(isinstance(p, FakeTensor) for p in model.parameters()):
                return _copied(model, is_same)
            return model

    def tp_refusal(self, styles: dict[str, str], degree: int) -> str:
        """Reason why the model cannot compute or train with shards; empty: it can, or that is unknown."""
        if self._runs is None:
            self._runs = not self._error(self.model())
        if not self._runs:
            return ""
        model = self.model()
        shard_model(model, styles, degree)
        tracer = TpGradientTracer(model, styles)
        error = self._error(model, tracer)
        if error:
            return f"its forward pass fails with {degree} shards ({error})"
        return f"gradients would differ between shards: {tracer.problem}" if tracer.problem else ""

    def trace(self, paths: list[str], styles: dict[str, str], degree: int) -> Trace | None:
        """Counts of a forward pass; None if fake tensors cannot run the model."""
        model = self.model()
        shard_model(model, styles, degree)
        trace = Trace(model)
        for index, path in enumerate(paths):
            layer = model.get_submodule(path)
            layer.register_forward_pre_hook(trace.enter(index))
            layer.register_forward_hook(trace.leave(index))
        for path, style in styles.items():
            if style in GATHERING or style in ROWWISE:
                model.get_submodule(path).register_forward_hook(trace.reduced)
        try:
            with (
                trace.counter,
                trace.casts,
                CudaAutocast() if self._job.precision == "bf16" else nullcontext(),
                torch.autograd.graph.saved_tensors_hooks(trace.save, lambda tensor: tensor),
            ):
                outputs = call(self._computing(model), self._inputs)
                trace.place = LOSS
                # The graph keeps saved tensors alive until here: the address of a freed storage would be reused.
                loss = self._computing(self._loss)(outputs, self._target)
            del loss
        except Exception:  # data-dependent code fails without values; the description then has no counts
            return None
        return trace

    def pipeline_refusal(self, paths: list[str]) -> str:
        """Reason why the layers, applied in order, are not the model; empty: they are, or that is unknown."""
        if not (isinstance(self._inputs, torch.Tensor) and isinstance(self._target, torch.Tensor)):
            return "a pipeline needs one tensor as input and one as target, and the data set has others"
        model = self.model()
        try:
            self._operations(model)  # warm-up: the first pass may fill caches
            whole = self._operations(model)
        except Exception:  # unknown
            return ""
        stage, unsupported = build.Stage(model, paths), []
        for path in paths:
            stage.get_submodule(path).register_forward_hook(
                lambda _m, _i, out, path=path: unsupported.append(path) if not _is_sent(out) else None
            )
        try:
            chain = self._operations(stage)
        except Exception as error:
            return f"`layers`, applied one after another, fail ({first_line(error) or type(error).__name__})"
        if unsupported:
            return f"stages send tensors or tuples of tensors, but {unsupported[0]} returns something else"
        if whole.recomputes:
            return (
                "the model uses reentrant checkpoints, which torch's pipelines do not support: pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        if (differs := whole.first_difference(chain)) is not None:
            return f"the model does more than apply `layers` one after another ({differs})"
        return ""

    def trace_passes(self) -> tuple[ParameterMutationTracer, GradientLinearityTracer, str]:
        """Trace two forward passes and a backward pass.

        Returns:
            Writes into parameters, treatment of the loss gradient, and the name of an attribute that counts passes. If
            fake tensors cannot run the model, the traces end where it failed.
        """
        model, given, fresh = self.model(), [], generator_states()

        def note(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                given.append(part)
            return part  # some batches (a PackedSequence) require the same type back

        map_batch((self._inputs, self._target), note)
        writes, following, before = ParameterMutationTracer(model, *given), GradientLinearityTracer(), _numbers(model)
        with self.real(), torch.random.fork_rng(devices=[]), suppress(Exception), self._fake:
            for _ in range(2):  # some writes happen once, some from the second pass on
                seed_everything(self._job.seed)
                fresh = generator_states()
                with writes:
                    loss = self._computing(self._loss)(call(self._computing(model), self._inputs), self._target)
            writes.complete = True
            following.run(model, loss)
        if not writes.complete:
            writes.draws = writes.draws or self._draws_for_real()
        elif generator_states() != fresh:
            writes.draws = True
        now = _numbers(model)
        return writes, following, next((name for name, number in before.items() if now.get(name) != number), "")

    def _draws_for_real(self) -> bool:
        """True if a real pass draws random numbers; False if unknown, as for a large model."""
        job = self._job
        if sum(p.numel() for p in self.model().parameters()) > loss_mean.PARAMETERS_MAX:
            return False
        with suppress(Exception), self.real(), torch.random.fork_rng(devices=[]):
            inputs, target = as_pair(job.collate_fn(first_samples(job.data, 1)))
            model = build.build_model(job.model, job.seed)
            seed_everything(job.seed)
            before = all_generator_states()
            with torch.no_grad():
                job.loss(call(model, inputs), target)
            return all_generator_states() != before
        return False

    def uncut_batch(self) -> str:
        """Reason why a batch of two samples cannot be cut between them; empty: it can, or that is unknown."""
        job = self._job
        with suppress(Exception), self.real():
            inputs, target = as_pair(job.collate_fn(self._two_samples()))
            try:
                check_sliceable(inputs, 2)
                check_sliceable(target, 2)
            except Refused as refusal:
                return str(refusal)
        return ""

    def _two_samples(self) -> list[Any]:
        with suppress(IndexError):
            return first_samples(self._job.data, 2)
        return first_samples(self._job.data, 1) * 2

    def loss_kind(self) -> str:
        """Kind of the loss, as in `loss_mean`; the mean if unknown, or if the loss returns a sum and its weight."""
        job = self._job

        def loss(outputs: Any, target: Any) -> Any:
            value, _ = split_loss(job.loss(outputs, target))
            if is_pair(value):
                raise TypeError
            return value

        for count in loss_mean.SAMPLES:
            with suppress(Exception):
                with self.real():
                    inputs, target = as_pair(job.collate_fn(first_samples(job.data, count)))
                try:
                    with torch.no_grad():
                        outputs = call(self.model(), self._faked(inputs))
                except Exception:  # code that reads values
                    kind = self._computed_loss_kind(loss, inputs, target, count)
                    return kind if kind != loss_mean.UNKNOWN else loss_mean.MEAN
                if loss_mean.has_scalar(outputs):
                    return self._computed_loss_kind(loss, inputs, target, count)
                if loss_mean.small_enough(outputs):
                    with self.real():
                        return loss_mean.classify_loss(loss, outputs, target, count)
        return loss_mean.MEAN

    def _computed_loss_kind(self, loss: Callable[[Any, Any], Any], inputs: Any, target: Any, samples: int) -> str:
        """Kind of a loss that the model may have computed itself, found with its initial weights."""
        parameters = self.model().parameters()
        if sum(p.numel() for p in parameters) > loss_mean.PARAMETERS_MAX:
            return loss_mean.UNKNOWN
        with self.real():
            model = build.build_model(self._job.model, self._job.seed).eval()
            return loss_mean.classify_computed_loss(lambda i, t: loss(call(model, i), t), inputs, target, samples)

    def loss_uses_parameters(self) -> bool:
        """True if the loss computes with parameters of the model; False if unknown."""
        with suppress(Exception):
            model = self.model()
            with torch.no_grad():
                outputs = call(self._computing(model), self._inputs)
            return loss_mean.depends_on_parameters(
                self._computing(self._loss)(outputs, self._target), model.parameters()
            )
        return False

    def _operations(self, module: nn.Module) -> OperationRecorder:
        """Operations of a forward pass, under the same random numbers each time."""
        done = OperationRecorder()
        with self.real(), torch.random.fork_rng(devices=[]):
            seed_everything(self._job.seed)
            with self._fake, done:
                outputs = call(self._computing(module), self._inputs)
        done.end(outputs)
        return done

    def _error(self, model: nn.Module, tracer: TpGradientTracer | None = None) -> str:
        try:
            with tracer or nullcontext():
                outputs = call(self._computing(model), self._inputs)
            if tracer is not None:
                with suppress(Exception), tracer:  # a loss that reads values fails here
                    tracer.end(self._computing(self._loss)(outputs, self._target))
        except Exception as error:  # any error means that the model cannot compute this
            return first_line(error) or type(error).__name__
        return ""

    def _faked_module(self, model: nn.Module) -> nn.Module:
        fakes: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in fakes:
                        fakes[parameter] = nn.Parameter(
                            self._fake.from_tensor(parameter.detach()), parameter.requires_grad
                        )
                        vars(fakes[parameter]).update(vars(parameter))
                    module._parameters[name] = fakes[parameter]
            for name, buffer in module._buffers.items():
                module._buffers[name] = self._faked(buffer)
        return model

    def _faked(self, value: Any) -> Any:
        return map_batch(value, lambda part: self._fake.from_tensor(part) if isinstance(part, torch.Tensor) else part)


def _numbers(model: nn.Module) -> dict[str, float]:
    """Numeric attributes of all submodules."""
    return {
        build.global_name(f"{path}.{name}" if path else name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _is_sent(outputs: Any) -> bool:
    parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return all(isinstance(part, torch.Tensor) for part in parts)


def _copied(model: nn.Module, is_same: bool) -> nn.Module:
    """Copy the modules around the same tensors, so that the script's own modules stay whole.

    Raises:
        Refused: they cannot be copied, and the factory has returned them before.
    """
    memo: dict[int, Any] = {id(t): t for tensors in (model.parameters(), model.buffers()) for t in tensors}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # any error of a module's copy
        if not is_same:
            return model
        raise Refused(
            f"model() returned the same module again, and it cannot be copied ({first_line(error)}): make a new one "
            "in each call"
        ) from error
