"""GPUs of this host and their MIG slices, read through the driver's NVML library, and the errors of each.

Names and structures follow NVIDIA's NVML API Reference. Entry points that every driver since 510 (2021) has are called
without checking that they exist. An XID is the number of a driver's error message in the kernel log, which has those
since boot, where this user may read it; elsewhere NVML's events have those since the agent started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterd.agent.host import processes

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # longest record of /dev/kmsg
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")

FATAL_XIDS = {
    48: "uncorrectable ECC error",
    62: "its power controller halted",
    64: "faulty memory could not be retired",
    74: "NVLink error",
    79: "it fell off the bus",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "its firmware failed",
    140: "unrecovered ECC error",
    143: "it failed to initialise",
}
"""XIDs after which NVIDIA's catalog asks for a reset or an inspection; others follow from errors of programs."""

RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the host",
    3: "an end of all traffic between GPUs",
    4: "a reset of the GPU, which runs at reduced capacity",
    5: "a reset of its bus",
}
"""Actions that a driver (since 570) asks for."""


class Xids:
    """Counts of XIDs by PCI address."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._found: dict[str, Counter[int]] = defaultdict(Counter)
        self._file: int | None = None
        with contextlib.suppress(OSError):  # absent in containers, for root alone on most systems
            self._file = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)

    def of(self, pci_address: str) -> dict[int, int]:
        """Count of each XID of the GPU at this address."""
        return dict(self._found.get(_short(pci_address), {}))

    def add(self, pci_address: str, xid: int) -> None:
        """Take an NVML event; ignored where the kernel log has it, too."""
        if self._file is None:
            self._found[_short(pci_address)][xid] += 1

    def read(self) -> None:
        """Read what the kernel has logged since the last call."""
        if self._file is None:
            return
        while True:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BrokenPipeError:  # the next records were overwritten before they were read
                continue
            except OSError:  # no further record
                return
            if not record:
                return
            for address, number in _XID.findall(record):
                self._found[_short(address.decode())][int(number)] += 1


def _short(pci_address: str) -> str:
    """Address without function, in lower case: 0000:3b:00; NVML gives the domain eight digits, the kernel four."""
    domain, _, rest = pci_address.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def fault(xids: Mapping[int, int], uncorrected: int, remap_failed: bool, recovery: int) -> str:
    """Reason why a GPU is unfit for jobs until it is reset or replaced; empty: it is fit.

    Args:
        xids: count of each since boot.
        uncorrected: ECC errors that were not corrected, since the driver was loaded or the GPU reset.
        remap_failed: faulty rows of its memory could not be replaced by spare ones.
        recovery: action that the driver asks for; 0: none, or not reported.
    """
    found = [
        f"XID {xid} ({FATAL_XIDS[xid]})" + (f" {count} times" if count > 1 else "")
        for xid, count in xids.items()
        if xid in FATAL_XIDS
    ]
    if uncorrected:
        found.append(f"{uncorrected} uncorrectable ECC error{'s' * (uncorrected > 1)}")
    if remap_failed:
        found.append("its memory has no spare rows left: it needs replacement")
    if recovery:
        found.append(f"its driver asks for {RECOVERY_ACTIONS.get(recovery, f'recovery action {recovery}')}")
    return "; ".join(found)


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
_PROHIBITED = "its compute mode prohibits all processes (`nvidia-smi -c 0` as root allows them)"


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


class _Pci(ctypes.Structure):  # nvmlPciInfo_t, of the _v3 entry point
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("address", ctypes.c_char * 32),
    ]


class _Event(ctypes.Structure):  # nvmlEventData_t
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Field(ctypes.Structure):  # nvmlFieldValue_t
    _fields_ = [
        ("id", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("code", ctypes.c_int),
        ("value", ctypes.c_uint),  # of a union of eight bytes
        ("rest", ctypes.c_uint),
    ]


_XID_EVENT = 8
_RECOVERY_ACTION = 230  # a field, since driver 570
_CORRECTED, _UNCORRECTED, _SINCE_LOAD = 0, 1, 0
_EVENTS_MAX = 256  # at once
_OVER_NVLINK, _P2P_WORKS = 2, 0
_NVLINKS_MAX = 18
_SLOWDOWNS = {0x40: "it is too hot", 0x80: "its power supply asks for it", 0x8: "its hardware asks for it"}
"""Reasons for lower clocks that no setting has, by their bits: cooling, power brake, and others."""
_SET_CLOCKS = 0x2
_POWER, _CELSIUS = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"  # in milliwatts; of sensor 0, the GPU

Gpu = dict[str, Any]


class Nvml:
    """The loaded NVML library. An agent holds one: initialising it takes the driver tens of milliseconds.

    Attributes:
        is_stale: a call failed in a way that reloading the library may cure.
    """

    def __init__(self, library: ctypes.CDLL, xids: Xids) -> None:
        self._library = library
        self._xids = xids
        self.is_stale = False
        self._check(self._call("nvmlInit_v2"))
        self._events: ctypes.c_void_p | None = ctypes.c_void_p()
        if not self._supports("nvmlEventSetCreate", ctypes.byref(self._events)):
            self._events = None
        self._watched: set[str] = set()  # GPUs whose XIDs are events of the set

    def close(self) -> None:
        """Shut the library down. It is reference-counted: only the first `nvmlInit` after the last shutdown rescans."""
        if self._events is not None:
            self._call("nvmlEventSetFree", self._events)
            self._events = None
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
        self._read_events()
        self._xids.read()
        for index in range(count.value):
            try:
                found += self._devices(index)
            except NvmlError as error:  # a GPU that fell off the bus does not affect the others
                wrong.append(f"GPU {index}: {error}")
                self.is_stale |= not isinstance(error, _NotOffered)
        self._add_nvlinks(found)
        return found, "; ".join(wrong) or None

    def _add_nvlinks(self, gpus: list[Gpu]) -> None:
        """Set the uuids of the GPUs that each reaches over NVLink, directly or through a switch."""
        whole = [gpu for gpu in gpus if "slice" not in gpu]
        for gpu in whole:
            reached = [other["uuid"] for other in whole if self._is_nvlinked(gpu["index"], other["index"])]
            gpu["nvlink_peers"] = [uuid for uuid in reached if uuid != gpu["uuid"]]

    def _is_nvlinked(self, index: int, other: int) -> bool:
        handles = [ctypes.c_void_p(), ctypes.c_void_p()]
        for number, handle in zip((index, other), handles, strict=True):
            if self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(handle)):
                return False
        status = ctypes.c_int(-1)
        known = self._supports("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(_OVER_NVLINK), ctypes.byref(status))
        return known and status.value == _P2P_WORKS

    def _bus(self, handle: ctypes.c_void_p) -> Gpu:
        """Generation and width of a GPU's PCIe slot, and its active NVLinks; 0: not reported."""
        generation, width, version = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        self._supports("nvmlDeviceGetMaxPcieLinkGeneration", handle, ctypes.byref(generation))
        self._supports("nvmlDeviceGetMaxPcieLinkWidth", handle, ctypes.byref(width))
        links = 0
        for number in map(ctypes.c_uint, range(_NVLINKS_MAX)):
            active = ctypes.c_uint()
            if self._supports("nvmlDeviceGetNvLinkState", handle, number, ctypes.byref(active)) and active.value:
                links += 1
                self._supports("nvmlDeviceGetNvLinkVersion", handle, number, ctypes.byref(version))
        return {
            "pcie_generation": generation.value,
            "pcie_width": width.value,
            "nvlinks": links,
            "nvlink_version": version.value,
        }

    def _devices(self, index: int) -> list[Gpu]:
        """The GPU at `index`, or its MIG slices: with MIG on, CUDA runs nothing on the whole GPU."""
        handle = ctypes.c_void_p()
        self._check(self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if not self._supports("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending)):
            mode.value = 0
        exclusive = self._is_exclusive(handle)
        whole = {"index": index, "exclusive": exclusive, "compute_capability": self._compute_capability(handle)}
        whole |= self._health(handle) | self._bus(handle)
        if not mode.value:
            return [{**self._device(handle), **whole}]
        slices = []
        for number, slice_handle in self._slices(handle):
            device = self._device(slice_handle)
            if " MIG " not in device["name"]:  # slices of another size are devices of another speed
                device["name"] += f" MIG {round(device['memory_bytes'] / (1 << 30))}gb"
            slices.append({**device, **whole, "slice": number})
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
            raise _NotOffered(_PROHIBITED)
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

    def _health(self, handle: ctypes.c_void_p) -> Gpu:
        """PCI address of a GPU, its errors, and the reason why they make it unfit for jobs."""
        pci = self._pci_address(handle)
        if self._events is not None and pci not in self._watched:
            self._supports("nvmlDeviceRegisterEvents", handle, ctypes.c_ulonglong(_XID_EVENT), self._events)
            self._watched.add(pci)
        # Corrected and uncorrected rows, whether a reset is to replace rows, and whether that failed.
        rows = [ctypes.c_uint() for _ in range(4)]
        known = self._supports("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
        field = _Field(id=_RECOVERY_ACTION)
        asked = self._supports("nvmlDeviceGetFieldValues", handle, ctypes.c_int(1), ctypes.byref(field))
        recovery = int(field.value) if asked and field.code == _SUCCESS else 0
        xids, uncorrected = self._xids.of(pci), self._ecc_errors(handle, _UNCORRECTED)
        return {
            "pci_address": pci,
            "xids": {str(xid): count for xid, count in xids.items()},
            "ecc_corrected": self._ecc_errors(handle, _CORRECTED),
            "ecc_uncorrected": uncorrected,
            "fault": fault(xids, uncorrected or 0, known and rows[3].value != 0, recovery),
            "notes": self._notes(handle),
        }

    def _notes(self, handle: ctypes.c_void_p) -> list[str]:
        """Settings and states that make a GPU slow, or hide its errors, each with its remedy."""
        cap, usual, ecc, later = (ctypes.c_uint() for _ in range(4))
        reasons, found = ctypes.c_ulonglong(), []
        known = self._supports("nvmlDeviceGetPowerManagementLimit", handle, ctypes.byref(cap))
        known = known and self._supports("nvmlDeviceGetPowerManagementDefaultLimit", handle, ctypes.byref(usual))
        if known and cap.value < usual.value:
            watts = usual.value // 1000
            found.append(f"its power is capped at {cap.value // 1000} of {watts} W: `nvidia-smi -pl {watts}` as root")
        self._supports("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        if reasons.value & _SET_CLOCKS:
            found.append("its clocks are set lower: `nvidia-smi -rac` and `-rgc` as root reset them")
        found += [f"its clocks are lowered: {why}" for bit, why in _SLOWDOWNS.items() if reasons.value & bit][:1]
        if self._supports("nvmlDeviceGetEccMode", handle, ctypes.byref(ecc), ctypes.byref(later)) and not ecc.value:
            found.append("ECC is off, so that nobody sees errors of its memory: `nvidia-smi -e 1` as root, and a reset")
        return found

    def _ecc_errors(self, handle: ctypes.c_void_p, kind: int) -> int | None:
        """ECC errors since the driver was loaded or the GPU reset; None: the GPU does not count them."""
        count = ctypes.c_ulonglong()
        arguments = (ctypes.c_int(kind), ctypes.c_int(_SINCE_LOAD), ctypes.byref(count))
        return count.value if self._supports("nvmlDeviceGetTotalEccErrors", handle, *arguments) else None

    def _pci_address(self, handle: ctypes.c_void_p) -> str:
        pci = _Pci()
        known = self._supports("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        return pci.address.decode(errors="replace").lower() if known else ""

    def _read_events(self) -> None:
        """Take the XIDs that have come since the last call."""
        for _ in range(_EVENTS_MAX):
            event = _Event()
            if self._events is None or self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0):
                return  # none, or this driver does not deliver them
            if event.type == _XID_EVENT:
                self._xids.add(self._pci_address(ctypes.c_void_p(event.device)), int(event.data))

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
