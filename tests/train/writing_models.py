"""Models with forward passes that write into their parameters."""

from __future__ import annotations

from typing import Any

import torch
from model import GPT
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Renormed(GPT):
    """Looked-up rows of the embedding are shortened first."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.token = nn.Embedding(sizes["vocabulary"], sizes["width"], max_norm=1.0)


class Clipped(GPT):
    """Weights of the first layer stay within bounds."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.register_forward_pre_hook(self._clip)

    @staticmethod
    def _clip(embed: Any, inputs: Any) -> None:
        embed.token.weight.data.clamp_(-0.5, 0.5)


class Following(GPT):
    """A target that follows the trained weights, kept as parameters."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.live = nn.Linear(sizes["width"], sizes["width"])
        self.embed.target = nn.Linear(sizes["width"], sizes["width"]).requires_grad_(False)
        self.embed.register_forward_hook(self._follow)

    @staticmethod
    def _follow(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        for target, live in zip(embed.target.parameters(), embed.live.parameters(), strict=True):
            target.data = target.data * 0.9 + live.data * 0.1
        return embed.live(output) + embed.target(output)


class Centred(GPT):
    """A bias computed from the first batch; a value tells if that has happened."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.bias = nn.Parameter(torch.zeros(sizes["width"]))
        self.embed.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.embed.register_forward_hook(self._centre)

    @staticmethod
    def _centre(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not embed.ready.item():
            embed.bias.data.copy_(-output.mean((0, 1)))
            embed.ready.fill_(True)
        return output + embed.bias


class LateFollowing(Following):
    """The target follows from the fourth pass on."""

    @staticmethod
    def _follow(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embed.passes = getattr(embed, "passes", 0) + 1
        return Following._follow(embed, inputs, output) if embed.passes > 3 else output


class Averaged(GPT):
    """torch's moving average of the trained weights, in a forward pass that fake tensors cannot run."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embed.live = nn.Linear(sizes["width"], sizes["width"])
        self.embed.average = AveragedModel(self.embed.live, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(
            False
        )
        self.embed.register_forward_hook(self._follow)

    @staticmethod
    def _follow(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if embed.training:
            if torch._guards.detect_fake_mode(output):
                raise RuntimeError("this model reads values")
            embed.average.update_parameters(embed.live)
        return embed.live(output) + embed.average(output)


MODELS = {
    "averaged": Averaged,
    "renormed": Renormed, "clipped": Clipped, "following": Following, "centred": Centred,
    "late following": LateFollowing,
}  # fmt: skip
