"""Models that count, or draw numbers, in other ways than buffers and torch's generator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from model import GPT


class Settling(GPT):
    """Each block makes less of what it is given, the more often it was computed."""

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


MODELS = {"settling": Settling, "drawing": Drawing}
