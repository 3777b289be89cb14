"""Job of a training script and its outcome."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from clusterd.train.process.evaluation import Evaluation
from clusterd.train.process.exits import Refused

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


_FUNCTIONS = {
    "model": "model=lambda: Net(...), which makes it",
    "loss": "loss=lambda output, target: ...",
    "optimizer": "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
    "scheduler": "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
    "collate_fn": "collate_fn=lambda samples: ...",
    "on_step": "on_step=lambda step, entry: ...",
    "on_evaluate": "on_evaluate=lambda step, metrics: ...",
    "on_checkpoint": "on_checkpoint=lambda step, directory: ...",
}
_REQUIRED = ("model", "loss", "data", "optimizer", "global_batch", "steps")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "global_batch": (Integral, "a whole number"),
    "steps": (Integral, "a whole number"),
    "seed": (Integral, "a whole number"),
    "num_workers": (Integral, "a whole number"),
    "clip_norm": (Real, "a number"),
    "tp_plan": (Mapping, 'a map of styles by module name, as in {"blocks.*.attn.qkv": "colwise"}'),
    "sampler": (Iterable, "an iterable of numbers of samples, as torch's samplers are"),
    "save": ((str, os.PathLike), "a file name"),
    "init_from": ((str, os.PathLike), "a file or folder name"),
    "evaluate": (Evaluation, "one train.Evaluation(...)"),
    "stage": (str, "a name"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check what the arguments of `clusterd.train.run` are, before torch says that something in the engine is wrong.

    Raises:
        Refused: names the first one that is something else, and what it must be.
    """
    for name in _REQUIRED:
        if given.get(name) is None:
            raise Refused(f"{name} is missing: train.run and train.session need {', '.join(_REQUIRED)}")
    for name, example in _FUNCTIONS.items():
        value = given.get(name)
        parts = value.values() if isinstance(value, Mapping) and name in ("loss", "optimizer") else [value]
        for part in parts:
            made = name == "model" and isinstance(part, nn.Module)  # can be called, and is not what makes it
            if part is not None and (made or not callable(part)):
                raise Refused(f"{name} is of type {type(part).__name__}; it must be a function, as in {example}")
    for name, (kind, words) in _KINDS.items():
        value = given.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise Refused(f"{name} is of type {type(value).__name__}; it must be {words}")
    if isinstance(layers := given.get("layers"), str):
        raise Refused(f"layers is a text; it must be a list of names: layers=[{layers!r}]")
    for name in ("global_batch", "steps"):
        if given[name] < 1:
            raise Refused(f"{name} is {given[name]}; it must be 1 or more")


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
