"""State that target ranks read from the memory of the device that they share with a source rank.

The source rank describes where its tensors lie, while it trains; target ranks open that memory, which takes the driver
some time, and answer. At the switch the bytes are copied once, on the device. Where anything is in the way, all of the
rank's state goes through host memory, and the job's log says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from clusterd.train.process import accelerator
from clusterd.train.process.cuda_ipc import DriverRefused
from clusterd.train.state.copying import SegmentPart


class NotShared(Exception):
    """The memory cannot be read by other processes."""


def describe(gpu: Any, parts: Sequence[SegmentPart]) -> bytes:
    """Handles of the memory in which the parts' tensors lie, and each tensor's place in it.

    Raises:
        NotShared: names what is in the way.
    """
    memory: list[tuple[bytes, int]] = []
    numbers: dict[int, int] = {}  # in `memory`, by address
    places: list[list[tuple[int, int, str, tuple[int, ...], tuple[int, ...]]]] = []
    try:
        for part in parts:
            places.append([])
            for tensor in part.tensors:
                if tensor is None or accelerator.of(tensor.device) is not gpu:
                    raise NotShared("some of the state is not on the device")
                base, size_bytes = gpu.allocation_of(tensor.data_ptr())
                if base not in numbers:
                    numbers[base] = len(memory)
                    memory.append((gpu.handle_of(base), size_bytes))
                dtype = str(tensor.dtype).removeprefix("torch.")
                place = (numbers[base], tensor.data_ptr() - base, dtype, tuple(tensor.shape), tensor.stride())
                places[-1].append(place)
    except DriverRefused as error:
        raise NotShared(str(error)) from error
    packed: bytes = msgpack.packb((memory, places))
    return packed


class OpenedMemory:
    """Device memory of source ranks, opened by a target rank."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._opened: dict[bytes, tuple[int, torch.Tensor]] = {}  # address and bytes, by handle

    def tensors(self, description: bytes) -> list[list[torch.Tensor]]:
        """The tensors of each described part.

        Raises:
            NotShared: the driver does not open the memory.
        """
        memory, places = msgpack.unpackb(description)
        try:
            for handle, size_bytes in memory:
                if handle not in self._opened:
                    self._opened[handle] = self._gpu.open_handle(handle, size_bytes)
        except DriverRefused as error:
            raise NotShared(str(error)) from error
        return [[self._tensor(memory[number][0], *place) for number, *place in part] for part in places]

    def _tensor(self, handle: bytes, offset: int, dtype: str, shape: list[int], stride: list[int]) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        flat = self._opened[handle][1][offset : offset + count * kind.itemsize].view(kind)
        return flat.as_strided(shape, stride)

    def close(self) -> None:
        """Close the memory; no tensor of it may be used afterwards."""
        for address, _ in self._opened.values():
            self._gpu.close_handle(address)
        self._opened.clear()
