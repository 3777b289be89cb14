"""Models that count, or draw random numbers, outside of buffers and torch's generator."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from model import GPT


class Settling(GPT):
    """Each block damps its input more, the more often it was computed."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.more = 1.0
            block.register_forward_pre_hook(self._weigh)

    @staticmethod
    def _weigh(block: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        block.more *= 0.5
        return inputs[0] * (1 + block.more)


class Drawing(GPT):
    """Each block draws from Python's generator and from NumPy's."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, x: x[0] * (0.5 + random.random()) * (0.5 + np.random.rand()))


class Counting(GPT):
    """Counts in NumPy scalars, in a list, in a dict, and in a class attribute."""

    passes = 0

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.exact, self.whole = np.float64(1.0), np.int64(0)
        self.recent: deque[float] = deque([0.0], maxlen=4)
        self.of = {"words": 0, "texts": [0.0, 1.0]}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.exact, self.whole, self.passes = self.exact * np.float64(0.9), self.whole + 1, self.passes + 1
        self.recent.append(self.recent[-1] + 0.1)
        self.of["words"] += 1
        self.of["texts"][1] *= 0.9
        counted = float(self.exact) + 1 / self.whole + sum(self.recent) / 4 + self.of["texts"][1] + 1 / self.of["words"]
        return super().forward(tokens) * (counted + 1 / self.passes)


MODELS = {"settling": Settling, "drawing": Drawing, "counting": Counting}
