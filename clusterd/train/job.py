"""What a script gives, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LossFunction = Callable[[Any, Any], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the script gives: everything that no plan changes."""

    model: Callable[[], nn.Module]
    loss: LossFunction
    data: Any
    optimizer: OptimizerFactory
    global_batch: int
    steps: int
    seed: int = 0
    layers: Sequence[str] = ()
    tp_plan: Mapping[str, str] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    num_workers: int = 0
    precision: str = "fp32"
    find_unused_parameters: bool = False
    save: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    step: int  # the last one done
    loss: float  # of that step; NaN if none was done
    stopped: str = ""  # who asked to stop; empty if all steps were done
    done: bool = True  # whether it is where it was to get: after the last step, or at its target
