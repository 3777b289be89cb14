"""Conversion of values to numbers, text, lists and maps, which cross process boundaries without pickle."""

from __future__ import annotations

import base64
import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TENSOR, _ARRAY, _TUPLE = "tensor bytes", "array bytes", "tuple items"
"""Keys of the bytes of a tensor or of an array of NumPy, and of the items of a tuple."""


class NotSerializable(Exception):
    """A value contains something other than numbers, text, lists and maps."""


def plain_value(value: Any, where: str) -> Any:
    """Convert `value` to numbers, text, lists and maps.

    Raises:
        NotSerializable: it holds something else; `where` names it.
    """
    if isinstance(value, np.generic):
        value = value.item()  # NumPy scalars that subclass Python numbers would be pickled in checkpoints
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {plain_value(k, f"a key of {where}"): plain_value(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain_value(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [plain_value(v, f"an item of {where}") for v in sorted(value, key=repr)]
    raise NotSerializable(
        f"{where} is a {type(value).__name__}, which cannot be sent to another process without pickling it"
    )


def restore_like(fresh: Any, plain: Any) -> Any:
    """Convert the result of `plain_value` back to the type of `fresh`."""
    if isinstance(plain, dict) and "tensor" in plain and "dtype" in plain:
        if isinstance(fresh, torch.Tensor):
            return fresh.fill_(plain["tensor"])
        return torch.full(plain["shape"], plain["tensor"], dtype=getattr(torch, plain["dtype"]))
    if isinstance(plain, dict):
        items = {k: restore_like(fresh.get(k) if isinstance(fresh, Mapping) else None, v) for k, v in plain.items()}
        if not isinstance(fresh, dict) or type(fresh) is dict:
            return items
        same = copy.copy(fresh)  # keep its type: a Counter, a defaultdict
        same.clear()
        same.update(items)
        return same
    if isinstance(plain, list):
        beside = fresh if isinstance(fresh, (list, tuple, deque)) and len(fresh) == len(plain) else [None] * len(plain)
        values = [restore_like(f, p) for f, p in zip(beside, plain, strict=True)]
        if isinstance(fresh, deque):
            return type(fresh)(values, fresh.maxlen)
        return type(fresh)(values) if isinstance(fresh, (tuple, set, frozenset)) else values
    return plain


def plain_with_tensors(value: Any, where: str) -> Any:
    """Convert `value` as `plain_value` does, and tensors and arrays of any size, for `from_plain`.

    Raises:
        NotSerializable: it holds something else; `where` names it.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        data = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: base64.b64encode(data).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {
            _ARRAY: base64.b64encode(value.tobytes()).decode(), "dtype": value.dtype.str, "shape": list(value.shape)
        }  # fmt: skip
    if isinstance(value, Mapping):
        return {plain_value(k, f"a key of {where}"): plain_with_tensors(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_with_tensors(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items  # the state of a generator must be a tuple again
    return plain_value(value, where)


def from_plain(value: Any) -> Any:
    """Convert the result of `plain_with_tensors` back."""
    if isinstance(value, dict) and _TENSOR in value:
        data = bytearray(base64.b64decode(value[_TENSOR]))
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    if isinstance(value, dict) and _ARRAY in value:
        array = np.frombuffer(bytearray(base64.b64decode(value[_ARRAY])), np.dtype(value["dtype"]))
        return array.reshape(value["shape"])
    if isinstance(value, dict) and value.keys() == {_TUPLE}:
        return tuple(from_plain(v) for v in value[_TUPLE])
    if isinstance(value, dict) and not ("tensor" in value and "dtype" in value):
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return restore_like(None, value)
