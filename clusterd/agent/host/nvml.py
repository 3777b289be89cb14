"""GPUs of this host, read through the driver's NVML library, or through `nvidia-smi` if that cannot be loaded.

Names and structures follow NVIDIA's NVML API Reference. Entry points that every driver since 510 (2021) has are called
without checking that they exist.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
import time
from concurrent.futures import Future, TimeoutError
from typing import Any

from clusterd.agent.host import processes

_SUCCESS = 0
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_INSUFFICIENT_SIZE = 7
_DRIVER_NOT_LOADED = 9
_LIBRARY_MISMATCH = 18
_NOT_AVAILABLE = (1 << 64) - 1
_PROCESSES_MAX = 1024
_MODE_EXCLUSIVE, _MODE_PROHIBITED = 3, 2
_MIG_IS_ON = "MIG is on: GPUs partitioned into instances are not used (turn it off with `nvidia-smi -mig 0`)"
_PROHIBITED = "its compute mode prohibits all processes (`nvidia-smi -c 0` as root allows them)"
DRIVER_ANSWERS_S = 20.0
"""A driver that takes longer hangs, as after some hardware faults: its calls never return."""

_NO_SUCH_VALUE = ("[N/A]", "[Not Supported]")


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
                found.append(self._gpu(index))
            except NvmlError as error:  # a GPU that fell off the bus does not affect the others
                wrong.append(f"GPU {index}: {error}")
                self.is_stale |= not isinstance(error, _NotOffered)
        return found, "; ".join(wrong) or None

    def _gpu(self, index: int) -> Gpu:
        handle = ctypes.c_void_p()
        self._check(self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if self._supports("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending)) and mode.value:
            raise _NotOffered(_MIG_IS_ON)
        compute = ctypes.c_uint()
        if not self._supports("nvmlDeviceGetComputeMode", handle, ctypes.byref(compute)):
            compute.value = 0
        if compute.value == _MODE_PROHIBITED:
            raise _NotOffered(_PROHIBITED)
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
            "index": index,
            "name": self._text("nvmlDeviceGetName", handle),
            "exclusive": compute.value == _MODE_EXCLUSIVE,
            "compute_capability": self._compute_capability(handle),
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


_POWER, _CELSIUS = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"  # in milliwatts; of sensor 0, the GPU


class Probe:
    """Lists the GPUs of this host, with NVML or `nvidia-smi`, whichever works."""

    def __init__(
        self,
        library: str = "libnvidia-ml.so.1",
        program: str = "nvidia-smi",
        answers_s: float = DRIVER_ANSWERS_S,
    ) -> None:
        self._library = library
        self._program = program
        self._answers_s = answers_s
        self._nvml: Nvml | None = None
        self._lock = threading.Lock()  # so that no thread closes the library while another uses it
        self._asked_at_s: float | None = None
        self._answer: Future[tuple[list[Gpu], str | None]] | None = None

    def gpus(self) -> tuple[list[Gpu], str | None]:
        """List the GPUs and their errors; without an NVIDIA driver the list is empty, and that is not an error.

        Blocks for `answers_s` at most. A call to a driver that hangs never returns, so it has a thread of its own, and
        no further call is made before it has returned.
        """
        with self._lock:
            if self._answer is None:
                self._answer, self._asked_at_s = Future(), time.monotonic()
                threading.Thread(target=self._ask, args=(self._answer,), name="clusterd-nvml", daemon=True).start()
            answer, asked_at_s = self._answer, self._asked_at_s
        assert asked_at_s is not None
        try:
            found = answer.result(max(self._answers_s - (time.monotonic() - asked_at_s), 0.0))
        except TimeoutError:
            return [], f"the NVIDIA driver has not answered for {time.monotonic() - asked_at_s:.0f} s: reboot this host"
        with self._lock:
            if self._answer is answer:
                self._answer = None
        return found

    def _ask(self, answer: Future[tuple[list[Gpu], str | None]]) -> None:
        try:
            answer.set_result(self._gpus())
        except BaseException as error:
            answer.set_exception(error)

    def _gpus(self) -> tuple[list[Gpu], str | None]:
        try:
            if self._nvml is None:
                self._nvml = Nvml(ctypes.CDLL(self._library))
            found, wrong = self._nvml.gpus()
        except OSError:
            return self._by_program()
        except (NvmlError, AttributeError) as error:
            found, wrong = [], str(error)
        if self._nvml is not None and self._nvml.is_stale:
            self._nvml.close()
            self._nvml = None  # the next call reloads it: the GPU may have been reset, or the driver restarted
        return found, wrong

    def _by_program(self) -> tuple[list[Gpu], str | None]:
        try:
            devices = self._query(
                "--query-gpu=uuid,index,name,memory.total,memory.used,utilization.gpu,mig.mode.current,compute_mode"
            )
            apps = self._query("--query-compute-apps=gpu_uuid,pid,used_gpu_memory")
        except FileNotFoundError:
            return [], None
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"nvidia-smi does not answer: {error}"
        except NvmlError as error:
            return [], str(error)
        try:
            capabilities = self._query("--query-gpu=uuid,compute_cap")
        except (OSError, subprocess.TimeoutExpired, NvmlError):  # drivers before 510 do not know the field
            capabilities = ""
        try:
            return parse_query(devices, apps, capabilities)
        except ValueError as error:
            return [], f"nvidia-smi printed an unknown format: {error}"

    def _query(self, query: str) -> str:
        command = [self._program, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
        text = (done.stdout + done.stderr).strip()
        if text.startswith("No devices were found"):  # some versions exit with 0 then
            return ""
        if done.returncode != 0:
            if "version mismatch" in text:
                raise NvmlError(f"{text.splitlines()[0]}: reboot this host")
            raise NvmlError(f"nvidia-smi fails: {text.splitlines()[0] if text else f'exit code {done.returncode}'}")
        return done.stdout


def parse_query(devices: str, apps: str, capabilities: str = "") -> tuple[list[Gpu], str | None]:
    """Parse the lists of `nvidia-smi`: the usable GPUs, and the errors of the others, joined.

    Raises:
        ValueError: a line has another format.
    """
    users: dict[str, list[dict[str, Any]]] = {}
    for line in filter(None, map(str.strip, apps.splitlines())):
        uuid, pid, used = (part.strip() for part in line.split(","))
        if pid.isdigit():  # nvidia-smi hides the pid of a process that this user may not see
            users.setdefault(uuid, []).append({"pid": int(pid), "memory_bytes": _mebibytes(used)})
    pairs = (line.split(",") for line in capabilities.splitlines() if line.count(",") == 1)
    capability = {
        uuid.strip(): version.strip() for uuid, version in pairs if re.fullmatch(r"\d+\.\d+", version.strip())
    }
    gpus, wrong = [], []
    for line in filter(None, map(str.strip, devices.splitlines())):
        uuid, index, name, total, memory_used, utilisation, mig, mode = (part.strip() for part in line.split(","))
        if mig == "Enabled" or mode == "Prohibited":
            wrong.append(f"GPU {index}: {_MIG_IS_ON if mig == 'Enabled' else _PROHIBITED}")
            continue
        memory_bytes = _mebibytes(total)
        if total in _NO_SUCH_VALUE:
            memory_bytes, _ = processes.machine_memory_bytes()  # the GPU has no memory of its own
        if memory_bytes is None:
            wrong.append(f"GPU {index}: nvidia-smi reports as its memory: {total}")
            continue
        gpus.append(
            {
                "uuid": uuid,
                "index": int(index),
                "name": name,
                "exclusive": mode == "Exclusive_Process",
                "compute_capability": capability.get(uuid, ""),
                "memory_bytes": memory_bytes,
                "memory_used_bytes": _mebibytes(memory_used),
                "utilisation": int(utilisation) / 100 if utilisation.isdigit() else None,
                "processes": users.get(uuid, []),
            }
        )
    return gpus, "; ".join(wrong) or None


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None
