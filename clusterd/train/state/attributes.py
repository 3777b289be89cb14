"""Plain attributes that modules, the optimizer and the loss change: a step counter, a temperature that falls."""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from clusterd.train.process.plain_data import plain_value, restore_like
from clusterd.train.state.attribute_tensors import AttributeTensors

_EXCLUDED = frozenset({*vars(nn.Module()), "forward"})
"""torch's own attributes, and the wrapped forward method."""

OPTIMIZER = "(optimizer)"
"""Key in the place of a module name."""

LOSS = "(loss)"
"""Prefix of the names of modules that belong to the loss."""

_SAVED_ELSEWHERE = frozenset({"state", "param_groups"})
"""Attributes of an optimizer that are saved by other means."""

VALUES_MAX = 1000
"""Limit for a list or map; a longer one is a table or a history."""


class Attributes:
    """Changed plain attributes of the modules, the optimizer and the loss of a rank.

    Numbers and text, and lists and maps of these, are part of the training state. A module that has replaced an object
    of another kind (a table that grew, with its length beside it) is skipped as a whole: restoring the one without the
    other would be inconsistent. A replaced tensor is reported in the log, once.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, loss: object = None) -> None:
        """Record the initial values; call before the first step.

        Args:
            modules: by the names that they have in the model.
            loss: included if it is an object and not a function.
        """
        optimizers = getattr(optimizer, "parts", {})  # of an `AlternatingOptimizer`
        self._modules: dict[str, object] = {**modules, OPTIMIZER: optimizer}
        self._modules |= {f"{OPTIMIZER}.{name}": part for name, part in optimizers.items()}
        losses = {f"{LOSS}.{name}": module for name, module in _parts(loss).items()}
        self._modules |= losses
        self.tensors = AttributeTensors(self._modules, frozenset(losses))
        self._initial_objects = {name: _attributes(module) for name, module in self._modules.items()}
        self._initial = {
            name: {k: copy.deepcopy(v) for k, v in attributes.items() if _is_plain(v)}
            for name, attributes in self._initial_objects.items()
        }
        self._warned: set[tuple[str, str]] = set()

    def changed(self) -> dict[str, dict[str, Any]]:
        """Attributes that differ from their initial values, by module."""
        found: dict[str, dict[str, Any]] = {}
        for name, module in self._modules.items():
            now = _attributes(module)
            self._warn_of_tensors(name, now)
            if changed := self._differing(name, now):
                found[name] = {k: plain_value(v, f"{name}.{k}") for k, v in changed.items()}
        for owner, attribute in self.tensors.too_large():
            self._warn(owner, attribute, "has changed the large tensor in")
        return found

    def _differing(self, name: str, now: dict[str, Any]) -> dict[str, Any]:
        objects, initial_values = self._initial_objects[name], self._initial[name]
        changed: dict[str, Any] = {}
        for k in objects.keys() | now.keys():
            value, initial = now.get(k), objects.get(k)
            if value is initial and (k not in initial_values or isinstance(value, _SIMPLE)):
                continue
            if self.tensors.carries(name, k, value):
                continue
            if not (_is_plain(value) and (k in initial_values or initial is None)):
                if value is not initial:
                    return {}
            elif k in now and value != self._initial_value(name, k, value):
                changed[k] = value
        return changed

    def _warn_of_tensors(self, name: str, now: dict[str, Any]) -> None:
        for k, value in now.items():
            if isinstance(value, _SIMPLE) or value is self._initial_objects[name].get(k) or (name, k) in self._warned:
                continue
            if self.tensors.carries(name, k, value):
                continue
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if tensors and not any(
                tensor.requires_grad for tensor in tensors
            ):  # else computed from weights in every pass
                self._warn(name, k, "has put a tensor into")

    def _warn(self, name: str, attribute: str, what: str) -> None:
        if (name, attribute) not in self._warned:
            self._warned.add((name, attribute))
            print(
                f"clusterd: {name or 'the model'} {what} its attribute {attribute}, which is neither "
                "migrated nor saved in checkpoints: register it as a buffer of the model, unless it can be recomputed",
                flush=True,
            )

    def _initial_value(self, name: str, attribute: str, default: Any) -> Any:
        """Initial value of an attribute; that of the class if the instance had none."""
        return self._initial[name].get(attribute, getattr(type(self._modules[name]), attribute, default))

    def restore(self, received: dict[str, dict[str, Any]]) -> None:
        """Set received values of the modules that are here, and reset the others to their initial values."""
        for name, module in self._modules.items():
            for attribute, value in self._differing(name, _attributes(module)).items():
                setattr(module, attribute, copy.deepcopy(self._initial_value(name, attribute, value)))
        for name, values in received.items():
            for attribute, value in values.items() if name in self._modules else ():
                setattr(self._modules[name], attribute, restore_like(self._initial_value(name, attribute, None), value))


_SIMPLE = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)


def _parts(loss: object) -> dict[str, object]:
    """Modules of a loss by name, or the object that it is or is a method of."""
    if isinstance(loss, Mapping):  # several losses
        parts = ((f"{name}.{path}", part) for name, one in loss.items() for path, part in _parts(one).items())
        return dict(parts)
    if isinstance(loss, functools.partial):
        loss = loss.func
    loss = getattr(loss, "__self__", loss)
    if isinstance(loss, nn.Module):
        return dict(loss.named_modules())
    is_object = hasattr(loss, "__dict__") and not isinstance(loss, (type, types.FunctionType, types.ModuleType))
    return {"": loss} if is_object else {}


def _attributes(module: object) -> dict[str, Any]:
    left_out = _SAVED_ELSEWHERE if isinstance(module, torch.optim.Optimizer) else _EXCLUDED
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (isinstance(value, _CONTAINERS) and _count(value) <= VALUES_MAX)


_CONTAINERS = (list, tuple, deque, dict)


def _count(value: Any) -> int:
    """Number of values inside; above the limit if some are not plain."""
    if isinstance(value, _SIMPLE):
        return 1
    if not isinstance(value, _CONTAINERS) or hasattr(value, "_fields") or len(value) > VALUES_MAX:
        return VALUES_MAX + 1
    if isinstance(value, dict) and not all(isinstance(key, (int, str)) for key in value):
        return VALUES_MAX + 1
    parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
    total = 0
    for part in parts:
        total += _count(part)
        if total > VALUES_MAX:
            break
    return total
