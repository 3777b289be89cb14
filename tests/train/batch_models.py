"""Models whose output depends on other samples of a forward pass, or on what a process has seen before."""

from __future__ import annotations

from typing import Any

import torch
from model import GPT
from torch import nn
from torch.nn import functional as F

from clusterd import train


class Centring(GPT):
    """Subtracts the mean over the samples of each pass, without a normalisation module."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean((0, 1)),))


class Echoing(GPT):
    """Adds the features of the pass before, which each process has of its own samples."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._before: list[torch.Tensor] = []
        self.head.register_forward_pre_hook(self._add)

    def _add(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        mean = inputs[0].mean((0, 1))
        self._before, before = [mean.detach()], self._before
        return inputs[0] + before[0] if before else inputs[0]


class _Scaled(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """The identity, whose gradient depends on the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * len(gradient)


class Stretching(GPT):
    """Has right losses, and gradients of the blocks that grow with the share of a process."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.register_forward_pre_hook(lambda _, x: (_Scaled.apply(x[0]),))


class Dropping(GPT):
    """With dropout before the head."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.drop = nn.Dropout(0.3)
        self.head.register_forward_pre_hook(lambda _, x: (self.drop(x[0]),))


class Normalising(GPT):
    """With batch normalisation before the head."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.norm = nn.BatchNorm1d(sizes["width"])
        self.head.register_forward_pre_hook(lambda _, x: (self.norm(x[0].transpose(1, 2)).transpose(1, 2),))


class Queueing(GPT):
    """Keeps the features of the last global batch in a buffer, as MoCo keeps its negatives."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("queue", torch.zeros(8, sizes["width"]))
        self.head.register_forward_pre_hook(self._enqueue)

    def _enqueue(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        before = self.queue.mean(0)
        self.queue = train.gather(inputs[0].detach().mean(1))
        return inputs[0] + before


MODELS = {
    "queueing": Queueing,
    "centring": Centring,
    "echoing": Echoing,
    "stretching": Stretching,
    "dropping": Dropping,
    "normalising": Normalising,
}


def contrastive(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Of the two halves of each sample, among those of all samples."""
    first, second = (F.normalize(train.gather(half.mean(1)), dim=1) for half in logits.chunk(2, 1))
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def of_a_number(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Gathers what has no samples."""
    return train.gather(logits.mean())


LOSSES = {"contrastive": contrastive, "of a number": of_a_number}
