"""State and settings of scripts that a plan or a move must carry: precision, schedules, attributes, generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, WeightedRandomSampler

from clusterd import train
from clusterd.train import Evaluation
from tests.foreign.batches import SAMPLES, arguments, perceptron, points
from tests.foreign.registry import script


@script(tolerance=1e-6)
def double_precision() -> dict[str, Any]:
    """A model in float64."""
    random = torch.Generator().manual_seed(5)
    data = torch.randn(SAMPLES, 8, generator=random).double(), torch.randint(4, (SAMPLES,), generator=random)
    return arguments(model=lambda: perceptron().double(), data=TensorDataset(*data))


class Listed(torch.optim.SGD):
    """Keeps a list under a name that clusterd's own optimizers use too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.parts, self.optim = ["weights", "biases"], "plain"


@script("dp=2,zero=1")
def optimizer_with_parts() -> dict[str, Any]:
    """An optimizer with attributes named `parts` and `optim`."""
    return arguments(optimizer=Listed)


@script("dp=2,accumulation=2")
def loss_and_metrics() -> dict[str, Any]:
    """A loss that returns (loss, dict)."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return F.cross_entropy(output, target), {"right": (output.argmax(-1) == target).float().mean()}

    return arguments(loss=loss)


@script("dp=2,accumulation=2")
def weighted_sampler() -> dict[str, Any]:
    """`WeightedRandomSampler` with a generator of its own."""
    weights = [1.0 + i % 5 for i in range(SAMPLES)]
    generator = torch.Generator().manual_seed(3)
    return arguments(sampler=WeightedRandomSampler(weights, SAMPLES, generator=generator))


@script()
def plateau() -> dict[str, Any]:
    """`ReduceLROnPlateau`, driven by an evaluation."""
    return arguments(
        evaluate=Evaluation(data=TensorDataset(*points().tensors), every=2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05),
    )


class Helper:
    """A helper that is no module."""

    def __init__(self) -> None:
        self.passes, self.sums = 0, np.zeros(2)
        self.random = random.Random(5)


class Keeping(nn.Module):
    """A model with a helper, a counter of the class, and an object beside its numbers that each pass replaces."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.helper, self.n, self.aux = perceptron(), Helper(), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        if self.training:
            type(self).passes += 1
            self.n += 1
            self.aux = output.mean()
            self.helper.passes += 1
            self.helper.sums += self.n
        kept = self.n + self.helper.passes + type(self).passes + float(self.helper.sums.sum())
        return output * (1 + 1 / (1 + kept)) + self.helper.random.random() * 1e-2


@script()
def kept_in_helpers() -> dict[str, Any]:
    """Counters in helpers, classes and arrays, and a generator of the model's own."""
    return arguments(model=Keeping)


@script()
def set_that_grows() -> dict[str, Any]:
    """A set of what was seen, by whose size the output grows."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.seen = perceptron(), set[int]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen.add(len(self.seen))
            return self.layers(x) * (1 + len(self.seen) / 10)

    return arguments(model=Net)


@script(advice="dp without accumulation")
def kept_in_a_default() -> dict[str, Any]:
    """A running mean of the loss in a list that is the default of an argument, by which an output is scaled."""

    def loss(out: torch.Tensor, y: torch.Tensor, kept: list[float] = [0.0]) -> torch.Tensor:  # noqa: B006
        mean = train.gather(F.cross_entropy(out, y, reduction="none")).mean()
        kept[0] = 0.9 * kept[0] + 0.1 * mean.item()
        return mean * (1 + kept[0])

    return arguments(loss=loss)
