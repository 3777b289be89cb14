"""Phases of a rank's start, from its process to the end of its first step."""

from __future__ import annotations

import os
import time

PHASES = ("process", "proof", "context", "build", "first step")
"""Imports and the script up to its model; proof that the plan trains as one process does; device and process groups;
model and optimizer with their values; first step, in which kernels are loaded and memory is first used."""


class StartPhases:
    """Seconds of each phase so far.

    Attributes:
        began_s: wall time at which the process was forked.
        seconds: by phase, in their order.
    """

    def __init__(self) -> None:
        self.began_s = self._ended_s = _process_start_s()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now_s = time.time()
        self.seconds[phase] = round(max(now_s - self._ended_s, 0.0), 3)
        self._ended_s = now_s

    def record(self) -> dict[str, float]:
        """Fields of a step's row."""
        return {"began_s": round(self.began_s, 3), **self.seconds}


def _process_start_s() -> float:
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        age_s = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
