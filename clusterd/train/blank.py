"""A model without values: built on the meta device, given memory where it will live, and filled from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from clusterd.train import build
from clusterd.train.buffers import keeping_shared
from clusterd.train.exits import PlanRefused


def build_blank(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The whole model on the meta device; with memory and values after all if it cannot live without.

    A factory that computes with what it initialises fails on the meta device, and a tensor that is a plain attribute
    of a module, or in a list or a map there, is filled by nobody: such models are built as ever, at the cost of that
    time and memory.
    """
    try:
        model = build.build(factory, seed, meta=True)
    except PlanRefused:
        raise
    except Exception:  # whatever the factory raises there, it may work with real tensors
        return build.build(factory, seed)
    return build.build(factory, seed) if _has_loose_tensors(model) else model


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives memory on `device` to what is on the meta device, and moves the rest there; what is shared stays shared.

    New memory is written once, so that no later write waits for pages.
    """
    with keeping_shared(module):
        _allocate(module, device)


def _allocate(module: nn.Module, device: torch.device) -> None:
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module.to(device)
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    # In place: a parameter that is replaced would be another one for each module that has it.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()


def _has_loose_tensors(model: nn.Module) -> bool:
    known = {id(parameter) for parameter in model.parameters()}  # they get memory in place, whoever else has them

    def loose(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.is_meta and id(value) not in known
        if isinstance(value, Mapping):
            return any(map(loose, value.values()))
        return isinstance(value, (list, tuple)) and any(map(loose, value))

    registered = ("_parameters", "_buffers", "_modules")
    return any(
        loose(value) for module in model.modules() for name, value in vars(module).items() if name not in registered
    )
