"""Mixed precision: forward pass and loss in bfloat16, parameters, gradients and optimizer state as the model has them.

By torch's autocast under every plan, FSDP2 included: its own policy would round what is gathered, and a job that moves
between plans would compute other losses before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clusterd.train.process.exits import Refused

PRECISIONS = ("fp32", "bf16")


def check(precision: str) -> None:
    """Refuses what is no precision.

    Raises:
        Refused: naming those that there are.
    """
    if precision not in PRECISIONS:
        raise Refused(f"precision is {precision!r}; it can be {' or '.join(PRECISIONS)}")


def dtype_of(precision: str) -> torch.dtype:
    """In which products are computed."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def with_precision(precision: str, device_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, computing in that precision."""
    if precision == "fp32":
        return function
    computing: Callable[..., Any] = torch.autocast(device_type, dtype_of(precision))(function)
    return computing
