"""Probe of the GPUs of this host by the driver's NVML library."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import Future, TimeoutError
from pathlib import Path

from clusterd.agent.host.nvml import KERNEL_LOG, Gpu, Nvml, NvmlError, Xids

DRIVER_ANSWERS_S = 20.0
"""A driver that takes longer hangs, as after some hardware faults: its calls never return."""

DRIVER_DEVICE = Path("/dev/nvidiactl")
"""It is there where a driver is, but not in a container without GPUs."""


class Probe:
    """Lists the GPUs of this host."""

    def __init__(
        self,
        library: str = "libnvidia-ml.so.1",
        answers_s: float = DRIVER_ANSWERS_S,
        kernel_log: Path = KERNEL_LOG,
        driver_device: Path = DRIVER_DEVICE,
    ) -> None:
        self._library = library
        self._answers_s = answers_s
        self._driver_device = driver_device
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
        except OSError as error:
            why = f"the NVIDIA driver is there, but its library cannot be loaded: {error}"
            return [], why if self._driver_device.exists() else None
        except (NvmlError, AttributeError) as error:
            found, wrong = [], str(error)
        if self._nvml is not None and self._nvml.is_stale:
            self._nvml.close()
            self._nvml = None  # the next call reloads it: the GPU may have been reset, or the driver restarted
        return found, wrong
