"""Where the time of a step goes, and the most memory a rank has had: what the performance model learns from."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

EVERY = 5
"""Steps between two that are timed in parts."""


class PhaseClock:
    """Parts of one step in seconds: by the device's own events on CUDA, by the monotonic clock elsewhere.

    Costs nothing on steps that are not timed, and never makes the device wait: the next step is queued before a timed
    one is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._before: list[tuple[str, Any]] = []  # of the step before
        self._on = False

    def begin(self, step: int) -> None:
        """A step begins; every `EVERY`-th is timed."""
        self._on = step % EVERY == 0
        self._before, self._marks = self._marks, []
        self.lap("")

    def lap(self, name: str) -> None:
        """What was done since the last lap was `name`."""
        if not self._on:
            return
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((name, mark))

    def read(self) -> dict[str, float]:
        """Seconds of each phase of the step before the one under way; empty where it was not timed."""
        marks, self._before = self._before, []
        if self._cuda and marks:
            marks[-1][1].synchronize()  # it may have just begun to update parameters
        phases: dict[str, float] = {}
        for (_, before), (name, after) in itertools.pairwise(marks):
            if self._cuda:
                seconds = before.elapsed_time(after) / 1e3
            else:
                seconds = after - before
            phases[name] = phases.get(name, 0.0) + seconds
        return {name: round(seconds, 6) for name, seconds in phases.items()}


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that this rank has had on its device and in host memory; a CPU device is host memory."""
    host = 0
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                host = int(line.split()[1]) * 1024
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)), host
    return host, host
