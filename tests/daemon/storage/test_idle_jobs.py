"""Idleness is observed from samples: by devices, over a whole span, and never from silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clusterd.core import events as e
from clusterd.daemon.storage.usage import IdleJobs
from clusterd.types import Device, Reclaim
from tests.core.conftest import Lab


class Observed:
    """A job with two GPUs, and what is known of their use."""

    def __init__(self) -> None:
        self.lab = Lab()
        self.lab.host("a", gpus=2)
        self.job, _ = self.lab.submit(devices=2)
        self.lab.run(self.job)
        self.set_by_s = 0.0
        self.busy: dict[str, float | None] = {"a:gpu0": 0.0, "a:gpu1": 0.0}
        self.idle = self.observer()

    def observer(self) -> IdleJobs:
        engine = SimpleNamespace(scheduler=self.lab.scheduler, state=self.lab.scheduler.state)
        clocks = (lambda: self.lab.now_s + self.set_by_s, lambda: self.lab.now_s)
        return IdleJobs(engine, self.of, 600.0, 1200.0, Reclaim.SHRINK, *clocks)  # type: ignore[arg-type]

    def of(self, device: Device, job: str) -> float | None:
        assert job == self.job
        return self.busy[device.id]

    def minutes(self, count: int) -> list[e.IdlenessObserved]:
        """Events of so many minutes, which the core handles."""
        found = []
        for _ in range(count):
            self.lab.now_s += 60.0
            for event in self.idle.observe():
                self.lab.tell(event)
                found.append(event)
        return found


@pytest.fixture
def observed() -> Observed:
    return Observed()


def test_a_job_is_idle_after_the_whole_span_and_told_of_once(observed: Observed) -> None:
    begin_s = observed.lab.now_s + 60.0
    (event,) = observed.minutes(30)
    assert (event.at_s, event.since_s) == (begin_s + 600.0, begin_s)
    assert (event.reclaim_at_s, event.reclaim) == (begin_s + 1200.0, Reclaim.SHRINK)


def test_one_device_that_works_is_enough(observed: Observed) -> None:
    observed.busy["a:gpu1"] = 0.5
    assert observed.minutes(30) == []
    observed.busy["a:gpu1"] = 0.01  # what a driver does by itself
    assert len(observed.minutes(11)) == 1
    observed.busy["a:gpu0"] = 0.3
    (again,) = observed.minutes(3)
    assert again.since_s is None
    observed.busy["a:gpu0"] = 0.0
    assert observed.minutes(8) == [] and len(observed.minutes(3)) == 1, "the span begins anew"


def test_silence_proves_nothing(observed: Observed) -> None:
    """A host whose samples stay away: neither idle, nor at work again."""
    observed.busy["a:gpu0"] = None
    assert observed.minutes(60) == []
    observed.busy["a:gpu0"] = 0.0
    assert len(observed.minutes(11)) == 1
    observed.busy["a:gpu0"] = None
    assert observed.minutes(30) == []


def test_a_new_daemon_begins_the_span_anew(observed: Observed) -> None:
    """Nobody looked while the last one was away; a shell that was warned may have worked since."""
    assert len(observed.minutes(12)) == 1
    lab = observed.lab
    lab.tell(e.DaemonStarted(**lab.at(), epoch=9))
    observed.idle = observed.observer()
    assert observed.minutes(8) == [] and len(observed.minutes(5)) == 1


def test_a_clock_that_is_set_makes_nobody_idle(observed: Observed) -> None:
    """After a boot, NTP may move it by years."""
    assert observed.minutes(2) == []
    observed.set_by_s = 1e8
    assert observed.minutes(2) == []
