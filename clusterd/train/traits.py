"""Which parts of a model an optimizer may update apart: found by trying it on matrices, whole and cut."""

from __future__ import annotations

import torch
from torch import nn

from clusterd.train.job import OptimizerFactory

_SMALL, _LARGE = (8, 6), (256, 192)
"""Of the matrices that optimizers are tried on: many factor, or quantise, only what is large."""

_GRADIENTS = (1e-3,) * 4 + (1.0,) * 4 + (1e3,) * 4
"""How large they are at each update: some optimizers clip, and some begin with something after a few updates."""

_Trial = tuple[torch.Tensor, torch.Tensor]
"""Values, and gradients of each update."""


def optimizer_traits(factory: OptimizerFactory) -> tuple[bool, bool, str]:
    """Whether every element is treated alike, whether every tensor is by itself, and the optimizer's name.

    Found by trying: updates of a matrix against the same updates of its halves, alone and beside each other.
    """
    try:
        halves = _halves(*_trial(_SMALL), 0)
        together, optimizer = _updated(factory, *halves)
        by_tensor = all(
            _alike(_updated(factory, half)[0][0], other) for half, other in zip(halves, together, strict=True)
        )
        # The large one last: some take their time with it, and are found out before.
        elementwise = all(_cuts_are_alike(factory, *_trial(shape)) for shape in (_SMALL, _LARGE))
    except Exception:  # whatever an optimizer does not like about being tried, it is not to be cut
        return False, False, "the optimizer"
    return elementwise, by_tensor, type(optimizer).__name__


def _trial(shape: tuple[int, int]) -> _Trial:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        value, *gradients = torch.randn(1 + len(_GRADIENTS), *shape)
    # No half is like the other: means and norms over random numbers are, the more of them the more.
    uneven = torch.outer(*(torch.linspace(1, 3, n) for n in shape))
    updates = [g * uneven.square() * size for g, size in zip(gradients, _GRADIENTS, strict=True)]
    return value * uneven * _GRADIENTS[0], torch.stack(updates)


def _halves(value: torch.Tensor, updates: torch.Tensor, dim: int) -> list[_Trial]:
    return list(zip(value.chunk(2, dim), updates.chunk(2, 1 + dim), strict=True))


def _cuts_are_alike(factory: OptimizerFactory, value: torch.Tensor, updates: torch.Tensor) -> bool:
    (whole,), _ = _updated(factory, (value, updates))
    return all(
        _alike(whole, torch.cat([_updated(factory, half)[0][0] for half in _halves(value, updates, dim)], 1 + dim))
        for dim in (0, 1)
    )


def _updated(factory: OptimizerFactory, *tensors: _Trial) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """The values after each update, one after another, under one optimizer."""
    parameters = [nn.Parameter(value.clone()) for value, _ in tensors]
    optimizer = factory(list(parameters))
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], 1e-2)  # updates too small to be seen would all look alike
    after: list[list[torch.Tensor]] = [[] for _ in tensors]
    for now in zip(*(gradients for _, gradients in tensors), strict=True):
        for parameter, gradient in zip(parameters, now, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for values, parameter in zip(after, parameters, strict=True):
            values.append(parameter.detach().clone())
    return [torch.stack(values) for values in after], optimizer


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, equal_nan=True))  # gradients this large are too much for some
