"""Forward passes without side effects: recomputations and trial passes that restore buffers and counters.

Random generators are restored too, and buffers that several modules share stay shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

Buffers = list[tuple[nn.Module, str, Any]]
"""(owning module, name there, buffer) of each buffer."""


@contextmanager
def with_copied_buffers(module: nn.Module, values: Sequence[tuple[nn.Module, str, Any]] = ()) -> Iterator[None]:
    """Let the module compute with copies of its buffers, some replaced by `values`; changes to them are discarded."""
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

    A recomputation sees buffers as the forward pass saw them (a random mask, vectors of a power iteration), plain
    attributes of modules, and the random state of Python and NumPy (torch restores its own), and leaves all of them
    unchanged: running statistics count the samples once. Buffers that no pass has changed yet are not copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[tuple[int, str]] | None = None  # None: before the first pass

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of one forward pass and of its recomputation; each may be entered several times."""
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
    """Context manager that creates a new inner one at each entry."""

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
    """Same buffers with copied values; modules that share a buffer share its copy."""
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers if buffer is not None}
    return [(owner, name, None if buffer is None else copies[id(buffer)]) for owner, name, buffer in buffers]


def isolate_first_pass(module: nn.Module, device: torch.device) -> None:
    """Make the next forward pass change no buffer or counter and draw no random number; later passes are normal.

    For torch's pipelines, which send a tensor through each stage to learn its shapes before the first micro-batch;
    after the first stage that tensor is uninitialised memory.
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
    """Make buffers that are one tensor in several modules one tensor again at the end."""
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
    """Plain attributes, tensors included, of a module and its submodules, and states of random generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Copying a dict is cheaper than inspecting it, and this runs in every pass.
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state within the context, and the current one afterwards."""
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
