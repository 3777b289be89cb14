"""Check that no operation mixes tensors of the device with those of the host, where a CPU is taken for the device.

Both are CPU tensors, so that torch itself refuses nothing. Where a tensor lives follows from how it came to be: made
for the device, copied to it or from it, or computed from tensors of known place. What autograd and collectives make is
of no known place, and is not judged.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DEVICE = torch.device("cpu", 0)
"""The device; the host is `torch.device("cpu")`. For torch both are the same memory, but they are not equal."""

_HOST = torch.device("cpu")

_UNKNOWN = torch.device("cpu", 1)
"""Device that a tensor of no known place names, so that what is made beside it is of no known place either."""

_ACROSS = {
    torch.Tensor.copy_, torch._foreach_copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__,
    torch._has_compatible_shallow_copy_type,
}  # fmt: skip
"""Operations between places by their meaning; indices may be on the host."""

_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.nn.Module.to}

_WAITS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__,
    torch.Tensor.__index__, torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero, torch.equal,
}  # fmt: skip
"""Calls for which the host waits until the device has done all that is queued; copies to the host are others."""

_FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.as_tensor, torch.arange, torch.linspace,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.eye, torch.empty_strided, torch.scalar_tensor,
}  # fmt: skip


class MixedDevices(RuntimeError):
    """An operation got tensors of both places; a GPU would have refused."""


class OneDevice(TorchFunctionMode):
    """Follows where tensors live, and fails where CUDA would; entered once per thread.

    Attributes:
        waits: calls for which the host waited for the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._places: dict[StorageWeakRef, torch.device] = {}

    def place_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Device of a tensor, or the host; None: not known."""
        key = _key(tensor)
        return self._places.get(key) if key is not None else None

    def put(self, tensor: torch.Tensor, place: torch.device) -> None:
        """Record where a tensor lives."""
        key = _key(tensor)
        if key is not None and place in (DEVICE, _HOST):
            self._places[key] = place
            if len(self._places) % 4096 == 0:
                self._places = {ref: where for ref, where in self._places.items() if not ref.expired()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            device = func(*args)
            if device.type != "cpu" or _is_sharding():
                return device
            return self.place_of(args[0]) or _UNKNOWN
        if func in _MOVES:
            return self._moved(func, args, kwargs)
        asked = kwargs.get("device")
        asked = torch.device(asked) if asked is not None else None
        if func in _FACTORIES:
            made = func(*args, **kwargs)
            if not _is_sharding():
                self._put_all(made, asked or _HOST)
            return made
        if func in _WAITS and self.place_of(args[0]) == DEVICE:
            self.waits[func.__name__] += 1
        places = {self.place_of(tensor) for tensor in _tensors((args, kwargs)) if tensor.dim() > 0} - {None}
        name = getattr(func, "__name__", str(func))
        if len(places) > 1 and func not in _ACROSS and name not in ("__get__", "__set__"):
            raise MixedDevices(f"{name} got tensors of the device and of the host")
        made = func(*args, **kwargs)
        if asked is not None or places:
            self._put_all(made, asked or next(iter(places)), only_new=True)
        return made

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of a move, which is a copy where the places differ."""
        made = func(*args, **kwargs)
        place = _HOST if func is torch.Tensor.cpu else _asked(args[1:], kwargs)
        before = self.place_of(args[0])
        if _key(args[0]) is None:
            return made
        if _is_sharding():
            return made.clone() if before == _HOST else made
        if before == DEVICE and place == _HOST and not kwargs.get("non_blocking"):
            self.waits["copy to the host"] += 1
        if place is None or place == before:
            place = before
        elif made.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
            made = made.clone()
        if place is not None:
            self.put(made, place)
        return made

    def _put_all(self, made: Any, place: torch.device, *, only_new: bool = False) -> None:
        for tensor in _tensors(made):
            if not only_new or self.place_of(tensor) is None:
                self.put(tensor, place)


def _is_sharding() -> bool:
    """True for calls by torch's own sharding, whose mesh is on the CPU: it moves nothing, and names no other place."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "/torch/distributed/" in frame.f_code.co_filename


def _asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Place that a call of `Tensor.to` names."""
    for value in (kwargs.get("device"), *args[:1]):
        if isinstance(value, torch.device | str):
            return torch.device(value)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _key(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Storage of a tensor; None for one without, as a sharded one."""
    if is_traceable_wrapper_subclass(tensor) or isinstance(tensor, FakeTensor):
        return None
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(tensor.untyped_storage()) if tensor.is_cpu else None
