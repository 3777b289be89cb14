"""Optimizers and models whose replicas could go ways of their own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tests.foreign.batches import arguments, perceptron
from tests.foreign.registry import script


class Langevin(torch.optim.SGD):
    """Adds noise to each update."""

    def __init__(self, parameters: Any, generator: torch.Generator | None = None) -> None:
        super().__init__(parameters, lr=0.1)
        self.own = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn(parameter.shape, generator=self.own), alpha=0.01)


@script()
def noisy_updates() -> dict[str, Any]:
    """Noise of torch's generator in the optimizer's update."""
    return arguments(optimizer=Langevin)


@script()
def updates_by_entropy() -> dict[str, Any]:
    """Noise of a generator seeded by the process in the optimizer's update."""
    return arguments(optimizer=lambda p: Langevin(p, torch.Generator().manual_seed(os.getpid())))


@script()
def buffer_by_entropy() -> dict[str, Any]:
    """A buffer from entropy of its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()
            self.register_buffer("directions", torch.randn(8, 8, generator=torch.Generator().manual_seed(os.getpid())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x @ self.directions)

    return arguments(model=Net)
