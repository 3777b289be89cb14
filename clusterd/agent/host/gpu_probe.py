"""Probe of the GPUs of this host: the driver's NVML library, or `nvidia-smi` if that cannot be loaded."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
import time
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

from clusterd.agent.host import processes
from clusterd.agent.host.nvml import KERNEL_LOG, PROHIBITED, Gpu, Nvml, NvmlError, Xids

DRIVER_ANSWERS_S = 20.0
"""A driver that takes longer hangs, as after some hardware faults: its calls never return."""

_NO_SUCH_VALUE = ("[N/A]", "[Not Supported]")
_MIG_IS_ON = "MIG is on, and the memory of slices is read from libnvidia-ml.so.1 only, which is missing on this host"


class Probe:
    """Lists the GPUs of this host, with NVML or `nvidia-smi`, whichever works."""

    def __init__(
        self,
        library: str = "libnvidia-ml.so.1",
        program: str = "nvidia-smi",
        answers_s: float = DRIVER_ANSWERS_S,
        kernel_log: Path = KERNEL_LOG,
    ) -> None:
        self._library = library
        self._program = program
        self._answers_s = answers_s
        self._nvml: Nvml | None = None
        self._xids = Xids(kernel_log)
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
                self._nvml = Nvml(ctypes.CDLL(self._library), self._xids)
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
            wrong.append(f"GPU {index}: {_MIG_IS_ON if mig == 'Enabled' else PROHIBITED}")
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
