"""Scripts whose comparison ends without a result: a process exits, or has no memory for the whole model."""

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


@script()
def too_large_whole() -> dict[str, Any]:
    """Has no memory for a weight that is not sharded, in any process but the first."""
    first = os.getpid()

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != first and not any(hasattr(p, "placements") for p in self.parameters()):
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    def model() -> nn.Module:
        return nn.Sequential(Net(8, 16), nn.Linear(16, 4))

    return arguments(model=model, layers=["0", "1"], tp_plan={"0": "colwise", "1": "rowwise"})
