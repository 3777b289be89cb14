"""Step time by phase and peak memory of a rank: input of the performance model."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from clusterd.train.process import accelerator

EVERY = 5
"""Interval, in steps, between two steps that are timed by phase."""


class PhaseClock:
    """Seconds of each phase of a step: by CUDA events on GPUs, by the monotonic clock elsewhere.

    Costs nothing on steps that are not timed, and never makes the device wait: a timed step is read after the next one
    is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = accelerator.of(device)
        self._marks: list[tuple[str, Any]] = []
        self._before: list[tuple[str, Any]] = []  # of the previous step
        self._on = False

    def begin(self, step: int) -> None:
        """Begin a step; every `EVERY`-th is timed."""
        self._on = step % EVERY == 0
        self._before, self._marks = self._marks, []
        self.lap("")

    def restart(self) -> None:
        """Begin the current step anew: something else took time before its first phase."""
        self._marks = []
        self.lap("")

    def lap(self, name: str) -> None:
        """End the phase `name`, which began at the last lap."""
        if not self._on:
            return
        mark: Any = time.perf_counter() if self._gpu is None else self._gpu.record_event(timed=True)
        self._marks.append((name, mark))

    def read(self) -> dict[str, float]:
        """Seconds of each phase of the previous step; empty if it was not timed."""
        marks, self._before = self._before, []
        if self._gpu is not None and marks:
            marks[-1][1].synchronize()  # its optimizer update may still be running
        phases: dict[str, float] = {}
        for (_, before), (name, after) in itertools.pairwise(marks):
            if self._gpu is not None:
                seconds = before.elapsed_time(after) / 1e3
            else:
                seconds = after - before
            phases[name] = phases.get(name, 0.0) + seconds
        return {name: round(seconds, 6) for name, seconds in phases.items()}


class MemoryUse:
    """Memory of this rank: input of the plans' memory estimates.

    Args:
        alone: no rank of another generation uses the device, whose use beside tensors then is this rank's.
    """

    def __init__(self, device: torch.device, *, alone: bool) -> None:
        self._gpu = accelerator.of(device)
        self._alone = alone
        self._overhead_bytes = 0  # measured once

    def read(self) -> dict[str, int]:
        """Peak bytes on the device and in host memory (for a CPU device both are host memory), and the overhead.

        The overhead is device memory in use that no tensor accounts for: context, kernels and communicators. Other
        processes count, too; those of more than a display keep the device from being offered.
        """
        host_bytes = 0
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    host_bytes = int(line.split()[1]) * 1024
        if self._gpu is None:
            return {"device_bytes": host_bytes, "host_bytes": host_bytes}
        found = {"device_bytes": self._gpu.peak_bytes(), "host_bytes": host_bytes}
        if self._alone:
            if not self._overhead_bytes:
                free, total = self._gpu.memory_bytes()
                self._overhead_bytes = max(total - free - self._gpu.reserved_bytes(), 0)
            found["overhead_bytes"] = self._overhead_bytes
        return found
