"""Models that change as they train, and models that torch builds in special ways."""

from __future__ import annotations

from typing import Any

import torch
from model import GPT
from torch import nn


class Thawing(GPT):
    """A block becomes trainable in the third step."""

    TRAINS = False

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.steps = 0
        self.blocks[0].requires_grad_(self.TRAINS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            self.blocks[0].requires_grad_(not self.TRAINS)
        return super().forward(tokens)


class Freezing(Thawing):
    """A block is frozen in the third step."""

    TRAINS = True


class Remembering(GPT):
    """Adds the embedding of the previous pass, a buffer that exists from the first pass on."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.register_buffer("before", None)
        self.embed.register_forward_hook(self._add)

    @staticmethod
    def _add(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        before, embed.before = embed.before, output.detach()
        return output if before is None else output + before


class Growing(Remembering):
    """The buffer begins as a row of zeros."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.before = torch.zeros(1, 1, sizes["width"])


class Lazy(GPT):
    """A layer infers its size."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.out = nn.LazyLinear(sizes["vocabulary"], bias=False)


class Named(GPT):
    """Returns a dict."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.register_forward_hook(lambda head, _, output: {"logits": output})


class Derived(GPT):
    """Adds a gradient of its output to the output."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = start = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        (gradient,) = torch.autograd.grad(logits.square().mean(), start, create_graph=True)
        return logits + gradient.mean(-1, keepdim=True)


def scripted(**_: int) -> Any:
    """TorchScript module."""
    return torch.jit.script(nn.Embedding(64, 64))


def compiled_whole(**sizes: int) -> Any:
    """Compiled as a whole, not block by block."""
    return torch.compile(GPT(**sizes), backend="eager")


class Tempering(GPT):
    """A temperature as a tensor in a plain attribute, changed in place in each forward pass."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.temperature = torch.ones(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(tokens) / float(self.temperature[0])
        if self.training:
            self.temperature *= 1.2
        return logits


MODELS = {
    "tempering": Tempering,
    "thawing": Thawing, "freezing": Freezing, "remembering": Remembering, "growing": Growing, "lazy": Lazy,
    "named": Named, "derived": Derived, "scripted": scripted, "compiled whole": compiled_whole,
}  # fmt: skip
