"""Buffers that several modules share, and forward passes that must leave no trace in any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Within, the module computes with copies of its buffers: what a forward pass does to them is forgotten."""
    kept = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    copies: dict[int, torch.Tensor] = {}
    try:
        for owner, name, buffer in kept:
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.clone()
                owner._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for owner, name, buffer in kept:
            owner._buffers[name] = buffer


def spare_first_pass(module: nn.Module, device: torch.device) -> None:
    """The next forward pass changes no buffer and draws no random number; all later ones are as ever.

    For torch's pipelines, which send something through each stage to see its shapes before the first micro-batch, and
    past the first stage that is memory as it comes.
    """
    forward = module.forward

    def spared(*args: object, **options: object) -> object:
        module.forward = forward
        with untouched(module), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return forward(*args, **options)

    module.forward = spared


@contextmanager
def keeping_shared(module: nn.Module) -> Iterator[None]:
    """Buffers that are one tensor in several modules are one again at the end, whatever moved them apart."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((owner, name))
    yield
    for (first, first_name), *others in places.values():
        for owner, name in others:
            owner._buffers[name] = first._buffers[first_name]
