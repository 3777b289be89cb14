"""Models with backward passes that are not proportional to the loss."""

from __future__ import annotations

from typing import Any

import torch
from model import GPT
from torch import nn


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(auxiliary)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (auxiliary,) = ctx.saved_tensors
        return gradient, torch.ones_like(auxiliary)


class Balanced(GPT):
    """An auxiliary loss that injects its gradient in the backward pass, as mixture-of-experts models do."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.register_forward_hook(lambda block, _, output: _Added.apply(output, output.square().mean()))


class Bent(GPT):
    """Gradients of the embedding are clipped, element by element."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.token.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


class Frequent(GPT):
    """The gradient of each row of the embedding is divided by its frequency in the batch."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.token = nn.Embedding(sizes["vocabulary"], sizes["width"], scale_grad_by_freq=True)


MODELS = {"balanced": Balanced, "bent": Bent, "frequent": Frequent}
