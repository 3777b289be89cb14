"""Device memory of one process in another: the driver's calls, as torch's own sharing counts references in files.

Memory stays mapped after its owner has exited, until the other process closes it too (seen on an H200, driver 580).
Memory of expandable segments (`PYTORCH_CUDA_ALLOC_CONF`), of MIG slices and under WSL has no handles.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DriverRefused(Exception):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


def allocation_of(address: int) -> tuple[int, int]:
    """Address and size of the allocation that an address of this process lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def handle_of(base: int) -> bytes:
    """Handle by which another process opens an allocation."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.data)


def open_handle(handle: bytes) -> int:
    """Map an allocation of another process; return its address here. The driver refuses to open one twice."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    """Unmap what was opened."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverRefused(f"the driver's library cannot be loaded: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise DriverRefused(f"{name}: {(text.value or str(code).encode()).decode()}")
