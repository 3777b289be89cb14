"""Random numbers that are the same for every sample, so that a batch and its parts can be compared.

The numbers of a draw differ along its last dimension, that of features, and are spread evenly: wherever the dimension
of samples is, a part of a batch gets what the same samples get within the whole. Where shards have a part of the
features, all numbers of a draw are the same. Dropout within fused kernels is left
out. A permutation is the reverse, not the identity, which would hide that samples are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_STRIDE = (math.sqrt(5) - 1) / 2  # multiples of the golden ratio are spread evenly between 0 and 1


class FixedDraws(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Context in which torch's operations draw fixed numbers.

    Args:
        alike: all numbers of a draw are the same.

    Attributes:
        drawn: shapes of what operations drew, or would have drawn.
        is_free: True if one has drawn numbers that are not fixed.
    """

    def __init__(self, *, alike: bool = False) -> None:
        super().__init__()
        self._alike = alike
        self.drawn: list[Any] = []
        self.is_free = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        arguments, dropout = _without_dropout(function, arguments, options)
        if dropout is not None:
            if dropout:
                self.drawn.append(getattr(arguments[0], "shape", None))
            return function(*arguments, **options)
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*arguments, **options)
        name = function.__name__.partition(".")[0]
        if name == "native_dropout":
            self.drawn.append(arguments[0].shape)
            return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
        if name == "randperm":
            self.drawn.append(arguments[0])
            return function(*arguments, **options).copy_(torch.arange(arguments[0] - 1, -1, -1))
        if name == "multinomial" and arguments[1] <= arguments[0].shape[-1]:
            self.drawn.append(arguments[0].shape)
            return arguments[0].topk(arguments[1]).indices
        result = function(*arguments, **options)
        self.drawn.append(getattr(result, "shape", None))
        draw = _DRAWS.get(name)
        if draw is None or not isinstance(result, torch.Tensor):
            self.is_free = True
            return result
        with torch.no_grad():
            return result.copy_(draw(_even(result, alike=self._alike), *arguments, **options))


def _without_dropout(function: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, bool | None]:
    """Arguments of an operation with no dropout, and whether it had some; None: it has no such argument."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            if place < len(arguments):
                had, arguments = arguments[place], (*arguments[:place], 0.0, *arguments[place + 1 :])
            else:
                had, options[argument.name] = options.get(argument.name, argument.default_value), 0.0
            return arguments, bool(had)
    return arguments, None


def _even(like: torch.Tensor, *, alike: bool) -> torch.Tensor:
    """Numbers between 0 and 1, in double precision, that differ along the last of several dimensions only."""
    count = like.shape[-1] if like.dim() > 1 and not alike else 1
    numbers = torch.frac((torch.arange(count, dtype=torch.float64, device=like.device) + 0.5) * _STRIDE)
    return numbers.expand(like.shape) if like.dim() else numbers[0]


def _normal(even: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2) * torch.erfinv(2 * even - 1)


def _normal_of(even: torch.Tensor, mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any) -> torch.Tensor:
    return _normal(even) * std + mean


def _normal_in_place(even: torch.Tensor, _: Any, mean: float = 0.0, std: float = 1.0, **__: Any) -> torch.Tensor:
    return _normal(even) * std + mean


def _uniform(even: torch.Tensor, _: Any, low: float = 0.0, high: float = 1.0, **__: Any) -> torch.Tensor:
    return even * (high - low) + low


def _bernoulli(even: torch.Tensor, given: torch.Tensor, p: Any = None, **__: Any) -> torch.Tensor:
    return even < (given if p is None else p)


def _bernoulli_in_place(even: torch.Tensor, _: Any, p: Any = 0.5, **__: Any) -> torch.Tensor:
    return even < p


def _integers(even: torch.Tensor, *bounds: Any, **__: Any) -> torch.Tensor:
    numbers = [bound for bound in bounds if isinstance(bound, int)]
    low, high = (0, *numbers)[-2:] if numbers else (0, 2**24)
    return (even * (high - low) + low).floor()


def _exponential(even: torch.Tensor, _: Any, rate: float = 1.0, **__: Any) -> torch.Tensor:
    return -torch.log1p(-even) / rate


_DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "rand": lambda even, *_, **__: even,
    "rand_like": lambda even, *_, **__: even,
    "uniform_": _uniform,
    "uniform": _uniform,
    "randn": lambda even, *_, **__: _normal(even),
    "randn_like": lambda even, *_, **__: _normal(even),
    "normal": _normal_of,
    "normal_": _normal_in_place,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "exponential_": _exponential,
    "exponential": _exponential,
}
"""Numbers of an operation from even ones."""
