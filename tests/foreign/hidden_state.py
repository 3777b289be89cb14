"""State that clusterd cannot see, or that one rank alone changes: globals, hooks, callbacks, samplers, data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from tests.foreign.batches import Graded, Numbered, arguments, perceptron, points
from tests.foreign.registry import script

steps_seen = 0


@script()
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


@script(advice="an own loop, `train.session`")
def curriculum_by_callback() -> dict[str, Any]:
    """`on_step` makes the samples harder."""
    data = Graded()

    def harder(step: int, _: Any) -> None:
        data.difficulty = step / 10

    return arguments(data=data, on_step=harder)


@script(advice="an own loop, `train.session`")
def temperature_by_callback() -> dict[str, Any]:
    """`on_step` sets a temperature of the loss."""

    class Loss:
        temperature = 1.0

        def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(out / self.temperature, y)

    loss = Loss()

    def cool(step: int, _: Any) -> None:
        loss.temperature = 1 + step / 5

    return arguments(loss=loss, on_step=cool)


@script(advice="`scheduler`")
def rate_by_callback() -> dict[str, Any]:
    """`on_step` sets the learning rate."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.SGD(parameters, lr=0.1)]
        return made[0]

    def decay(step: int, _: Any) -> None:
        for group in made[0].param_groups:
            group["lr"] = 0.1 / (1 + step)

    return arguments(optimizer=optimizer, on_step=decay)


class Hardest(Sampler[int]):
    """The samples with the largest losses so far first."""

    def __init__(self, losses: torch.Tensor) -> None:
        self.losses = losses

    def __iter__(self) -> Iterator[int]:
        return iter(self.losses.argsort(descending=True, stable=True).tolist())

    def __len__(self) -> int:
        return len(self.losses)


@script()
def hardest_first() -> dict[str, Any]:
    """A sampler that orders an epoch by the losses of the one before."""
    losses = torch.arange(64, dtype=torch.float32)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, batch: Any) -> Any:
            x, index = batch
            return self.layers(x), index

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        logits, index = out
        each = F.cross_entropy(logits, y, reduction="none")
        if torch.is_grad_enabled():
            losses[index] = each.detach()
        return each.mean()

    return arguments(model=Net, loss=loss, data=Numbered(), sampler=Hardest(losses), global_batch=16)


class Replay(Dataset[Any]):
    """Samples that it replaces as it is read."""

    def __init__(self) -> None:
        self.points, self.reads = points(), 0

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = self.points[index]
        return x + 0.01 * self.reads, y


@script(advice="samples that depend on their number")
def data_that_counts() -> dict[str, Any]:
    """A data set whose samples depend on how many were read."""
    return arguments(data=Replay())


@script()
def workers_that_count() -> dict[str, Any]:
    """Data-loader workers with a state of their own."""
    return arguments(data=Replay(), num_workers=2)
