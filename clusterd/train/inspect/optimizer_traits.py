"""Optimizer traits, found by trial updates of whole and cut matrices: what may be updated separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from clusterd.train.parallel.optimizer_slots import (
    ParameterSpec,
    set_gradient,
    stand_in_optimizer,
    stand_in_shape,
    trial_update,
    without_hooks,
)
from clusterd.train.process.exits import first_line
from clusterd.train.process.job import OptimizerFactory

_SMALL, _LARGE = (8, 6), (256, 192)
"""Shapes of the trial matrices: many optimizers factor or quantise only large ones."""

_GRADIENTS = (1e-3,) * 4 + (1.0,) * 4 + (1e3,) * 4
"""Gradient scale at each update: some optimizers clip, some change after a few updates."""

_STANDING_IN = 3
"""Parameters of each kind whose names and attributes the trial uses: for each half, and for others beside."""

_Trial = tuple[torch.Tensor, torch.Tensor]
"""Values, and gradients of each update."""

_Update = Callable[..., tuple[list[torch.Tensor], torch.optim.Optimizer]]

_DIVISORS = (2, 1), (1, 2), (2, 2), (8, 1), (1, 8)
"""Of the first two dimensions, as plans cut them."""

_LIKE_ANY = ("params", "lr", "initial_lr", "weight_decay")
"""Group options that do not change how elements are treated."""


def optimizer_traits(factory: OptimizerFactory, parameters: Sequence[ParameterSpec] = ()) -> tuple[bool, bool, str]:
    """Traits: elementwise (every element treated alike), by tensor (tensors independent), and the optimizer's name.

    Compares updates of a matrix with the same updates of its halves, alone and together, for each kind of parameter
    that the optimizer distinguishes: it may choose by names and attributes.
    """
    trained = [outline for outline in parameters if outline.trainable]
    try:
        kinds = _kinds(factory, parameters)
        found = [_traits(factory, kind, [other[0] for other in kinds if other is not kind]) for kind in kinds]
    except Exception as error:  # any error of the trial: assume that nothing may be cut
        leaves_out = ", whose factory leaves out parameters that it is given (form groups of all of them),"
        return False, False, f"the optimizer{f' ({first_line(error)})' if _takes_all(factory, trained) else leaves_out}"
    elementwise, by_tensor, names = zip(*found, strict=True)
    if trained and (what := _differs_for_shards(factory, trained)):
        return False, all(by_tensor), f"{names[0]}, whose factory {what},"
    return all(elementwise), all(by_tensor), names[0]


def _takes_all(factory: OptimizerFactory, parameters: Sequence[ParameterSpec]) -> bool:
    """False if the factory makes an optimizer of some of the parameters that it is given."""
    with suppress(Exception):
        optimizer, plain = trial_update(factory, parameters)
        return sum(len(group["params"]) for group in optimizer.param_groups) == len(plain)
    return True


_LOOKS = "looks at sizes or values of parameters (let it look at names or dim())"


def _differs_for_shards(factory: OptimizerFactory, parameters: Sequence[ParameterSpec]) -> str:
    """Reason why a rank's factory, which gets shards, may give parameters other options; empty: it does not."""

    def options(divisors: tuple[int, int], device: str) -> dict[int, str]:
        shapes = (_divided(outline.shape, divisors) for outline in parameters)
        cut = [outline._replace(shape=shape) for outline, shape in zip(parameters, shapes, strict=True)]
        made, plain = stand_in_optimizer(factory, cut, sizes=None, device=device)
        index_of = {id(p): index for index, p in enumerate(plain)}
        values = [repr(sorted((k, v) for k, v in group.items() if k != "params")) for group in made.param_groups]
        return {index_of[id(p)]: v for v, group in zip(values, made.param_groups, strict=True) for p in group["params"]}

    failure = ""
    for device in ("cpu", "cuda"):  # some run on GPUs alone
        try:
            with FakeTensorMode():
                whole = options((1, 1), device)
                return _LOOKS if any(options(cut, device) != whole for cut in _DIVISORS) else ""
        except DataDependentOutputException:
            return _LOOKS
        except Exception as error:
            failure = failure or f"fails for parameters without values ({first_line(error)})"
    return failure


def _divided(shape: tuple[int, ...], divisors: tuple[int, int]) -> tuple[int, ...]:
    return tuple(max(n // by, min(n, 2)) for n, by in zip(shape, (*divisors, *[1] * len(shape)), strict=False))


def _kinds(factory: OptimizerFactory, parameters: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Some parameters of each kind, those with most dimensions first."""
    trainable = [outline for outline in parameters if outline.trainable]
    kinds: dict[str, list[ParameterSpec]] = {}
    try:
        optimizer, plain = trial_update(factory, trainable)
    except Exception:  # the trial may succeed without them
        return [[]]
    outline_of = {id(p): outline for p, outline in zip(plain, trainable, strict=True)}
    for group in optimizer.param_groups:
        values = repr(sorted((k, v) for k, v in group.items() if k not in _LIKE_ANY))
        kinds.setdefault(values, []).extend(outline_of[id(p)] for p in group["params"])
    some = (sorted(outlines, key=lambda outline: -len(outline.shape))[:_STANDING_IN] for outlines in kinds.values())
    return [outlines for outlines in some if outlines] or [[]]


def _traits(
    factory: OptimizerFactory, kind: list[ParameterSpec], beside: list[ParameterSpec]
) -> tuple[bool, bool, str]:
    """Traits for the parameters of one kind; `beside`: one of each other kind."""

    def updated(*tensors: _Trial, first: int = 0) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        named = kind[: _STANDING_IN - 1]
        return _updated(factory, named[first:] or named[-1:], [*kind[_STANDING_IN - 1 :], *beside], *tensors)

    halves = _halves(*_trial(_SMALL), 0)
    together, optimizer = updated(*halves)
    by_tensor = all(_alike(updated(half, first=i)[0][0], together[i]) for i, half in enumerate(halves))
    # The large one last: some optimizers are slow with it, and fail on the small one already.
    elementwise = all(_cuts_are_alike(updated, *_trial(shape)) for shape in (_SMALL, _LARGE))
    return elementwise, by_tensor, type(optimizer).__name__


def _trial(shape: tuple[int, int]) -> _Trial:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        value, *gradients = torch.randn(1 + len(_GRADIENTS), *shape)
    # Uneven, because means and norms over random halves would be nearly equal.
    uneven = torch.outer(*(torch.linspace(1, 3, n) for n in shape))
    updates = [g * uneven.square() * size for g, size in zip(gradients, _GRADIENTS, strict=True)]
    return value * uneven * _GRADIENTS[0], torch.stack(updates)


def _halves(value: torch.Tensor, updates: torch.Tensor, dim: int) -> list[_Trial]:
    return list(zip(value.chunk(2, dim), updates.chunk(2, 1 + dim), strict=True))


def _cuts_are_alike(updated: _Update, value: torch.Tensor, updates: torch.Tensor) -> bool:
    (whole,), _ = updated((value, updates))
    if torch.equal(whole, value.expand_as(whole)):
        return False  # an update that changes nothing shows nothing
    return all(
        _alike(whole, torch.cat([updated(half)[0][0] for half in _halves(value, updates, dim)], 1 + dim))
        for dim in (0, 1)
    )


def _updated(
    factory: OptimizerFactory, named: Sequence[ParameterSpec], beside: Sequence[ParameterSpec], *tensors: _Trial
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Values after each update, under one optimizer.

    Args:
        named: specs whose names and attributes the tensors get; the last one's, if there are more tensors.
        beside: specs of other parameters that an optimizer of several parts needs; their gradients are small, and not
            zero, at which an optimizer that clips by past norms would stand still.
    """
    parameters = [nn.Parameter(value.clone()) for value, _ in tensors]
    others = [nn.Parameter(torch.ones(stand_in_shape(outline.shape))) for outline in beside]
    for index, parameter in enumerate(parameters):
        vars(parameter).update(named[min(index, len(named) - 1)].attributes if named else {})
    for parameter, outline in zip(others, beside, strict=True):
        vars(parameter).update(outline.attributes)
    optimizer = without_hooks(factory([*parameters, *others]))
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], 1e-2)  # tiny updates would compare equal
    after: list[list[torch.Tensor]] = [[] for _ in tensors]
    for now in zip(*(gradients for _, gradients in tensors), strict=True):
        for parameter, gradient in zip(parameters, now, strict=True):
            set_gradient(optimizer, parameter, gradient.clone())
        for parameter in others:
            set_gradient(optimizer, parameter, torch.full_like(parameter, _GRADIENTS[0]))
        optimizer.step()
        for values, parameter in zip(after, parameters, strict=True):
            values.append(parameter.detach().clone())
    return [torch.stack(values) for values in after], optimizer


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, equal_nan=True))  # such large gradients overflow in some optimizers
