"""A GPU as a rank uses it: streams, events, pinned memory and queries of its memory.

The only module of clusterd.train that calls `torch.cuda`, so that tests can run its callers on a stand-in: they replace
the entry of `KINDS` for a kind of device.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from clusterd.train.process import cuda_ipc


class Cuda:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Any] = {}

    # --- order of work ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for everything that is queued on the device."""
        torch.cuda.synchronize(self.device)

    def current_stream(self) -> Any:
        """Stream to which this thread queues its work."""
        return torch.cuda.current_stream(self.device)

    def side_stream(self, purpose: str) -> Any:
        """The stream of one purpose, beside those of the model.

        Always the same: torch cycles through 32 streams, so a new one may already be in use, and caches memory for each
        separately.
        """
        if purpose not in self._streams:
            self._streams[purpose] = torch.cuda.Stream(self.device)
        return self._streams[purpose]

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which this thread queues its work to `stream`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def record_event(self, stream: Any = None, *, timed: bool = False) -> Any:
        """Event that happens once the work queued so far is done."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(*([] if stream is None else [stream]))
        return event

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """Reuse the tensor's memory only once `stream` is done with what it has now."""
        tensor.record_stream(stream)

    # --- memory -------------------------------------------------------------------------------------------------------

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New tensor in pinned host memory, without values."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def register(self, address: int, size_bytes: int) -> bool:
        """Pin host memory that exists; false if the driver refuses."""
        if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)  # CUDA raises the refusal again at the next kernel: make it this one
        return False

    def unregister(self, address: int) -> None:
        """Unpin host memory that was pinned as a whole from this address on."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total memory of the device, other processes included."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def reserved_bytes(self) -> int:
        """Memory that torch's allocator holds, in use or cached."""
        return int(torch.cuda.memory_reserved(self.device))

    def peak_bytes(self) -> int:
        """Peak of the memory in use by tensors."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Return the memory that torch caches to the device, for other processes."""
        torch.cuda.empty_cache()

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Address and size of the allocation that an address of this process lies in."""
        self._bind()
        return cuda_ipc.allocation_of(address)

    def handle_of(self, base: int) -> bytes:
        """Handle by which another process on this device opens an allocation.

        Raises:
            cuda_ipc.DriverRefused: memory of this kind has none.
        """
        self._bind()
        return cuda_ipc.handle_of(base)

    def open_handle(self, handle: bytes, size_bytes: int) -> tuple[int, torch.Tensor]:
        """Address and bytes of an allocation of another process; for as long as it is not closed.

        Raises:
            cuda_ipc.DriverRefused: it cannot be opened.
        """
        self._bind()
        address = cuda_ipc.open_handle(handle)
        return address, torch.as_tensor(_Memory(address, size_bytes), device=self.device)

    def close_handle(self, address: int) -> None:
        """Unmap what was opened; using its tensor afterwards fails the context."""
        self._bind()
        cuda_ipc.close_handle(address)

    def _bind(self) -> None:
        """Make torch's context the current one of this thread, as the driver's own calls need it."""
        torch.cuda.set_device(self.device)
        torch.cuda.mem_get_info(self.device)

    def limit_memory(self, size_bytes: int | None) -> None:
        """Let torch's allocator hold so much and no more; None: all of the device."""
        _, total = self.memory_bytes()
        share = 1.0 if size_bytes is None else min(size_bytes / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self.device)


class _Memory:
    """Bytes on a device, in the form in which torch takes them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


KINDS: dict[str, Callable[[torch.device], Any]] = {"cuda": Cuda}

_made: dict[tuple[Any, torch.device], Any] = {}


def of(device: torch.device) -> Any:
    """The accelerator behind a device; None for a CPU, whose work is done when a call returns."""
    kind = KINDS.get(device.type)
    if kind is None:
        return None
    if (kind, device) not in _made:
        _made[kind, device] = kind(device)
    return _made[kind, device]


def name_of(device: torch.device) -> str:
    """Name by which equal devices are equal: that of the GPU, or of the CPU's host."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else platform.node()


def is_in_use() -> bool:
    """True if this process has a CUDA context."""
    return bool(torch.cuda.is_initialized())


def is_there() -> bool:
    """True if torch can use a CUDA device; creates no context."""
    return bool(torch.cuda.is_available())


def select(number: int) -> torch.device:
    """Make a visible CUDA device this process's own, and compute on it: a driver may list one that runs no kernel.

    Raises:
        RuntimeError: it cannot compute.
    """
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.zeros(1, device=device).add_(1).item()
    return device
