"""Forward passes of one sample through fake models: no memory, no values, no ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from clusterd.train.data.loader import as_pair, call, map_batch
from clusterd.train.data.stream import first_samples
from clusterd.train.inspect.operations import OperationRecorder
from clusterd.train.inspect.parameter_mutation import ParameterMutationTracer
from clusterd.train.inspect.tp_gradients import TpGradientTracer
from clusterd.train.inspect.trace import LOSS, CudaAutocast, Trace
from clusterd.train.parallel import build
from clusterd.train.parallel.precision import own_autocast, with_precision
from clusterd.train.parallel.tp_shards import shard_model
from clusterd.train.parallel.tp_styles import GATHERING, ROWWISE
from clusterd.train.process.exits import Refused, first_line
from clusterd.train.process.job import Job
from clusterd.train.process.seeding import seed_everything
from clusterd.train.process.weighted_means import mean_of


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
            casts = own_autocast and self._job.precision == "fp32"
            hint = ': if it is autocast around them, precision="bf16" does the same under every plan' if casts else ""
            return f"the model does more than apply `layers` one after another ({differs}){hint}"
        return ""

    def parameter_writes(self) -> ParameterMutationTracer:
        """Writes into parameters by two forward passes; if fake tensors cannot run the model, until it failed."""
        model, given = self.model(), []

        def note(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                given.append(part)
            return part  # some batches (a PackedSequence) require the same type back

        map_batch((self._inputs, self._target), note)
        writes = ParameterMutationTracer(model, *given)
        with self.real(), torch.random.fork_rng(devices=[]), suppress(Exception), self._fake:
            for _ in range(2):  # some writes happen once, some from the second pass on
                seed_everything(self._job.seed)
                with writes:
                    self._computing(self._loss)(call(self._computing(model), self._inputs), self._target)
            writes.complete = True
        return writes

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
