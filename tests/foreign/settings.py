"""Settings of training: clipping, schedules, precision, compilation, layers of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.foreign.batches import arguments, perceptron, points
from tests.foreign.registry import script


@script("dp=2,accumulation=2")
def clipped_one_cycle() -> dict[str, Any]:
    """Gradient clipping, `OneCycleLR`."""
    return arguments(
        clip_norm=0.5,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=1000),
    )


@script(tolerance=1e-2)
def bf16() -> dict[str, Any]:
    """`precision="bf16"`; equal to 1e-2."""
    return arguments(precision="bf16")


@script(tolerance=5e-2)
def bf16_weights() -> dict[str, Any]:
    """Weights and samples in bfloat16; equal to 5e-2."""
    x, y = points().tensors
    return arguments(model=lambda: perceptron().bfloat16(), data=TensorDataset(x.bfloat16(), y))


@script()
def compiled() -> dict[str, Any]:
    """`torch.compile` of the model."""
    return arguments(model=lambda: torch.compile(perceptron()))


@script("pp=2,accumulation=2")
def sequential_layers() -> dict[str, Any]:
    """`nn.Sequential` with `layers` for a pipeline."""
    return arguments(layers=("0", "1", "2", "3", "4"))


class Shared(nn.Module):
    """An output layer that shares the weight of the embedding, and a part that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.rare(hidden) if x.mean() > 0.05 else self.second(hidden)


@script(advice="`find_unused_parameters=True`")
def unused_at_times() -> dict[str, Any]:
    """A branch on the values of the batch."""
    return arguments(model=Shared)
