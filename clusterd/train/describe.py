"""The shape of a job's model (`plans.model_shape`), found out with fake tensors: no memory, no values, no ranks.

Activations are counted by what autograd saves in a forward pass of one sample; what tensor parallelism does to them,
and which numbers of shards work at all, by a forward pass with shards of the tensors in place of the whole ones.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.data import IterableDataset

from clusterd.train import build, losses
from clusterd.train.backward import Following
from clusterd.train.data import nested, pair
from clusterd.train.exits import PlanRefused, first_line
from clusterd.train.job import NAME, Job
from clusterd.train.operations import Operations
from clusterd.train.precision import under
from clusterd.train.shards import Shards
from clusterd.train.slots import OptimizerState, Outline, optimizer_state
from clusterd.train.temporaries import temporaries_ratio
from clusterd.train.tensor_styles import GATHERING, ROWWISE, SPLITTING, WHOLE, styles_in
from clusterd.train.trace import LOSS, Trace, layer_shapes
from clusterd.train.traits import optimizer_traits
from clusterd.train.writes import Writes
from plans.model_shape import BufferShape, LayerShape, ModelShape, ParameterShape

TP_DEGREES = (2, 3, 4, 6, 8, 12, 16)
UNKNOWN_STATE_RATIO = 2.0


def describe(
    job: Job, *, tp_degrees: Sequence[int] = TP_DEGREES, trace: bool = True, pipeline: bool = True
) -> ModelShape:
    """The model's shape.

    Args:
        tp_degrees: numbers of shards to try.
        trace: whether to count activations and operations too.
        pipeline: whether to find out if the named layers are all that the model does.
    Raises:
        PlanRefused: `layers` name what the model does not have, or the data set has no pairs.
    """
    if not hasattr(job.data, "__len__") or isinstance(job.data, IterableDataset):
        raise PlanRefused("data has no length; it must be a map-style data set (__len__ and __getitem__)")
    # Fake tensors, not the meta device: there, attention takes a way of its own and saves all its scores.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _unsaid():
        return _described(job, _Forward(job, fake), tp_degrees, trace, pipeline)


@contextmanager
def _unsaid() -> Iterator[None]:
    """What fake tensors cannot run is an answer here; torch would write a page of where it went wrong for each."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _described(job: Job, forward: _Forward, tp_degrees: Sequence[int], trace: bool, pipeline: bool) -> ModelShape:
    model = forward.model()
    paths = build.layer_paths(model, job.layers) if job.layers else build.block_paths(model)
    blocks = set(build.block_paths(model))
    styles, tp_dims, uncut = _cuts(model, job.tp_plan or {})
    writes, following = forward.passes()
    if torn := next((name for name in writes.names if name in tp_dims), ""):
        styles, tp_dims, uncut = {}, {}, f"the forward pass writes into {torn}, and may want it whole"
    if writes.sparse in tp_dims:
        styles, tp_dims, uncut = {}, {}, f"the gradient of {writes.sparse} is sparse, and torch does not cut such"
    torchs_own = set(vars(nn.Parameter(torch.empty(()))))  # attributes that make it a fake tensor
    with forward.real():
        trained = [
            Outline(tuple(p.shape), p.dtype, p.requires_grad, {NAME: name} | _marks(p, torchs_own))
            for name, p in build.named_parameters(model)
        ]
        elementwise, by_tensor, optimizer = optimizer_traits(job.optimizer, trained)
        state = _optimizer_state(job, trained)
        temporaries = temporaries_ratio(job.optimizer, trained, job.scheduler)
    parameters = tuple(
        ParameterShape(
            name=name,
            shape=tuple(p.shape),
            dtype_bytes=p.element_size(),
            layer=build.layer_of(name, paths),
            trainable=p.requires_grad,
            tp_dim=tp_dims.get(name, -1),
        )
        for name, p in build.named_parameters(model)
    )
    tied = _tied(model)
    works, refused = _tp_degrees(forward, styles, tp_dims, parameters, tied, tp_degrees)
    if uncut:
        refused = [(degree, uncut) for degree in tp_degrees]
    layers, loss_bytes = [LayerShape(path, path in blocks) for path in paths], 0
    if trace and (whole := forward.trace(paths, {}, 1)) is not None:
        halves = forward.trace(paths, styles, works[0]) if works else None
        layers, loss_bytes = layer_shapes(paths, blocks, whole, halves, works[0] if works else 1)
    return ModelShape(
        parameters=parameters,
        layers=tuple(layers),
        global_batch=job.global_batch,
        samples=len(job.data),
        steps=job.steps,
        precision=job.precision,
        pipeline=bool(job.layers),
        pipeline_refused=(forward.why_no_chain(paths) or writes.why_no_pipeline) if job.layers and pipeline else "",
        tp_plan=bool(job.tp_plan),
        tp_degrees=tuple(works),
        tp_refused=tuple(refused),
        tied=tied,
        loss_bytes=loss_bytes,
        optimizer=optimizer,
        optimizer_elementwise=elementwise,
        optimizer_by_tensor=by_tensor,
        find_unused_parameters=job.find_unused_parameters,
        noncontiguous=next((name for name, p in build.named_parameters(model) if not p.is_contiguous()), ""),
        repeated_block=_repeated(model),
        loss=forward.kind_of_loss(),
        gradients_added=following.added,
        gradients_bent=following.bent,
        sparse=writes.sparse,
        written=writes.names,
        written_known=writes.complete,
        written_by_samples=writes.by_samples,
        written_anew=writes.anew,
        hooked=next((name for name, p in build.named_parameters(model) if _has_hooks(p)), ""),
        optimizer_state_ratio=state.ratio if state is not None else UNKNOWN_STATE_RATIO,
        optimizer_temporaries_ratio=temporaries,
        parameter_groups=state.parameter_groups if state is not None else (),
        slots=state.slots if state is not None else (),
        parameter_slots=state.parameter_slots if state is not None else (),
        odd_slots=state.odd_slots if state is not None else (),
        buffers=tuple(
            BufferShape(build.global_name(name), tuple(b.shape), b.element_size(), build.layer_of(name, paths))
            for name, b in model.named_buffers(remove_duplicate=False)
        ),
    )


def _optimizer_state(job: Job, parameters: Sequence[Outline]) -> OptimizerState | None:
    try:
        return optimizer_state(job.optimizer, parameters, job.scheduler)
    except PlanRefused:
        raise
    except Exception:  # whatever an optimizer does not like about being tried: it trains, but its state is not known
        return None


def _repeated(model: nn.Module) -> str:
    first = {id(model.get_submodule(path)): path for path in build.block_paths(model)}
    everywhere = model.named_modules(remove_duplicate=False)
    return next((name for name, module in everywhere if first.get(id(module), name) != name), "")


def _marks(parameter: nn.Parameter, torchs_own: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(parameter).items() if name not in torchs_own}


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(build.global_name(name))
    return tuple(tuple(n) for n in names.values() if len(n) > 1)


def _cuts(model: nn.Module, tp_plan: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int], str]:
    """Styles, cut dimensions, and why there is no tensor parallelism, which rules out no other plan.

    Plans come with models, and have words for what torch does not carry (experts, packed weights).
    """
    try:
        styles = styles_in(tp_plan, model)
        return styles, _tp_dims(model, styles), ""
    except PlanRefused as error:
        return {}, {}, str(error)


def _tp_dims(model: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """The cut dimension of every cut parameter: torch's own rules for Linear and Embedding."""
    dims: dict[str, int] = {}
    for name, word in styles.items():
        module = model.get_submodule(name)
        if word in WHOLE:
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise PlanRefused(f"tp_plan cuts {name!r}, a {type(module).__name__}; torch cuts Linear and Embedding")
        rowwise = word in ROWWISE
        dims[f"{name}.weight"] = int(rowwise) if isinstance(module, nn.Linear) else int(not rowwise)
        if getattr(module, "bias", None) is not None and not rowwise:
            dims[f"{name}.bias"] = 0
    return dims


def _tp_degrees(
    forward: _Forward,
    styles: dict[str, str],
    tp_dims: dict[str, int],
    parameters: tuple[ParameterShape, ...],
    tied: tuple[tuple[str, ...], ...],
    degrees: Sequence[int],
) -> tuple[list[int], list[tuple[int, str]]]:
    works: list[int] = []
    refused: list[tuple[int, str]] = []
    torn = next((names for names in tied if any(name in tp_dims for name in names)), ())
    names = {p.name for p in parameters}
    computed = next((name for name in tp_dims if build.global_name(name) not in names), "")
    for degree in degrees if styles else ():
        why = ""
        if torn:
            why = f"{' and '.join(torn)} are one parameter, and torch would cut it for one of them only"
        elif computed:
            why = f"{computed} is no parameter but computed from others (weight_norm?), and torch cuts parameters"
        elif uneven := [p for p in parameters if p.tp_dim >= 0 and p.shape[p.tp_dim] % degree]:
            why = f"{uneven[0].name} has {uneven[0].shape[uneven[0].tp_dim]} along dimension {uneven[0].tp_dim}"
        else:
            why = forward.why_not(styles, degree)
        if why:
            refused.append((degree, why))
        else:
            works.append(degree)
    return works, refused


class _Forward:
    """Forward passes of one sample through fake models."""

    def __init__(self, job: Job, fake: FakeTensorMode) -> None:
        self._job, self._fake = job, fake
        with self.real():
            self._inputs, self._target = pair(job.collate_fn([job.data[0]]))
        self._inputs, self._target = self._faked(self._inputs), self._faked(self._target)
        self._runs: bool | None = None
        self._last: nn.Module | None = None

    def real(self) -> AbstractContextManager[Any]:
        """Where tensors are real for a while."""
        return unset_fake_temporarily()  # type: ignore[no-any-return]

    def _computing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return under(self._job.precision, "cpu", function)

    def model(self) -> nn.Module:
        """The job's model, without memory."""
        with self.real(), torch.random.fork_rng(devices=[]):
            try:
                with self._fake:
                    model = build.build(self._job.model, self._job.seed)
            except PlanRefused:
                raise
            except Exception:  # some factories compute with what they initialise; that costs memory for a moment
                return self._faked_module(build.build(self._job.model, self._job.seed))
            is_same, self._last = model is self._last, model
            if is_same or not all(isinstance(p, FakeTensor) for p in model.parameters()):
                return _copied(model, is_same)
            return model

    def why_not(self, styles: dict[str, str], degree: int) -> str:
        """Why the model cannot compute, or learn, with shards; empty if it can, or if fake tensors cannot tell."""
        if self._runs is None:
            self._runs = not self._error(self.model())
        if not self._runs:
            return ""
        model = self.model()
        _cut(model, styles, degree)
        shards = Shards(model, styles)
        error = self._error(model, shards)
        if error:
            return f"its forward pass does not work with {degree} shards ({error})"
        return f"shards would not learn alike: {shards.unlike}" if shards.unlike else ""

    def trace(self, paths: list[str], styles: dict[str, str], degree: int) -> Trace | None:
        """The counts of a forward pass; None where fake tensors cannot run the model."""
        model = self.model()
        _cut(model, styles, degree)
        trace = Trace(model)
        for index, path in enumerate(paths):
            layer = model.get_submodule(path)
            layer.register_forward_pre_hook(trace.enter(index))
            layer.register_forward_hook(trace.leave(index))
        for path, word in styles.items():
            if word in GATHERING or word in ROWWISE:
                model.get_submodule(path).register_forward_hook(trace.reduced)
        try:
            with (
                trace.counter,
                trace.casts,
                torch.autograd.graph.saved_tensors_hooks(trace.save, lambda tensor: tensor),
            ):
                outputs = self._computing(model)(self._inputs)
                trace.place = LOSS
                # The graph holds what was saved until here; freed storage would be counted under another's address.
                kept = self._computing(self._job.loss)(outputs, self._target)
            del kept
        except Exception:  # data-dependent code has no answer without values; the description does without counts
            return None
        return trace

    def why_no_chain(self, paths: list[str]) -> str:
        """Why the layers, applied in order, are not the model; empty if they are, or if fake tensors cannot tell."""
        if not (isinstance(self._inputs, torch.Tensor) and isinstance(self._target, torch.Tensor)):
            return "a pipeline takes one tensor as input and one as target, and the data set has others"
        model = self.model()
        try:
            self._operations(model)  # the first pass may do what is done once, as to fill caches
            whole = self._operations(model)
        except Exception:  # the chain would not tell either
            return ""
        stage = build.Stage(model, paths)
        try:
            chain = self._operations(stage)
        except Exception as error:
            return f"`layers`, applied one after another, do not compute ({first_line(error) or type(error).__name__})"
        if whole.recomputes:
            return (
                "the model recomputes by reentrant checkpoints, and torch's pipelines do not: give use_reentrant=False "
                "to torch.utils.checkpoint.checkpoint"
            )
        if (differs := whole.first_beside(chain)) is not None:
            return f"the model does more than to apply `layers` one after another ({differs})"
        return ""

    def passes(self) -> tuple[Writes, Following]:
        """What two passes write into parameters, and what the way back makes of the gradient of the loss.

        Where fake tensors cannot run the model, until they could not.
        """
        model, given = self.model(), []
        nested(
            (self._inputs, self._target), lambda part: given.append(part) if isinstance(part, torch.Tensor) else None
        )
        writes, following = Writes(model, *given), Following()
        with self.real(), torch.random.fork_rng(devices=[]), suppress(Exception), self._fake:
            for _ in range(2):  # some is written once, and some from the second pass on
                build.seed_everything(self._job.seed)
                with writes:
                    loss = self._computing(self._job.loss)(self._computing(model)(self._inputs), self._target)
            writes.complete = True
            following.run(model, loss)
        return writes, following

    def kind_of_loss(self) -> str:
        """As `losses` has it; the mean, as it should be, where that cannot be told."""
        job = self._job
        for count in losses.SAMPLES:
            with suppress(Exception):
                with self.real():
                    inputs, target = pair(job.collate_fn([job.data[i] for i in range(count)]))
                with torch.no_grad():
                    outputs = self.model()(self._faked(inputs))
                if losses.fit(outputs):
                    with self.real():
                        return losses.kind_of(job.loss, outputs, target, count)
        return losses.MEAN

    def _operations(self, module: nn.Module) -> Operations:
        """Of a forward pass; what is drawn in it is drawn alike each time."""
        done = Operations()
        with self.real(), torch.random.fork_rng(devices=[]):
            build.seed_everything(self._job.seed)
            with self._fake, done:
                outputs = self._computing(module)(self._inputs)
        done.end(outputs)
        return done

    def _error(self, model: nn.Module, shards: Shards | None = None) -> str:
        try:
            with shards or nullcontext():
                outputs = self._computing(model)(self._inputs)
            if shards is not None:
                with suppress(Exception), shards:  # one that looks at values has no answer here
                    shards.end(self._computing(self._job.loss)(outputs, self._target))
        except Exception as error:  # whatever a model raises, it does not compute this
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
        return nested(value, lambda part: self._fake.from_tensor(part) if isinstance(part, torch.Tensor) else part)


def _copied(model: nn.Module, is_same: bool) -> nn.Module:
    """Other modules around the same tensors: the script's own are not to be cut.

    Raises:
        PlanRefused: they cannot be copied, and are those that the factory has returned before.
    """
    memo: dict[int, Any] = {id(t): t for tensors in (model.parameters(), model.buffers()) for t in tensors}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever a module does not like about being copied
        if not is_same:
            return model
        raise PlanRefused(
            f"model() returned a module that was made before, which cannot be copied ({first_line(error)}): have "
            "model() make a new one"
        ) from error


def _cut(model: nn.Module, styles: dict[str, str], degree: int) -> None:
    """Puts shards of one rank in place of the whole tensors, and what torch does around them as shapes only."""
    for name, dim in _tp_dims(model, styles).items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, attribute)
        shape = list(parameter.shape)
        shape[dim] //= degree
        setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=parameter.dtype)))
    for path, word in styles.items():
        module = model.get_submodule(path)
        if word in GATHERING:
            module.register_forward_hook(lambda _m, _i, out: torch.cat([out] * degree, dim=-1))
        if word in SPLITTING and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _m, args: (args[0].chunk(degree, dim=-1)[0], *args[1:]))
