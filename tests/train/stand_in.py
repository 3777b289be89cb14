"""A stand-in for a GPU over CPU tensors, by which the control flow of ranks on GPUs runs without one.

It does at once what a GPU would queue, records what it is asked for, and checks what a driver would refuse.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from one_device import DEVICE, OneDevice

from clusterd.train import rank_main
from clusterd.train.process import accelerator
from clusterd.train.process.cuda_ipc import DriverRefused
from clusterd.train.state import copying, segments

TOTAL_BYTES = 16 << 30
GROWTH_BYTES = 256 << 20

HANDLE = "qQQ40s"
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class Stream:
    """A stream without a queue."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.at_s <= time.perf_counter()

    def synchronize(self) -> None:
        """Return: nothing is queued."""

    def query(self) -> bool:
        return True


class Event:
    """An event in the past."""

    def __init__(self, *, timed: bool) -> None:
        self.timed, self.at_s = timed, time.perf_counter()

    def synchronize(self) -> None:
        """Return: it has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        assert self.timed and other.timed, "CUDA raises for events without time"
        return (other.at_s - self.at_s) * 1e3


class StandIn:
    """The interface of `clusterd.train.process.accelerator.Cuda`."""

    def __init__(self, device: torch.device | str = "cpu", *, pins: int | None = None) -> None:
        self.device = torch.device(device)
        self.calls: Counter[str] = Counter()
        self.limits: list[int | None] = []
        self.registered: dict[int, int] = {}  # bytes by address
        self.overhead_bytes = 1 << 30
        self.places = OneDevice()
        self.opened: dict[int, tuple[bytes, torch.Tensor]] = {}  # handle and memory of others, by address here
        self.refuses_handles = False
        self._pins = pins  # registrations that the driver grants; None: any number
        self._main, self._streams = Stream(), dict[str, Stream]()

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def current_stream(self) -> Stream:
        return self._main

    def side_stream(self, purpose: str) -> Stream:
        return self._streams.setdefault(purpose, Stream())

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        assert stream in (self._main, *self._streams.values())
        yield

    def record_event(self, stream: Stream | None = None, *, timed: bool = False) -> Event:
        return Event(timed=timed)

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert stream in self._streams.values()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def register(self, address: int, size_bytes: int) -> bool:
        self.calls["register"] += 1
        if self._pins is not None and len(self.registered) >= self._pins:
            return False
        assert size_bytes > 0
        overlapping = [a for a, n in self.registered.items() if a < address + size_bytes and address < a + n]
        assert not overlapping, "CUDA refuses to pin memory twice"
        self.registered[address] = size_bytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def memory_bytes(self) -> tuple[int, int]:
        return TOTAL_BYTES - self.overhead_bytes - self.reserved_bytes(), TOTAL_BYTES

    def reserved_bytes(self) -> int:
        return 1 << 20

    def peak_bytes(self) -> int:
        return 1 << 20

    def reset_peak(self) -> None:
        self.calls["reset_peak"] += 1

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def limit_memory(self, size_bytes: int | None) -> None:
        self.limits.append(size_bytes)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Take a mapping of this process for an allocation, with room to grow, as a heap does."""
        with open("/proc/self/maps") as file:
            for line in file:
                low, high = (int(edge, 16) for edge in line.split(" ", 1)[0].split("-"))
                if low <= address < high:
                    return low, high - low + GROWTH_BYTES
        raise AssertionError(f"nothing is mapped at {address:x}")

    def handle_of(self, base: int) -> bytes:
        self.calls["handle_of"] += 1
        if self.refuses_handles:
            raise DriverRefused("the stand-in gives no handles")
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)  # where only parents may read memory
        _, size_bytes = self.allocation_of(base)
        return struct.pack(HANDLE, os.getpid(), base, size_bytes, b"")

    def open_handle(self, handle: bytes, size_bytes: int) -> tuple[int, torch.Tensor]:
        self.calls["open_handle"] += 1
        assert handle not in [opened for opened, _ in self.opened.values()], "CUDA refuses to open a handle twice"
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
        self.opened[memory.data_ptr()] = handle, memory
        return memory.data_ptr(), memory

    def close_handle(self, address: int) -> None:
        del self.opened[address]

    def fetch(self, tensor: torch.Tensor) -> None:
        """Bring what another process has in its memory now, if the tensor lies in opened memory."""
        start = tensor.data_ptr()
        for address, (handle, memory) in self.opened.items():
            if address <= start < address + memory.nbytes:
                pid, base, _, _ = struct.unpack(HANDLE, handle)
                steps = ((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                length = (1 + sum(steps)) * tensor.element_size()
                _read_memory(pid, base + start - address, start, length)

    def check_copy(self, tensor: torch.Tensor) -> None:
        """Fail where CUDA would refuse to copy from or to this host memory: in two registrations, or half in one.

        Torch copies a tensor with gaps through a buffer of its own, which is not pinned.
        """
        if not tensor.is_contiguous():
            return
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for low, size_bytes in self.registered.items():
            inside = low <= start and stop <= low + size_bytes
            assert inside or stop <= low or low + size_bytes <= start, f"{tensor.shape} crosses a border"


def use_stand_in(pin_bytes: int = 1 << 12) -> StandIn:
    """Make this process take its CPU for a GPU, whose driver pins memory in small chunks."""
    gpu = StandIn()
    accelerator.KINDS["cpu"] = _Kind(gpu)
    segments.PIN_BYTES = pin_bytes
    copy = copying._copy

    def checked(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pair in pairs:
            for tensor in pair:
                gpu.check_copy(tensor)
            gpu.fetch(pair[1])
        copy(pairs)

    copying._copy = checked
    _select_device()
    gpu.places.__enter__()  # to the end of the process
    return gpu


def _select_device() -> None:
    """Select a device that is not the host, and fail at a fork from then on: a CUDA context does not survive it."""
    select = rank_main.device_of

    def fork() -> int:
        raise AssertionError("a process with a CUDA context forks")

    def device_of(context: Any) -> torch.device:
        os.fork = fork
        selected = select(context)
        return DEVICE if selected.type == "cpu" else selected

    rank_main.device_of = device_of


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_memory(pid: int, there: int, here: int, length: int) -> None:
    own, other = _Range(here, length), _Range(there, length)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    read = libc.process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
    assert read == length, os.strerror(ctypes.get_errno())


class _Kind:
    """Kind of device with one device."""

    def __init__(self, gpu: StandIn) -> None:
        self._gpu = gpu

    def __call__(self, device: torch.device) -> StandIn:
        return self._gpu
