"""What a script gives, and what it gets back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

LossFunction = Callable[[Any, Any], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

NAME = "_clusterd_name"
"""Attribute of a parameter, or of what stands for it: its global name."""


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
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] = default_collate
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


def adapt_optimizer_factory(factory: Callable[[Any], torch.optim.Optimizer]) -> OptimizerFactory:
    """The factory as one that is given parameters, if it wants (name, parameter): its argument is called so."""
    try:
        wanted = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # of something built in
        return factory
    if wanted != "named_parameters":
        return factory

    def named(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = factory([(getattr(p, NAME, f"parameter.{i}"), p) for i, p in enumerate(parameters)])
        for group in optimizer.param_groups:
            group.pop("param_names", None)  # of the parts that are here now; other plans have others
        return optimizer

    return named
