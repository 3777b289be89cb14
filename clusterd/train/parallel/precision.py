"""Mixed precision: forward pass and loss in bfloat16, all state in the model's dtype.

Uses torch's autocast under every plan, FSDP2 included: FSDP2's own policy would round gathered parameters, and losses
of a job would change when it migrates between plans.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from clusterd.train.process.exits import Refused

PRECISIONS = ("fp32", "bf16")


def check(precision: str) -> None:
    """Check the name of a precision.

    Raises:
        Refused: it is none of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise Refused(f"precision is {precision!r}; it must be {' or '.join(PRECISIONS)}")


def dtype_of(precision: str) -> torch.dtype:
    """Dtype of matrix products."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def rounds_as(precision: str, model: nn.Module) -> str:
    """Precision by whose rounding losses differ: a model may keep its weights in 16 bits."""
    return "bf16" if any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters()) else precision


own_autocast: set[torch.dtype] = set()
"""Types of the autocast contexts that the script has entered in this process."""

_enter = torch.autocast.__enter__


def watch_autocast(*, off: bool = False) -> None:
    """Note the types of the script's own autocast contexts from now on, in `own_autocast`.

    Args:
        off: compute in the types of the inputs instead, and note nothing.
    """
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            own_autocast.add(torch.get_autocast_dtype(kind))
            torch.set_autocast_enabled(kind, not off)
    if off:
        own_autocast.clear()

    def entered(self: Any) -> Any:
        if off:
            self._enabled = False
        elif self._enabled:
            own_autocast.add(self.fast_dtype)
        return _enter(self)

    torch.autocast.__enter__ = entered


def around(device_type: str) -> str:
    """Name of the type of the autocast context in which the caller runs; empty: there is none."""
    enabled = torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if enabled else ""


def again(name: str, device_type: str) -> AbstractContextManager[Any]:
    """The context of which `around` has given the name."""
    context: AbstractContextManager[Any] = torch.autocast(device_type, getattr(torch, name)) if name else nullcontext()
    return context


def with_precision(precision: str, device_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to compute in this precision."""
    if precision == "fp32":
        return function
    computing: Callable[..., Any] = torch.autocast(device_type, dtype_of(precision))(function)
    return computing
