"""Mixed precision: forward pass and loss in bfloat16, all state in the model's dtype.

Uses torch's autocast under every plan, FSDP2 included: FSDP2's own policy would round gathered parameters, and losses
of a job would change when it migrates between plans.
"""

from __future__ import annotations

from collections.abc import Callable
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


def with_precision(precision: str, device_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to compute in this precision."""
    if precision == "fp32":
        return function
    computing: Callable[..., Any] = torch.autocast(device_type, dtype_of(precision))(function)
    return computing
