"""Job of a training script and its outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from clusterd.train.process.evaluation import Evaluation

LossFunction = Callable[[Any, Any], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

NAME = "_clusterd_name"
"""Attribute that holds the global name of a parameter or its stand-in."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments of `clusterd.train.run`: everything that does not depend on the plan."""

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
    sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] = default_collate
    precision: str = "fp32"
    find_unused_parameters: bool = False
    sees_batch: str = "global"
    save: str | None = None
    save_format: str = "torch"
    init_from: str | None = None
    init_strict: bool = True
    evaluate: Evaluation | None = None
    loggers: Sequence[Any] = ()
    on_step: Callable[[int, dict[str, Any]], object] | None = None
    on_evaluate: Callable[[int, dict[str, float]], object] | None = None
    on_checkpoint: Callable[[int, str], object] | None = None
    stage: str = ""  # of a script that trains several times
    losses: Mapping[str, Callable[[nn.Module, Any], Any]] = field(default_factory=dict)  # by part of the model
    optimizer_parts: Sequence[str] = ()  # of an optimizer of several
    own_loop: bool = False  # the script may change the training between two steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run."""

    step: int  # last one done
    loss: float  # of that step; NaN if none was done
    stopped: str = ""  # reason of the stop; empty if all steps were done
    done: bool = True  # the last step, or the target, is reached
    skipped: bool = False  # another job trains this stage of the script


def adapt_optimizer_factory(factory: Callable[[Any], torch.optim.Optimizer]) -> OptimizerFactory:
    """Wrap a factory whose argument is ``named_parameters`` so that it takes parameters."""
    try:
        wanted = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # a builtin
        return factory
    if wanted != "named_parameters":
        return factory

    def named(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = factory([(getattr(p, NAME, f"parameter.{i}"), p) for i, p in enumerate(parameters)])
        for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            for group in one.param_groups:
                group.pop("param_names", None)  # names of this plan's shards; other plans have others
        return optimizer

    return named
