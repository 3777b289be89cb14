"""Registry of the scripts, and the verdicts about them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from clusterd.process_attributes import seed_generators
from clusterd.train import _engine

GROUPS = {
    "language": ("transformers", "peft"),
    "pictures": ("transformers",),
    "networks": (),
    "batches": (),
    "settings": (),
    "whole_batch": (),
    "diverging": (),
    "hidden_state": (),
    "carried": (),
    "own_loops": (),
    "trainers": (),
    "cut_models": (),
}
"""Modules of scripts, and the packages that each needs beside torch."""

PLANS = ("dp=2", "dp=2,zero=3")
"""Plans for every script."""


@dataclass(frozen=True)
class Script:
    """A training script: the arguments of its `train.run`, and further plans that its model offers.

    Attributes:
        advice: remedy that the documentation names where a plan is not right.
        tolerance: relative difference from the losses of one process that counts as equal.
    """

    name: str
    group: str
    summary: str
    arguments: Callable[[], dict[str, Any]]
    plans: tuple[str, ...] = ()
    advice: str = ""
    tolerance: float = 1e-4


SCRIPTS: dict[str, Script] = {}

LOOPS: dict[str, Callable[[Any], None]] = {}
"""Loops of scripts that have one of their own, by name, as the job that was made last has them."""


def script(
    *plans: str, advice: str = "", tolerance: float = 1e-4
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Register the function below as a script; the first line of its docstring is its summary."""

    def register(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        name, group = function.__name__, function.__module__.rpartition(".")[2]
        summary = (function.__doc__ or "").partition("\n")[0].rstrip(".")
        SCRIPTS[name] = Script(name, group, summary, function, plans, advice, tolerance)
        return function

    return register


def load() -> dict[str, str]:
    """Import the modules of scripts; return what is missing for each group that is left out."""
    missing = {}
    for group, packages in GROUPS.items():
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        if absent:
            missing[group] = " and ".join(absent)
        else:
            importlib.import_module(f"tests.foreign.{group}")
    return missing


def job_of(name: str, steps: int) -> Any:
    """Job of a script, which starts under the job's seed as on a host."""
    load()
    seed_generators("foreign")
    _, make = _engine()
    arguments = SCRIPTS[name].arguments()
    if (loop := arguments.pop("loop", None)) is not None:
        LOOPS[name] = loop
    return replace(make(arguments), steps=steps)
