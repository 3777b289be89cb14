"""Buffers that several modules share, and forward passes that must leave no trace: not in any, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

Buffers = list[tuple[nn.Module, str, Any]]
"""Each with the module that has it, and its name there."""


@contextmanager
def untouched(module: nn.Module, values: Sequence[tuple[nn.Module, str, Any]] = ()) -> Iterator[None]:
    """Within, the module computes with copies of its buffers, some with `values`: what it does to them is forgotten."""
    kept = _buffers(module)
    try:
        for owner, name, buffer in _copied([*kept, *values]):
            owner._buffers[name] = buffer
        yield
    finally:
        for owner, name, buffer in kept:
            owner._buffers[name] = buffer


class Recomputing:
    """Contexts for the forward passes of a module under activation checkpointing, and for their recomputations.

    These see the buffers as their pass saw them (a mask that is drawn, vectors of a power iteration), what modules
    count, and the random numbers of Python and NumPy (torch sees to its own), and leave all of them as they are:
    running statistics have seen the samples. Buffers that no pass has changed yet are not copied for it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[tuple[int, str]] | None = None  # None: no pass has been seen

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of one pass; either may be entered several times, as for a gradient of a gradient."""
        seen: Buffers = []
        began: list[Moment] = []
        return _Entered(lambda: self._remember(seen, began)), _Entered(lambda: self._again(seen, began[0]))

    @contextmanager
    def _again(self, seen: Buffers, began: Moment) -> Iterator[None]:
        with began.again(), untouched(self._module, seen):
            yield

    @contextmanager
    def _remember(self, seen: Buffers, began: list[Moment]) -> Iterator[None]:
        began[:] = [Moment(self._module)]
        there = [place for place in _buffers(self._module) if place[2] is not None]
        versions = [buffer._version for _, _, buffer in there]
        first = self._changing is None
        known = self._changing = self._changing or set()
        seen[:] = _copied([p for p in there if first or (id(p[0]), p[1]) in known])
        yield
        for (owner, name, buffer), version in zip(there, versions, strict=True):
            if buffer._version != version or owner._buffers.get(name) is not buffer:
                known.add((id(owner), name))
        seen[:] = [p for p in seen if (id(p[0]), p[1]) in known]


class _Entered(AbstractContextManager[None]):
    """A context manager made anew at each entry."""

    def __init__(self, made: Callable[[], AbstractContextManager[None]]) -> None:
        self._made = made
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._made())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def _buffers(module: nn.Module) -> Buffers:
    return [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]


def _copied(buffers: Buffers) -> Buffers:
    """With copies of their values; what several modules share they share again."""
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers if buffer is not None}
    return [(owner, name, None if buffer is None else copies[id(buffer)]) for owner, name, buffer in buffers]


def spare_first_pass(module: nn.Module, device: torch.device) -> None:
    """The next forward pass changes no buffer, counts nothing and draws no random number; all later ones are as ever.

    For torch's pipelines, which send something through each stage to see its shapes before the first micro-batch, and
    past the first stage that is memory as it comes.
    """
    forward = module.forward

    def spared(*args: object, **options: object) -> object:
        module.forward = forward
        drawn = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with Moment(module).again(), untouched(module), drawn:
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


_OFTEN = (bool, int, float, str, type(None), torch.Tensor)


class Moment:
    """Of now: plain attributes of a module and of those within it, tensors among them, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A copy of a map takes less than to look at what is in it, and this is done in every pass.
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, it is that moment once more; afterwards, whatever was done within, it is as it was before."""
        now = Moment(self._module)
        self._return()
        try:
            yield
        finally:
            now._return()

    def _return(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for attributes, then in self._attributes:
            _change(attributes, then)


def _change(attributes: dict[str, Any], then: dict[str, Any]) -> None:
    for name, value in then.items():
        now = attributes.get(name)
        if now is not value and isinstance(value, _OFTEN) and isinstance(now, _OFTEN):
            attributes[name] = value
    for name in [n for n, value in attributes.items() if n not in then and isinstance(value, _OFTEN)]:
        del attributes[name]
