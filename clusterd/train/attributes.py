"""What modules, and the optimizer, count in plain attributes: a temperature that falls, the number of steps so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Plain = bool | int | float | str | None

_NOT_ITS_OWN = frozenset({*vars(nn.Module()), "forward"})
"""Torch's, and what is put around a forward pass."""

OPTIMIZER = "(optimizer)"
"""In the place of a module's name."""


class Attributes:
    """Of the modules and the optimizer of a rank, against what they were when they were made.

    Numbers and text alone: they go with the state of training. A module that has put something else in the place of
    what it was made with (a table that grew, with its length beside it) is left as it is: it would not have the one for
    the other.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """`modules`: by the names that they have in the model; before the first step, and as it will be taken."""
        self._modules: dict[str, object] = {**modules, OPTIMIZER: optimizer}
        self._made = {name: _attributes(module) for name, module in self._modules.items()}

    def changed(self) -> dict[str, dict[str, Plain]]:
        """By module, those that are not what they were made as."""
        found: dict[str, dict[str, Plain]] = {}
        for name, module in self._modules.items():
            made, now = self._made[name], _attributes(module)
            others = [k for k in made.keys() | now.keys() if not (_is_plain(made.get(k)) and _is_plain(now.get(k)))]
            if any(made.get(k) is not now.get(k) for k in others):
                continue
            both = (made.keys() & now.keys()).difference(others)
            if differ := {k: now[k] for k in both if now[k] != made[k]}:
                found[name] = differ
        return found

    def restore(self, came: dict[str, dict[str, Plain]]) -> None:
        """Set what came of the modules that are here; what did not come is as it was made, whatever a rehearsal did."""
        as_made = {name: {k: self._made[name][k] for k in values} for name, values in self.changed().items()}
        for source in (as_made, came):
            for name, values in source.items():
                for attribute, value in values.items() if name in self._modules else ():
                    setattr(self._modules[name], attribute, value)


def _attributes(module: object) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_ITS_OWN}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
