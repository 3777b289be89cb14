"""State dict of the whole model, as the model itself gives it: its own keys, hooks, extra state and metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from clusterd.train.parallel import build
from clusterd.train.process.job import Job
from clusterd.train.process.seeding import preserved_generators
from clusterd.train.state.attributes import Attributes

REAL_BYTES_MAX = 1 << 30
"""Size up to which a model is built with values, which are then replaced: what its code caches is of use later."""


def state_dict(
    job: Job, live: nn.Module, tensors: Mapping[str, torch.Tensor], changed: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Result of the ``state_dict`` of a model from the job's factory, with the state of the trained one.

    Args:
        live: this rank's module; a factory that returns a part of it again gives no model to fill.
        tensors: parameters and buffers by global name.
        changed: what modules have changed in themselves, of each rank.
    """
    large = sum(tensor.nbytes for tensor in tensors.values()) > REAL_BYTES_MAX
    for meta in (True, False) if large else (False,):
        try:
            with preserved_generators():
                model = build.build_model(job.model, job.seed, meta=meta)
        except Exception:
            if meta:
                continue  # the factory computes with values
            raise
        if {id(module) for module in model.modules()} & {id(module) for module in live.modules()}:
            break
        Attributes(dict(model.named_modules()), _no_optimizer(), None).restore(changed)
        _fill(model, tensors)
        # The names that torch.compile adds are left out, as everywhere.
        found = getattr(model, "_orig_mod", model).state_dict()
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(dict(found))):
            return _renamed(found)
    return dict(tensors)


def _no_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    parameters: dict[int, nn.Parameter] = {}  # tied ones stay tied
    left = dict(tensors)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter, value in _entries(path, module._parameters, left):
            if id(parameter) not in parameters:
                parameters[id(parameter)] = parameter
                if parameter.is_meta:
                    parameters[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                else:
                    parameter.data = value
            module._parameters[name] = parameters[id(parameter)]
        for name, _, value in _entries(path, module._buffers, left):
            module._buffers[name] = value
    for name, value in left.items():  # a buffer that was made while the model trained
        parent, _, last = name.rpartition(".")
        getattr(model, "_orig_mod", model).get_submodule(parent)._buffers[last] = value


def _entries(
    path: str, held: Mapping[str, Any], left: dict[str, torch.Tensor]
) -> Iterable[tuple[str, Any, torch.Tensor]]:
    """Tensors that a module holds and their values, which are taken out of `left`."""
    for name, tensor in list(held.items()):
        value = left.pop(build.global_name(f"{path}.{name}" if path else name), None)
        if value is not None:  # of a buffer too that is None when the model is made
            yield name, tensor, value


def _renamed(state: Any) -> Mapping[str, Any]:
    """The same under global names, the modules' versions (``_metadata``) too."""
    for named in (state, getattr(state, "_metadata", {})):
        for key in list(named):
            if isinstance(key, str) and (name := build.global_name(f"{key}.")[:-1]) != key:
                named[name] = named.pop(key)
    found: Mapping[str, Any] = state
    return found
