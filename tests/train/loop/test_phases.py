"""Step time by phase, on a device that lags behind the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clusterd.train.loop.phases import EVERY, PhaseClock


class Device:
    """Simulated clocks of a GPU and its host; an `Event` completes when all work queued before it is done."""

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0

    def queue(self, seconds: float) -> None:
        self.host_s += 0.001
        self.free_s = max(self.free_s, self.host_s) + seconds

    def event(self, **_: Any) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._at_s = device, 0.0

    def record(self) -> None:
        self._at_s = max(self._device.free_s, self._device.host_s)

    def synchronize(self) -> None:
        self._device.host_s = max(self._device.host_s, self._at_s)

    def elapsed_time(self, other: Event) -> float:
        assert other._at_s <= self._device.host_s, "not done yet"
        return (other._at_s - self._at_s) * 1e3


def test_a_gpu_that_is_behind_its_host_is_timed_and_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models queue work ahead: their phases matter most."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    clock = PhaseClock(torch.device("cuda", 0))
    clock.begin(1)
    read = []
    for step in range(1, 4 * EVERY + 1):
        for name, seconds in (("forward", 0.05), ("backward", 0.1), ("optimizer", 0.01)):
            device.queue(seconds)
            clock.lap(name)
        if phases := clock.read():
            assert device.free_s > device.host_s, "the step after was queued before"
            read.append(phases)
        clock.begin(step + 1)
    assert len(read) == 3  # the last timed step is not read: the next one has not begun
    for phases in read:
        assert phases == pytest.approx({"forward": 0.05, "backward": 0.1, "optimizer": 0.01}, abs=0.002)
