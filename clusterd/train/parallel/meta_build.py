"""Models without values: built on the meta device and allocated on their device; values come from elsewhere."""

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


def can_build_on_meta(factory: Callable[[], nn.Module], seed: int) -> bool:
    """True if the model can be built on the meta device and filled later.

    A factory that computes with its initial values fails on the meta device, and a tensor that is neither parameter nor
    buffer would never be filled. Such models are built normally, at the cost of time and memory. Forks: call it before
    this process has a CUDA context or process groups.
    """
    return run_in_fork(lambda: _all_on_meta(factory, seed))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on `device` and move the rest there; shared tensors stay shared.

    New memory is written once, so that later writes cause no page faults.
    """
    with preserve_shared_buffers(module):
        _allocate(module, device)


def _allocate(module: nn.Module, device: torch.device) -> None:
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module.to(device)
        return
    user_state = [(parameter, *_take_user_state(parameter)) for parameter in module.parameters()]
    before = torch.__future__.get_swap_module_params_on_conversion()
    # In place: replacing a shared parameter would give each module its own copy.
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
    """Remove and return the attributes and the two kinds of hooks that the script set on a parameter.

    Swapping in new memory loses the attributes and leaves the hooks on the old tensor.
    """
    hooks = list((parameter._backward_hooks or {}).values())
    accumulated = list((parameter._post_accumulate_grad_hooks or {}).values())
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    return dict(vars(parameter)), hooks, accumulated


def _all_on_meta(factory: Callable[[], nn.Module], seed: int) -> bool:
    """True if parameters and buffers are the only tensors that the factory creates; run it in a fork."""
    try:
        model = build.build_model(factory, seed, meta=True)
    except Refused:
        raise
    except Exception:  # the factory may still work with real tensors
        return False
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    gc.collect()
    there = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and id(o) not in known)
    return not any(tensor.is_meta for tensor in there)
