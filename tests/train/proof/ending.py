"""A script whose process ends in the middle of a comparison, as one of a library that calls `exit` may."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.foreign.batches import arguments
from tests.foreign.registry import script


@script()
def ends_in_a_group() -> dict[str, Any]:
    """Exits with code 0 in every process but the first that belongs to a group."""
    first = os.getpid()

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if dist.is_initialized() and os.getpid() != first:
                os._exit(0)
            return super().forward(x)

    return arguments(model=lambda: Net(8, 4))
