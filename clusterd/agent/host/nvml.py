"""GPUs of this host and their MIG slices, read through the driver's NVML library.

Names and structures follow NVIDIA's NVML API Reference. Entry points that every driver since 510 (2021) has are called
without checking that they exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from clusterd.agent.host import processes

_SUCCESS = 0
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_INSUFFICIENT_SIZE = 7
_DRIVER_NOT_LOADED = 9
_LIBRARY_MISMATCH = 18
_NOT_AVAILABLE = (1 << 64) - 1
_PROCESSES_MAX = 1024
_MODE_EXCLUSIVE, _MODE_PROHIBITED = 3, 2
_NO_SLICES = (
    "MIG is on, and there is no slice (`nvidia-smi mig -cgi PROFILE -C` creates one, `nvidia-smi -mig 0` ends MIG)"
)
PROHIBITED = "its compute mode prohibits all processes (`nvidia-smi -c 0` as root allows them)"


class NvmlError(Exception):
    """The driver returned an error."""


class _NotOffered(NvmlError):
    """A healthy GPU that clusterd may not use; reloading the library would not change that."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):  # nvmlProcessInfo_v2_t, of the _v2 and _v3 entry points
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_POWER, _CELSIUS = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"  # in milliwatts; of sensor 0, the GPU

Gpu = dict[str, Any]


class Nvml:
    """The loaded NVML library. An agent holds one: initialising it takes the driver tens of milliseconds.

    Attributes:
        is_stale: a call failed in a way that reloading the library may cure.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.is_stale = False
        self._check(self._call("nvmlInit_v2"))

    def close(self) -> None:
        """Shut the library down. It is reference-counted: only the first `nvmlInit` after the last shutdown rescans."""
        self._call("nvmlShutdown")

    def gpus(self) -> tuple[list[Gpu], str | None]:
        """List the GPUs, each with the pids and bytes of the processes that use its memory (None: bytes unknown).

        `memory_used_bytes` is None for a GPU that shares the host's memory, where other data may lie as well.

        Returns:
            The GPUs that respond, and the errors of the others, joined; None if there are none.
        Raises:
            NvmlError: the driver refused, for example because it was upgraded while its old kernel module is loaded.
        """
        count = ctypes.c_uint()
        self.is_stale = True
        self._check(self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)))
        found, wrong = [], []
        self.is_stale = False
        for index in range(count.value):
            try:
                found += self._devices(index)
            except NvmlError as error:  # a GPU that fell off the bus does not affect the others
                wrong.append(f"GPU {index}: {error}")
                self.is_stale |= not isinstance(error, _NotOffered)
        return found, "; ".join(wrong) or None

    def _devices(self, index: int) -> list[Gpu]:
        """The GPU at `index`, or its MIG slices: with MIG on, CUDA runs nothing on the whole GPU."""
        handle = ctypes.c_void_p()
        self._check(self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if not self._supports("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending)):
            mode.value = 0
        exclusive = self._is_exclusive(handle)
        capability = self._compute_capability(handle)
        if not mode.value:
            return [{**self._device(handle), "index": index, "exclusive": exclusive, "compute_capability": capability}]
        slices = []
        for number, slice_handle in self._slices(handle):
            device = self._device(slice_handle)
            if " MIG " not in device["name"]:  # slices of another size are devices of another speed
                device["name"] += f" MIG {round(device['memory_bytes'] / (1 << 30))}gb"
            place = {"index": index, "slice": number}
            slices.append({**device, **place, "exclusive": exclusive, "compute_capability": capability})
        if not slices:
            raise _NotOffered(_NO_SLICES)
        return slices

    def _slices(self, handle: ctypes.c_void_p) -> Iterator[tuple[int, ctypes.c_void_p]]:
        """Number and handle of each MIG slice of a GPU; numbers may have gaps."""
        count = ctypes.c_uint()
        self._check(self._call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(count)))
        for number in range(count.value):
            found = ctypes.c_void_p()
            code = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(number), ctypes.byref(found))
            if code != _NOT_FOUND:
                self._check(code)
                yield number, found

    def _is_exclusive(self, handle: ctypes.c_void_p) -> bool:
        compute = ctypes.c_uint()
        if not self._supports("nvmlDeviceGetComputeMode", handle, ctypes.byref(compute)):
            compute.value = 0
        if compute.value == _MODE_PROHIBITED:
            raise _NotOffered(PROHIBITED)
        return compute.value == _MODE_EXCLUSIVE

    def _device(self, handle: ctypes.c_void_p) -> Gpu:
        """Facts of a GPU or a slice that its own handle returns."""
        memory = _Memory()
        code = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        if code == _NOT_SUPPORTED:
            memory = _Memory(total=processes.machine_memory_bytes()[0])  # the GPU has no memory of its own
        else:
            self._check(code)
        power, celsius = ctypes.c_uint(), ctypes.c_uint()
        utilisation = _Utilisation()
        known = self._supports("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilisation))
        # If the GPU's memory is a NUMA node of the host, the kernel's page cache may occupy it.
        shared = code == _NOT_SUPPORTED or self._supports(
            "nvmlDeviceGetNumaNodeId", handle, ctypes.byref(ctypes.c_uint())
        )
        return {
            "uuid": self._text("nvmlDeviceGetUUID", handle),
            "name": self._text("nvmlDeviceGetName", handle),
            "memory_bytes": memory.total,
            "memory_used_bytes": None if shared else memory.used,
            "utilisation": utilisation.gpu / 100 if known else None,
            "power_w": power.value / 1000 if self._supports(_POWER, handle, ctypes.byref(power)) else None,
            "temperature_c": celsius.value if self._supports(_CELSIUS, handle, 0, ctypes.byref(celsius)) else None,
            "processes": self._processes(handle),
        }

    def _compute_capability(self, handle: ctypes.c_void_p) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        known = self._supports("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}" if known else ""

    def _processes(self, handle: ctypes.c_void_p) -> list[dict[str, Any]]:
        found: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics"):
            for entry in self._process_list(f"nvmlDeviceGet{kind}RunningProcesses", handle):
                found[entry.pid] = None if entry.used == _NOT_AVAILABLE else entry.used
        return [{"pid": pid, "memory_bytes": used} for pid, used in sorted(found.items())]

    def _process_list(self, name: str, handle: ctypes.c_void_p) -> list[_Process]:
        entries = (_Process * _PROCESSES_MAX)()
        for suffix in ("_v2", "_v3"):  # _v3 fills a longer structure in drivers 535.43 to 535.86
            if not hasattr(self._library, name + suffix):
                continue
            count = ctypes.c_uint(_PROCESSES_MAX)
            code = self._call(name + suffix, handle, ctypes.byref(count), entries)
            if code in (_SUCCESS, _INSUFFICIENT_SIZE):
                return list(entries[: min(count.value, _PROCESSES_MAX)])
        return []

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._check(self._call(name, handle, buffer, ctypes.c_uint(96)))
        return buffer.value.decode(errors="replace")

    def _supports(self, name: str, *arguments: Any) -> bool:
        """Call an optional entry point; false if the driver or the GPU does not support it."""
        return hasattr(self._library, name) and self._call(name, *arguments) == _SUCCESS

    def _call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def _check(self, code: int) -> None:
        if code == _SUCCESS:
            return
        if code == _LIBRARY_MISMATCH:
            raise NvmlError("driver/library version mismatch: the NVIDIA driver was upgraded in use; reboot this host")
        if code == _DRIVER_NOT_LOADED:
            raise NvmlError("the NVIDIA kernel driver is not loaded: run `nvidia-smi` as root, or reboot this host")
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        text = self._library.nvmlErrorString(code)
        kind = _NotOffered if code == _NO_PERMISSION else NvmlError
        raise kind(f"the NVIDIA driver reports: {text.decode(errors='replace') if text else f'error {code}'}")
