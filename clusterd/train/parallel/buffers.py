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
def with_copied_buffers(module: nn.Module, values: Sequence[tuple[nn.Module, str, Any]] = ()) -> Iterator[None]:
    """Within, the module computes with copies of its buffers, some with `values`: what it does to them is forgotten."""
    originals = _buffers(module)
    try:
        for owner, name, buffer in _copies([*originals, *values]):
            owner._buffers[name] = buffer
        yield
    finally:
        for owner, name, buffer in originals:
            owner._buffers[name] = buffer


class RecomputeContexts:
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
        started: list[ForwardState] = []
        return _Reentrant(lambda: self._record(seen, started)), _Reentrant(lambda: self._recompute(seen, started[0]))

    @contextmanager
    def _recompute(self, seen: Buffers, started: ForwardState) -> Iterator[None]:
        with started.restored(), with_copied_buffers(self._module, seen):
            yield

    @contextmanager
    def _record(self, seen: Buffers, started: list[ForwardState]) -> Iterator[None]:
        started[:] = [ForwardState(self._module)]
        present = [place for place in _buffers(self._module) if place[2] is not None]
        versions = [buffer._version for _, _, buffer in present]
        first = self._changing is None
        known = self._changing = self._changing or set()
        seen[:] = _copies([p for p in present if first or (id(p[0]), p[1]) in known])
        yield
        for (owner, name, buffer), version in zip(present, versions, strict=True):
            if buffer._version != version or owner._buffers.get(name) is not buffer:
                known.add((id(owner), name))
        seen[:] = [p for p in seen if (id(p[0]), p[1]) in known]


class _Reentrant(AbstractContextManager[None]):
    """A context manager made anew at each entry."""

    def __init__(self, factory: Callable[[], AbstractContextManager[None]]) -> None:
        self._factory = factory
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._factory())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def _buffers(module: nn.Module) -> Buffers:
    return [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]


def _copies(buffers: Buffers) -> Buffers:
    """With copies of their values; what several modules share they share again."""
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers if buffer is not None}
    return [(owner, name, None if buffer is None else copies[id(buffer)]) for owner, name, buffer in buffers]


def isolate_first_pass(module: nn.Module, device: torch.device) -> None:
    """The next forward pass changes no buffer, counts nothing and draws no random number; all later ones are as ever.

    For torch's pipelines, which send something through each stage to see its shapes before the first micro-batch, and
    past the first stage that is memory as it comes.
    """
    forward = module.forward

    def isolated(*args: object, **options: object) -> object:
        module.forward = forward
        drawn = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with ForwardState(module).restored(), with_copied_buffers(module), drawn:
            return forward(*args, **options)

    module.forward = isolated


@contextmanager
def preserve_shared_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers that are one tensor in several modules are one again at the end, whatever moved them apart."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owners.setdefault(id(buffer), []).append((owner, name))
    yield
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            owner._buffers[name] = first._buffers[first_name]


_PLAIN_TYPES = (bool, int, float, str, type(None), torch.Tensor)


class ForwardState:
    """Of now: plain attributes of a module and of those within it, tensors among them, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A copy of a map takes less than to look at what is in it, and this is done in every pass.
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, it is that moment once more; afterwards, whatever was done within, it is as it was before."""
        now = ForwardState(self._module)
        self._apply()
        try:
            yield
        finally:
            now._apply()

    def _apply(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for attributes, then in self._attributes:
            _change(attributes, then)


def _change(attributes: dict[str, Any], then: dict[str, Any]) -> None:
    for name, value in then.items():
        now = attributes.get(name)
        if now is not value and isinstance(value, _PLAIN_TYPES) and isinstance(now, _PLAIN_TYPES):
            attributes[name] = value
    for name in [n for n, value in attributes.items() if n not in then and isinstance(value, _PLAIN_TYPES)]:
        del attributes[name]
