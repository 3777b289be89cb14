"""State of scripts that clusterd cannot see: counters in globals, averages kept by hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.foreign.batches import arguments, perceptron
from tests.foreign.registry import script

steps_seen = 0


@script(advice="`session.register`, or an attribute of a module")
def counter_in_a_global() -> dict[str, Any]:
    """A weight of the loss that falls with a counter in a global variable."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        global steps_seen
        if torch.is_grad_enabled():
            steps_seen += 1
        return F.cross_entropy(out, y) / (1 + 0.2 * steps_seen)

    return arguments(loss=loss)


average: dict[int, torch.Tensor] = {}


@script(advice="`session.register`, or a buffer of the model")
def average_by_a_hook() -> dict[str, Any]:
    """An average of the weights, kept by a hook of the optimizer in a global variable, to which the loss pulls."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            before = average.setdefault(number, parameter.detach().clone())
            average[number] = before.lerp(parameter.detach(), 0.1)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_post_hook(follow)
        return made

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pull = sum((v.sum() * 0.01 for v in average.values()), torch.zeros(()))
        return F.cross_entropy(out, y) + pull * out.mean()

    return arguments(model=model, optimizer=optimizer, loss=loss)
