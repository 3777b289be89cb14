"""Use of devices over virtual time."""

from __future__ import annotations

from clusterd.simulate.runs import Run
from clusterd.types import JobId


class Usage:
    """Jobs with and without devices, and the device time in all.

    Attributes:
        running: jobs with devices.
        waiting: jobs without.
        device_s: of leased devices.
        idle_s: of devices that nobody held while a job waited.
    """

    def __init__(self) -> None:
        self.running: dict[JobId, Run] = {}
        self.waiting: dict[JobId, Run] = {}
        self.device_s = self.idle_s = 0.0

    def add(self, passed_s: float, leased: int, free: int) -> None:
        """Account for a time in which so many devices were leased and free."""
        for run in self.running.values():
            run.device_s += passed_s * run.devices
        for run in self.waiting.values():
            run.waited_s += passed_s
        self.device_s += passed_s * leased
        if self.waiting:
            self.idle_s += passed_s * free

    def start(self, run: Run) -> None:
        """Record that a job got devices."""
        self.waiting.pop(run.job, None)
        self.running[run.job] = run

    def end(self, run: Run) -> None:
        """Record that a job has no devices, and wants none."""
        self.running.pop(run.job, None)
        self.waiting.pop(run.job, None)
        run.devices = 0

    def requeue(self, run: Run) -> None:
        """Record that a job lost its devices and waits for others."""
        self.end(run)
        self.waiting[run.job] = run
