"""Small tensors and arrays outside of parameters and buffers of the model: in attributes, and in a loss with a mean."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from clusterd.train.process import held
from clusterd.train.process.plain_data import from_plain, plain_with_tensors

BYTES_MAX, TOTAL_BYTES_MAX = 1 << 18, 1 << 22
"""Limits for one tensor and for all: they are part of a message, unlike parameters and buffers."""

READ_BYTES_MAX = 1 << 26
"""Limit for an array that is read to see whether it has changed."""

Key = tuple[str, str]
"""Owner and attribute."""

BUFFERS = "(buffers)"
"""Suffix of the owner of a loss's buffers, which belong to no model."""


class AttributeTensors:
    """Tensors without gradient and arrays in attributes of objects, and their changes since the first step.

    Args:
        owners: objects by name.
        losses: names of those whose buffers count too.
    """

    def __init__(self, owners: Mapping[str, held.Owner], losses: frozenset[str]) -> None:
        self._losses = losses
        self._initial = {key: _Initial(value) for key, value in self._found(owners)}

    def changed(self, owners: Mapping[str, held.Owner]) -> tuple[dict[str, dict[str, Any]], list[Key]]:
        """Plain values of those that differ from their initial values, the smallest first; and names of the others."""
        found: dict[str, dict[str, Any]] = {}
        left_out: list[Key] = []
        total = 0
        for (owner, attribute), value in sorted(self._found(owners), key=lambda pair: pair[1].nbytes):
            initial = self._initial.get((owner, attribute))
            if initial is not None and not initial.has_changed(value):
                continue
            total += value.nbytes
            if value.nbytes > BYTES_MAX or total > TOTAL_BYTES_MAX:
                left_out.append((owner, attribute))
            else:
                found.setdefault(owner, {})[attribute] = plain_with_tensors(value, held.path(owner, attribute))
        return found, left_out

    def restore(self, owners: Mapping[str, held.Owner], received: Mapping[str, Mapping[str, Any]]) -> None:
        """Set received values, and the others to their initial values."""
        now = dict(self._found(owners))
        modules = (owner.value for owner in owners.values() if isinstance(owner.value, nn.Module))
        device = next((parameter.device for module in modules for parameter in module.parameters()), None)
        values = {(owner, k): from_plain(v) for owner, some in received.items() for k, v in some.items()}
        for key in {**self._initial, **values}:
            initial, current = self._initial.get(key), now.get(key)
            value = values.get(key, initial.value if initial is not None else None)
            if value is None or (key not in values and initial is not None and not initial.has_changed(current)):
                continue
            owner = owners.get(key[0].removesuffix(BUFFERS))
            if current is not None and type(current) is type(value) and current.shape == value.shape:
                _overwrite(current, value)  # in place: other objects may use the same one
            elif owner is not None and isinstance(value, torch.Tensor):
                at = initial.device if initial is not None else device
                held.assign(owner.value, key[1], value.clone().to(at))
            elif owner is not None:
                held.assign(owner.value, key[1], value.copy())

    def _found(self, owners: Mapping[str, held.Owner]) -> Iterator[tuple[Key, Any]]:
        for name, owner in owners.items():
            for attribute, tensor in owner.attributes.items():
                if _is_plain(tensor):
                    yield (name, attribute), tensor
            if name in self._losses and isinstance(owner.value, nn.Module):
                for attribute, buffer in owner.value.named_buffers(recurse=False):
                    if _is_plain(buffer):
                        yield (f"{name}{BUFFERS}", attribute), buffer


class _Initial:
    """A tensor before the first step: the object, its version, and its value, unless that is too large."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._is_array = isinstance(tensor, np.ndarray)
        self._version = 0 if self._is_array else tensor._version
        self.device = None if self._is_array else tensor.device
        self.value: Any = None
        # torch counts changes, NumPy does not.
        self._checksum = checksum(tensor) if self._is_array and BYTES_MAX < tensor.nbytes <= READ_BYTES_MAX else None
        if tensor.nbytes <= BYTES_MAX:
            self.value = tensor.copy() if self._is_array else tensor.detach().clone()

    def has_changed(self, now: Any) -> bool:
        if self._is_array:
            if now is not self._tensor:
                return True
            if self._checksum is not None:
                return checksum(now) != self._checksum
            return self.value is not None and not np.array_equal(now, self.value)
        changed: bool = self._tensor._version != self._version or now is not self._tensor
        return changed


def checksum(array: Any) -> int:
    """Checksum of the bytes of an array, whose type may be one without a buffer (dates)."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _overwrite(current: Any, value: Any) -> None:
    with torch.no_grad():
        if isinstance(current, torch.Tensor):
            current.copy_(value)
        else:
            current[...] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return type(value) is torch.Tensor and not (value.requires_grad or value.is_meta or value.is_sparse)
