"""Seeds of the global random generators: for building the model, and for every step."""

from __future__ import annotations

import random

import numpy as np
import torch

from plans.sample_order import mix


def seed_everything(seed: int) -> None:
    """Seeds torch, Python and, where it is used, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def seed_step(seed: int, step: int, replica: int, stage: int) -> None:
    """Seeds all for one step: what dropout draws depends on (seed, step, replica, stage) only.

    Shards of one replica draw alike, which keeps what they hold twice equal; a repeated step draws the same again.
    """
    seed_everything(mix(mix(seed & 0xFFFFFFFF) ^ (step << 32 | replica << 16 | stage)) >> 1)
