"""A model without values: built on the meta device, given memory where it will live, and filled from elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clusterd.train.parallel import build
from clusterd.train.parallel.buffers import preserve_shared_buffers
from clusterd.train.process.exits import Refused
from clusterd.train.process.run_in_fork import run_in_fork


def build_uninitialized(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The whole model on the meta device; with memory and values after all if it cannot live without.

    A factory that computes with what it initialises fails on the meta device, and a tensor that is neither parameter
    nor buffer, wherever it is kept, is filled by nobody: such models are built as ever, at the cost of that time and
    memory.
    """
    return build.build_model(factory, seed, meta=run_in_fork(lambda: _all_on_meta(factory, seed)))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives memory on `device` to what is on the meta device, and moves the rest there; what is shared stays shared.

    New memory is written once, so that no later write waits for pages.
    """
    with preserve_shared_buffers(module):
        _allocate(module, device)


def _allocate(module: nn.Module, device: torch.device) -> None:
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module.to(device)
        return
    user_state = [(parameter, *_take_user_state(parameter)) for parameter in module.parameters()]
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
    for parameter, attributes, hooks, accumulated in user_state:
        vars(parameter).update(attributes)
        for hook in hooks:
            parameter.register_hook(hook)
        for hook in accumulated:
            parameter.register_post_accumulate_grad_hook(hook)


def _take_user_state(parameter: nn.Parameter) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """What the script has hung on a parameter, which then has no hooks any more: attributes, and hooks of two kinds.

    Memory that is put in place leaves the attributes behind, and the hooks on what was there before.
    """
    hooks = list((parameter._backward_hooks or {}).values())
    accumulated = list((parameter._post_accumulate_grad_hooks or {}).values())
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    return dict(vars(parameter)), hooks, accumulated


def _all_on_meta(factory: Callable[[], nn.Module], seed: int) -> bool:
    """Whether parameters and buffers are all that the factory makes and keeps; to be called where it may keep it."""
    try:
        model = build.build_model(factory, seed, meta=True)
    except Refused:
        raise
    except Exception:  # whatever the factory raises there, it may work with real tensors
        return False
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    gc.collect()
    there = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and id(o) not in known)
    return not any(tensor.is_meta for tensor in there)
