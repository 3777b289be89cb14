"""Description of a job's model (`plans.model_shape`), found with fake tensors: no memory, no values, no ranks.

Activations are the tensors that autograd saves in a forward pass of one sample. A forward pass with shards in place of
whole tensors shows how tensor parallelism changes them, and which numbers of shards work at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from clusterd.plans.model_shape import BufferShape, LayerShape, ModelShape, ParameterShape
from clusterd.train.data.loader import as_batch, as_pair, check_length
from clusterd.train.data.stream import check_has_position, is_stream
from clusterd.train.inspect.forward import FakeForward
from clusterd.train.inspect.optimizer_traits import optimizer_traits
from clusterd.train.inspect.temporaries import temporaries_ratio
from clusterd.train.inspect.trace import layer_shapes
from clusterd.train.parallel import build
from clusterd.train.parallel.gather import Gathering, gathering
from clusterd.train.parallel.optimizer_slots import OptimizerState, ParameterSpec, optimizer_state
from clusterd.train.parallel.tp_shards import tensor_parallel_cuts
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import NAME, Job
from clusterd.train.process.weighted_means import is_pair, mean_of, split_loss

TP_DEGREES = (2, 3, 4, 6, 8, 12, 16)
UNKNOWN_STATE_RATIO = 2.0


def describe(
    job: Job, *, tp_degrees: Sequence[int] = TP_DEGREES, trace: bool = True, pipeline: bool = True
) -> ModelShape:
    """Describe the model's shape.

    Args:
        tp_degrees: numbers of shards to try.
        trace: count activations and operations too.
        pipeline: check that the named layers are the whole model.
    Raises:
        Refused: `layers` name what the model does not have, or the data set has no pairs.
    """
    check_data(job.data)
    job = _with_one_loss(job)
    # Fake tensors, not the meta device, on which attention takes a different kernel that saves all its scores.
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes as fake, _fake_tensor_log_off(), _fake_copies(), gathering(Gathering()) as seen:
        shape = _described(job, FakeForward(job, fake), tp_degrees, trace, pipeline)
    return replace(shape, gathers=True) if seen.used else shape


def check_data(data: Any) -> None:
    """Check that data are a map-style data set or a stream.

    Raises:
        Refused: they are neither.
    """
    if is_stream(data):
        check_has_position(data)
    else:
        check_length(data)


@contextmanager
def _fake_tensor_log_off() -> Iterator[None]:
    """Silence torch's log of operations that fake tensors cannot run; a failure is a valid result here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _fake_copies() -> Iterator[None]:
    """Copy fake tensors by cloning them: `copy.deepcopy` reads their storage, which has no memory, and may crash."""

    def cloned(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        return memo[id(tensor)]

    FakeTensor.__deepcopy__ = cloned
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


def _described(job: Job, forward: FakeForward, tp_degrees: Sequence[int], trace: bool, pipeline: bool) -> ModelShape:
    model = forward.model()
    paths = build.layer_paths(model, job.layers) if job.layers else build.block_paths(model)
    blocks = set(build.block_paths(model))
    styles, tp_dims, uncut = tensor_parallel_cuts(model, job.tp_plan or {})
    writes = forward.parameter_writes()
    if mutated := next((name for name in writes.names if name in tp_dims), ""):
        styles, tp_dims, uncut = {}, {}, f"the forward pass writes into {mutated}, and may need it whole"
    if writes.sparse in tp_dims:
        styles, tp_dims, uncut = {}, {}, f"the gradient of {writes.sparse} is sparse, which torch cannot cut"
    torchs_own = set(vars(nn.Parameter(torch.empty(()))))  # attributes that make it a fake tensor
    with forward.real():
        trained = [
            ParameterSpec(tuple(p.shape), p.dtype, p.requires_grad, {NAME: name} | _marks(p, torchs_own))
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
    if job.layers:
        weights = dict(zip(paths, build.layer_weights(model, paths), strict=True))
        layers = [replace(layer, weight=weights.get(layer.name, 0)) for layer in layers]
    return ModelShape(
        parameters=parameters,
        layers=tuple(layers),
        global_batch=job.global_batch,
        samples=0 if is_stream(job.data) else len(job.data),
        steps=job.steps,
        precision=job.precision,
        pipeline=bool(job.layers),
        pipeline_refused=(forward.pipeline_refusal(paths) or writes.pipeline_refusal)
        if job.layers and pipeline
        else "",
        tp_plan=bool(job.tp_plan),
        tp_degrees=tuple(works),
        tp_refused=tuple(refused),
        tied=tied,
        loss_bytes=loss_bytes,
        optimizer=optimizer,
        optimizer_elementwise=elementwise,
        optimizer_by_tensor=by_tensor,
        find_unused_parameters=job.find_unused_parameters,
        parts=tuple(job.losses),
        sees_batch=job.sees_batch,
        noncontiguous=next((name for name, p in build.named_parameters(model) if not p.is_contiguous()), ""),
        repeated_block=_repeated(model),
        sparse=writes.sparse,
        written=writes.names,
        written_known=writes.complete,
        written_by_samples=writes.sample_dependent,
        written_anew=writes.not_idempotent,
        hooked=next((name for name, p in build.named_parameters(model) if _has_hooks(p)), ""),
        optimizer_state_ratio=state.ratio if state is not None else UNKNOWN_STATE_RATIO,
        optimizer_temporaries_ratio=temporaries,
        parameter_groups=state.parameter_groups if state is not None else (),
        slots=state.slots if state is not None else (),
        parameter_slots=state.parameter_slots if state is not None else (-1,) * len(parameters),
        odd_slots=state.odd_slots if state is not None else (),
        buffers=tuple(
            BufferShape(build.global_name(name), tuple(b.shape), b.element_size(), build.layer_of(name, paths))
            for name, b in model.named_buffers(remove_duplicate=False)
        ),
    )


def _with_one_loss(job: Job) -> Job:
    """For a description, a job with one loss whose model computes all losses of `job` in a pass."""
    if not job.losses:
        return job

    def all_losses(model: nn.Module, batch: Any) -> list[Any]:
        return [loss(model, batch) for loss in job.losses.values()]

    def factory() -> nn.Module:
        model = job.model()
        model.forward = MethodType(all_losses, model)
        return model

    def total(found: list[Any], _: Any) -> Any:
        one = sum(mean_of(value) for value in found)
        return (one, 1) if any(is_pair(split_loss(value)[0]) for value in found) else one

    def collated(samples: list[Any]) -> Any:
        batch = as_batch(*as_pair(job.collate_fn(samples)))
        return batch, batch

    return replace(job, model=factory, loss=total, collate_fn=collated, layers=(), tp_plan=None)


def _optimizer_state(job: Job, parameters: Sequence[ParameterSpec]) -> OptimizerState | None:
    try:
        return optimizer_state(job.optimizer, parameters, job.scheduler)
    except Refused:
        raise
    except Exception:  # any error of the trial: the optimizer may train, but its state is unknown
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


def _tp_degrees(
    forward: FakeForward,
    styles: dict[str, str],
    tp_dims: dict[str, int],
    parameters: tuple[ParameterShape, ...],
    tied: tuple[tuple[str, ...], ...],
    degrees: Sequence[int],
) -> tuple[list[int], list[tuple[int, str]]]:
    works: list[int] = []
    refused: list[tuple[int, str]] = []
    mutated = next((names for names in tied if any(name in tp_dims for name in names)), ())
    names = {p.name for p in parameters}
    computed = next((name for name in tp_dims if build.global_name(name) not in names), "")
    for degree in degrees if styles else ():
        why = ""
        if mutated:
            why = f"{' and '.join(mutated)} are one parameter, which torch would cut for one of them only"
        elif computed:
            why = f"{computed} is not a parameter but computed from others (weight_norm?); torch cuts parameters only"
        elif uneven := [p for p in parameters if p.tp_dim >= 0 and p.shape[p.tp_dim] % degree]:
            why = f"{uneven[0].name} has {uneven[0].shape[uneven[0].tp_dim]} along dimension {uneven[0].tp_dim}"
        else:
            why = forward.tp_refusal(styles, degree)
        if why:
            refused.append((degree, why))
        else:
            works.append(degree)
    return works, refused
