"""Small tensors outside of parameters and buffers of the model: in plain attributes, and in a loss with a mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from clusterd.train.process.plain_data import from_plain, plain_with_tensors

BYTES_MAX = 1 << 18
"""Limit for one tensor: it is part of a message, unlike parameters and buffers."""

Key = tuple[str, str]
"""Owner and attribute."""

BUFFERS = "(buffers)"
"""Suffix of the owner of a loss's buffers, which belong to no model."""


class AttributeTensors:
    """Tensors that exist before the first step and keep their shape, and their changes since.

    Those that a module makes later are caches as a rule, and are not carried.

    Args:
        owners: objects by name.
        losses: names of those whose buffers count too.
    """

    def __init__(self, owners: Mapping[str, object], losses: frozenset[str]) -> None:
        self._owners, self._losses = owners, losses
        self._initial = {key: _Initial(tensor) for key, tensor in self._found()}

    def carries(self, owner: str, attribute: str, value: Any) -> bool:
        """True if the state of this attribute is part of `changed`."""
        initial = self._initial.get((owner, attribute))
        return initial is not None and initial.value is not None and initial.is_like(value)

    def changed(self) -> dict[str, dict[str, Any]]:
        """Plain values of the tensors that differ from their initial values, by owner and attribute."""
        found: dict[str, dict[str, Any]] = {}
        for (owner, attribute), initial, tensor in self._changed():
            if initial.value is not None and initial.is_like(tensor):
                found.setdefault(owner, {})[attribute] = plain_with_tensors(tensor, f"{owner}.{attribute}")
        return found

    def too_large(self) -> list[Key]:
        """Changed tensors that are not carried because of their size."""
        return [key for key, initial, _ in self._changed() if initial.value is None]

    def restore(self, received: Mapping[str, Mapping[str, Any]]) -> None:
        """Set received values, and the others to their initial values."""
        now = dict(self._found())
        for (owner, attribute), initial in self._initial.items():
            plain, current = received.get(owner, {}).get(attribute), now.get((owner, attribute))
            if initial.value is None or (plain is None and not initial.has_changed(current)):
                continue
            value = initial.value if plain is None else from_plain(plain)
            if current is not None and current.shape == value.shape:
                with torch.no_grad():
                    current.copy_(value)  # in place: other objects may use the same tensor
            else:
                setattr(self._owners[owner.removesuffix(BUFFERS)], attribute, value.clone().to(initial.value.device))

    def _changed(self) -> Iterator[tuple[Key, _Initial, torch.Tensor]]:
        for key, tensor in self._found():
            initial = self._initial.get(key)
            if initial is not None and initial.has_changed(tensor):
                yield key, initial, tensor

    def _found(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for owner, value in self._owners.items():
            for attribute, tensor in getattr(value, "__dict__", {}).items():
                if _is_plain_tensor(tensor):
                    yield (owner, attribute), tensor
            if owner in self._losses and isinstance(value, nn.Module):
                for name, buffer in value.named_buffers(recurse=False):
                    if _is_plain_tensor(buffer):
                        yield (f"{owner}{BUFFERS}", name), buffer


class _Initial:
    """A tensor before the first step: the object, its version, and its value, unless that is too large."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: Any = tensor
        self._version = tensor._version
        self.value = tensor.detach().clone() if tensor.nbytes <= BYTES_MAX else None

    def has_changed(self, now: torch.Tensor | None) -> bool:
        changed: bool = self._tensor._version != self._version or now is not self._tensor
        return changed

    def is_like(self, value: Any) -> bool:
        return _is_plain_tensor(value) and (value.shape, value.dtype) == (self._tensor.shape, self._tensor.dtype)


def _is_plain_tensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and not (value.requires_grad or value.is_meta or value.is_sparse)
    )
