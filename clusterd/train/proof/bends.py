"""Bends of functions at a mean over the samples, which may count only later in training.

``(loss - 0.3).abs()`` or ``kl.mean().clamp(min=1)`` of the mean over a batch is straight as long as all means lie on
one side of the bound: parts of the batch then train as the whole does. Once the loss has fallen they do not. So a
comparison notes the arguments of such functions, and is made again with means over the samples at the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NUMBERS_MAX = 4096
"""Of an argument that is noted: a mean over samples is small."""

AT_ZERO = {"abs", "absolute", "relu"}
AT_BOUNDS = {"clamp", "clip", "clamp_min", "clamp_max"}
COMPARED = {"gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"}
LARGER = {"maximum", "minimum", "max", "min", "fmax", "fmin"}

Call = tuple[str, Any, torch.Tensor | None]
"""Name of a function, shape of its argument, and what this lacks to the bend; None: not noted."""


class Bends(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Context that notes arguments of functions with a bend.

    Args:
        shifts: added to the argument of calls, by their number in a forward pass.
        calls: of a forward pass.

    Attributes:
        seen: calls, in order.
    """

    def __init__(self, shifts: Mapping[int, torch.Tensor], calls: int) -> None:
        super().__init__()
        self._shifts, self._calls, self.seen = shifts, calls, list[Call]()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = getattr(function, "__name__", "")
        if name == "item" and _is_plain(arguments[0]):
            return _Read(function(*arguments), self.note)
        bend = _bend(name, arguments, options)
        if bend is not None:
            value = arguments[0]
            lacks = (bend - value.detach()).detach() if value.numel() <= NUMBERS_MAX and not self._shifts else None
            if (shift := self.note(name, value.shape, lacks)) is not None:
                arguments = (value + shift.to(value), *arguments[1:])
        return function(*arguments, **options)

    def note(self, name: str, shape: Any, lacks: torch.Tensor | None) -> torch.Tensor | None:
        """Note a call; return what is to be added to its argument."""
        shift = self._shifts.get(len(self.seen) % self._calls) if self._shifts else None
        self.seen.append((name, tuple(shape), None if lacks is None else lacks.double().cpu()))
        return shift


def _comparison(name: str) -> Any:
    """Comparison of a `_Read`, which notes it."""
    plain = getattr(float, f"__{name}__")

    def compare(self: _Read, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return plain(self, other)
        shift = self.note(name, (), torch.tensor(float(other) - float(self), dtype=torch.float64))
        return plain(float(self) + (0.0 if shift is None else shift.item()), other)

    return compare


class _Read(float):
    """Number that a script has read from a tensor, whose comparisons are noted too."""

    note: Callable[..., torch.Tensor | None]
    __gt__, __lt__, __ge__, __le__ = map(_comparison, ("gt", "lt", "ge", "le"))

    def __new__(cls, value: float, note: Callable[..., torch.Tensor | None]) -> _Read:
        made = super().__new__(cls, value)
        made.note = note
        return made

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _bend(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Value at which a function of its first argument has a bend; None: it has none, or no plain tensor."""
    if name not in _BENT or not arguments or not _is_plain(arguments[0]):
        return None
    rest = [*arguments[1:], *options.values()]
    bend = 0.0 if name in AT_ZERO else next((one for one in rest if one is not None), None)
    if isinstance(bend, torch.Tensor):
        return bend.detach() if _is_plain(bend) and bend.numel() in (1, arguments[0].numel()) else None
    return bend if isinstance(bend, (int, float)) and name not in LARGER else None  # beside max a number is a dimension


def _is_plain(value: Any) -> bool:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return type(value) in (torch.Tensor, nn.Parameter) and value.is_floating_point() and not is_wrapped(value)


_BENT = AT_ZERO | AT_BOUNDS | COMPARED | LARGER


def shifts_of(whole: Sequence[Call], parts: Sequence[tuple[int, Sequence[Call]]]) -> dict[int, torch.Tensor]:
    """Shifts that move means over the samples to the bends of the functions that get them, by number of the call.

    Args:
        whole: calls of a forward pass over the whole batch.
        parts: number of samples of each of its parts, and the calls of a forward pass over it.
    """
    if any(len(calls) != len(whole) for _, calls in parts):
        return {}  # a pass makes other calls, by what it gets
    found, samples = {}, sum(size for size, _ in parts)
    for number, (name, shape, lacks) in enumerate(whole):
        own = [calls[number][2] for _, calls in parts if calls[number][:2] == (name, shape)]
        values = [value for value in own if value is not None]
        if lacks is None or len(values) < len(parts):
            continue
        mean = sum(value * size for value, (size, _) in zip(values, parts, strict=True)) / samples
        apart = torch.stack([value - lacks for value in values]).abs().amax(0)
        is_mean = bool(((mean - lacks).abs() <= 1e-3 * apart + 1e-6 * lacks.abs()).all())
        if is_mean and bool((apart > 1e-5 * lacks.abs() + 1e-9).any()):
            found[number] = lacks + 0.1 * apart  # not quite there, where rounding would choose the side
    return found
