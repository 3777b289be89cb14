"""Memory of shared devices: a job above its part is warned, and ends if it stays so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clusterd import projection
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core import story
from clusterd.core.events import Timer, TimerKind
from clusterd.daemon.storage.usage import SharedDeviceMemory
from clusterd.protocol.agent import AttemptUse, Usage
from clusterd.types import HostId, JobId, JobState
from tests.core.conftest import GIB, Lab


class Shared:
    """Two jobs on a GPU of 80 GiB, and the memory that each holds."""

    def __init__(self) -> None:
        self.lab = Lab()
        self.lab.host("a", gpus=1, gpu_bytes=80 * GIB)
        self.jobs = [self.lab.submit(share=2)[0] for _ in range(2)]
        for job in self.jobs:
            self.lab.run(job)
        self.gib: dict[JobId, int] = {}
        engine = SimpleNamespace(state=self.lab.scheduler.state)
        self.watch = SharedDeviceMemory(engine, lambda _: self.sample(), lambda: self.lab.now_s)  # type: ignore[arg-type]

    def sample(self) -> Usage:
        (device,) = self.lab.scheduler.state.hosts[next(iter(self.lab.scheduler.state.hosts))].devices
        held = [AttemptUse(job, 1, 0.0, 0, {device.uuid: gib * GIB}) for job, gib in self.gib.items()]
        return Usage(1, 1, 1, (), tuple(held))

    def seen(self, **gib: int) -> list[e.DeviceMemoryObserved]:
        """Events about what the first and the second job hold now."""
        self.gib = {job: gib[name] for job, name in zip(self.jobs, ("first", "second"), strict=True) if name in gib}
        found = self.watch.observe()
        for event in found:
            self.lab.tell(event)
        return found


@pytest.fixture
def shared() -> Shared:
    return Shared()


def test_a_job_above_its_half_is_warned_and_ends_a_minute_later_and_the_other_goes_on(shared: Shared) -> None:
    lab, (first, second) = shared.lab, shared.jobs
    state = lab.scheduler.state
    assert shared.seen(first=40, second=39) == []
    (event,) = shared.seen(first=41, second=39)
    assert shared.seen(first=42, second=39) == [], "told once"
    text = "holds 41.0 GiB of the memory of a:gpu0, and its part is 40.0 GiB"
    assert story.of_event(event, state).text == f"{text}; it ends in 1m00s if that lasts"
    assert projection.reason(state.jobs[first], state).startswith(f"{text}: it ends at ")
    timer = Timer(TimerKind.SHARE, first)
    lab.now_s = state.timers[timer]
    stop = d.StopAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=first)
    assert stop is not None and text in stop.reason
    lab.stopped(first)
    assert (state.jobs[first].state, state.jobs[first].exit_code) == (JobState.FAILED, 1)
    assert text in state.jobs[first].reason
    assert state.jobs[second].state is JobState.RUNNING


def test_one_that_gives_memory_back_goes_on_and_silence_changes_nothing(shared: Shared) -> None:
    lab, (first, _) = shared.lab, shared.jobs
    state = lab.scheduler.state
    shared.seen(first=60)
    assert shared.seen(second=1) == [], "no sample of the first"
    assert Timer(TimerKind.SHARE, first) in state.timers
    (event,) = shared.seen(first=3)
    assert story.of_event(event, state).text == "holds no more than its part of the memory of a:gpu0"
    assert Timer(TimerKind.SHARE, first) not in state.timers
    assert "holds" not in projection.reason(state.jobs[first], state)


def test_a_job_alone_on_a_device_holds_what_it_likes() -> None:
    shared = Shared()
    shared.lab.finish(shared.jobs[0])
    shared.lab.finish(shared.jobs[1])
    shared.jobs = [shared.lab.submit()[0], JobId("none")]
    shared.lab.run(shared.jobs[0])
    assert shared.seen(first=79) == []


def test_a_request_for_memory_is_of_the_part(shared: Shared) -> None:
    lab = shared.lab
    job, _ = lab.submit(share=2, device_memory_bytes=40 * GIB)
    assert lab.why(job).startswith("waits for 1 free device with 40.0 GiB or more")
    never, _ = lab.submit(share=2, device_memory_bytes=41 * GIB)
    assert lab.why(never).startswith(
        "asks for 1 device with 41.0 GiB or more for each of 2 jobs, the cluster has 0 GPUs"
    )


@pytest.mark.parametrize("silent", ["daemon", "host"])
def test_what_was_seen_before_a_silence_ends_nothing(shared: Shared, silent: str) -> None:
    """The daemon has just started, or the host does not answer: the job may have given the memory back since."""
    lab, (first, _) = shared.lab, shared.jobs
    shared.seen(first=60)
    state, timer = lab.scheduler.state, Timer(TimerKind.SHARE, first)
    if silent == "daemon":
        lab.tell(e.DaemonStarted(**lab.at(), epoch=2))
        assert timer not in state.timers and lab.attempt(first).over_share == ""
        return
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    lab.now_s = state.timers[timer]
    assert d.StopAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=first) is None
    assert state.timers[timer] > lab.now_s
