"""Optimizer state of each parameter, found by a trial update on stand-ins of the model's parameters.

An optimizer creates its state only by an update. The factory gets one tensor without values per parameter, of the same
shape and dtype. Where the update depends on values, stand-ins are small, with the same number of dimensions; names,
shapes and sizes of the state then tell those for the real parameter, as far as stand-ins of two sizes agree.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clusterd.plans.model_shape import OddSlot, Slots
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import OptimizerFactory, SchedulerFactory

NEEDS_CLOSURE = (
    "{} computes the loss several times per step (its step() needs a closure), which is not supported: take one "
    "without, or submit the script as a `checkpointable` job"
)
PARTS_HOW_TO = (
    "give `optimizer` and `loss` as dicts with the same keys, the submodules of the model in the order of their "
    "updates: optimizer={'discriminator': ..., 'generator': ...}, loss={'discriminator': lambda model, batch: ..., ...}"
)

_SIZES, _LARGER = (7, 5, 3, 2), (41, 37, 31, 29)
"""Sizes of the stand-ins' dimensions, all different: a slot's shape tells which dimensions it follows."""


class ParameterSpec(NamedTuple):
    """Properties of a parameter that an optimizer may see, except its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    attributes: Mapping[str, Any]  # set by the script


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Fields of `plans.model_shape.ModelShape` that describe the optimizer state."""

    slots: tuple[Slots, ...]
    parameter_slots: tuple[int, ...]
    odd_slots: tuple[OddSlot, ...]
    parameter_groups: tuple[tuple[int, ...], ...]
    ratio: float  # bytes of slots of the parameter's shape per byte of trainable parameter


def optimizer_state(
    factory: OptimizerFactory, parameters: Sequence[ParameterSpec], scheduler: SchedulerFactory | None = None
) -> OptimizerState:
    """Describe the state of an optimizer over the trainable ones of `parameters`.

    Raises:
        Exception: any error of the factory or its optimizer in the trial.
    """
    indices = [i for i, outline in enumerate(parameters) if outline.trainable]
    trained = [parameters[i] for i in indices]
    larger: list[dict[str, torch.Tensor]] = []
    for device in ("cpu", "cuda"):  # some run on GPUs alone
        with suppress(Exception), FakeTensorMode():
            optimizer, stand_ins = trial_update(factory, trained, scheduler, sizes=None, device=device)
            break
    else:
        optimizer, stand_ins = trial_update(factory, trained, scheduler)
        larger = _tensors(*trial_update(factory, trained, scheduler, sizes=_LARGER))
    index_of = {id(parameter): index for index, parameter in zip(indices, stand_ins, strict=True)}
    states = dict(zip(indices, _tensors(optimizer, stand_ins), strict=True))
    shapes = {index: tuple(parameter.shape) for index, parameter in zip(indices, stand_ins, strict=True)}
    elementwise_slots = {
        name
        for i, state in states.items()
        for name, v in state.items()
        if v.numel() > 1 and tuple(v.shape) == shapes[i]
    }
    kinds: dict[Slots, int] = {}
    kind_of_parameter = [-1] * len(parameters)
    odd: list[OddSlot] = []
    for index, state in states.items():
        own_shape = {n: v for n, v in state.items() if n in elementwise_slots and tuple(v.shape) == shapes[index]}
        # Widest dtype first, so that each slot is aligned within a part.
        slots = tuple(sorted(((n, v.element_size()) for n, v in own_shape.items()), key=lambda s: (-s[1], s[0])))
        if slots:
            kind_of_parameter[index] = kinds.setdefault(slots, len(kinds))
        real = parameters[index].shape
        for name, value in sorted(state.items()):
            if name in own_shape or value.numel() <= 1:
                continue
            shape = _full_shape(tuple(value.shape), shapes[index], real)
            if larger:
                other = larger[indices.index(index)].get(name)
                foreseen = _full_shape(tuple(value.shape), shapes[index], stand_in_shape(real, _LARGER))
                if other is None or tuple(other.shape) != foreseen:
                    continue  # its size is not known: checkpoints store what there is
            odd.append(OddSlot(index, name, shape, value.element_size()))
    state_bytes = sum(
        _numel(parameters[i].shape) * b for i in indices for _, b in _slots_of_kind(kinds, kind_of_parameter[i])
    )
    own_bytes = sum(_numel(parameters[i].shape) * parameters[i].dtype.itemsize for i in indices)
    groups = tuple(tuple(index_of[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    return OptimizerState(
        tuple(kinds), tuple(kind_of_parameter), tuple(odd), groups, state_bytes / own_bytes if own_bytes else 0.0
    )


def trial_update(
    factory: OptimizerFactory,
    parameters: Sequence[ParameterSpec],
    scheduler: SchedulerFactory | None = None,
    *,
    sizes: Sequence[int] | None = _SIZES,
    device: str = "cpu",
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Run the first update of an optimizer over stand-ins of `parameters`; gradients stay on them.

    Args:
        scheduler: may add state, as one that cycles momentum does.
        sizes: of the dimensions of stand-ins; None: they are as large as the parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        optimizer, stand_ins = stand_in_optimizer(factory, parameters, sizes=sizes, device=device)
        if scheduler is not None:
            scheduler(optimizer)
        for parameter in stand_ins:
            set_gradient(optimizer, parameter, torch.randn(parameter.shape, device=device).to(parameter.dtype))
        optimizer.step()
    return optimizer, stand_ins


def stand_in_optimizer(
    factory: OptimizerFactory, parameters: Sequence[ParameterSpec], *, sizes: Sequence[int] | None, device: str
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Make an optimizer over stand-ins of `parameters`, without the script's hooks."""
    shapes = [stand_in_shape(each.shape, sizes) if sizes else each.shape for each in parameters]
    stand_ins = [
        nn.Parameter(torch.randn(shape, device=device).to(each.dtype))
        for shape, each in zip(shapes, parameters, strict=True)
    ]
    for parameter, outline in zip(stand_ins, parameters, strict=True):
        vars(parameter).update(outline.attributes)
    return without_hooks(make_optimizer(factory, stand_ins)), stand_ins


def set_gradient(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter a gradient for an update without a backward pass: of sparse rows, where one takes no other."""
    parts = getattr(optimizer, "parts", None)
    every = parts.values() if isinstance(parts, dict) else [optimizer]
    sparse = (g["params"] for one in every if isinstance(one, torch.optim.SparseAdam) for g in one.param_groups)
    is_sparse = any(parameter is p for some in sparse for p in some)
    parameter.grad = gradient.to_sparse(1) if is_sparse else gradient


def without_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Remove the script's hooks from an optimizer of a trial: they keep something of real updates."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        hooks.clear()
    return optimizer


def make_optimizer(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the job's optimizer over `parameters`.

    Raises:
        Refused: it is no optimizer, needs a closure, or has other parameters, whose gradients no plan would reduce.
    """
    optimizer = factory(list(parameters))
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # of Optimizer.__init__
        raise Refused(
            f"optimizer() returned a {type(optimizer).__name__}, which is no torch.optim.Optimizer, or has not called "
            "its __init__: no move and no checkpoint would have its state. Return one, or a list of several for one "
            f"loss. For several losses (a GAN), {PARTS_HOW_TO}"
        )
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        raise Refused(NEEDS_CLOSURE.format(type(optimizer).__name__)) from None
    known = {id(p) for p in parameters}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise Refused(
            "the optimizer has parameters that its factory was not given: form groups of those in its argument (one "
            "named named_parameters has names too), and make parameters of the loss a part of the model"
        )
    return optimizer


def stand_in_shape(shape: tuple[int, ...], sizes: Sequence[int] = _SIZES) -> tuple[int, ...]:
    """Shape of the stand-in for a parameter of this shape."""
    return tuple(1 if n == 1 else sizes[d % len(sizes)] for d, n in enumerate(shape))


def _tensors(optimizer: torch.optim.Optimizer, stand_ins: Sequence[nn.Parameter]) -> list[dict[str, torch.Tensor]]:
    """Tensors that an optimizer keeps for each of its parameters, by slot."""
    states = [optimizer.state.get(parameter, {}) for parameter in stand_ins]
    return [{slot: v for slot, v in state.items() if isinstance(v, torch.Tensor)} for state in states]


def _full_shape(slot: tuple[int, ...], small: tuple[int, ...], real: tuple[int, ...]) -> tuple[int, ...]:
    follows = {s: n for s, n in zip(small, real, strict=True) if s > 1}
    return tuple(follows.get(n, n) for n in slot)


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _slots_of_kind(kinds: dict[Slots, int], number: int) -> Slots:
    return next((slots for slots, n in kinds.items() if n == number), ())
