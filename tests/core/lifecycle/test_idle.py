"""Jobs whose devices do nothing: their owners are told, and shells end where an operator wants it."""

from __future__ import annotations

from typing import Any

import pytest

from clusterd import projection
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core import story
from clusterd.core.events import Timer, TimerKind
from clusterd.types import RESERVATION_COMMAND, HostId, JobId, JobKind, JobState, Reclaim
from tests.core.conftest import Lab
from tests.core.policies.test_default import known, moved, progress, submit


def holding(interactive: bool = True) -> tuple[Lab, JobId]:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(command=RESERVATION_COMMAND, interactive=interactive)
    lab.run(job)
    return lab, job


def idle(
    lab: Lab, job: JobId, for_s: float | None, reclaim_s: float | None = None, reclaim: Reclaim = Reclaim.SHELLS
) -> e.IdlenessObserved:
    since_s = None if for_s is None else lab.now_s - for_s
    event = e.IdlenessObserved(
        **lab.at(),
        job=job,
        attempt=lab.attempt(job).number,
        since_s=since_s,
        reclaim_at_s=None if since_s is None or reclaim_s is None else since_s + reclaim_s,
        reclaim=reclaim,
    )
    lab.tell(event)
    return event


def test_an_idle_shell_is_told_of_and_then_ended() -> None:
    lab, job = holding()
    event = idle(lab, job, 3600.0, reclaim_s=7200.0)
    state = lab.scheduler.state
    told = story.of_event(event, state).text
    assert told.startswith("its devices have done nothing for 1h00m; it ends in") and told.endswith("if that lasts")
    row = projection.job_row(state.jobs[job], state)
    assert row.reason.startswith("idle: its devices have done nothing since ")
    assert "it ends at" in row.reason and row.idle_since_s == event.since_s
    timer = Timer(TimerKind.IDLE, job)
    lab.now_s = state.timers[timer]
    stop = d.StopAttempt.match(lab.tell(e.TimerFired(**lab.at(), timer=timer)), job=job)
    assert stop is not None and "did nothing for 2h00m" in stop.reason
    lab.stopped(job)
    ended = state.jobs[job]
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 124)
    assert state.holders == {}


def test_a_shell_that_works_again_stays() -> None:
    lab, job = holding()
    idle(lab, job, 3600.0, reclaim_s=7200.0)
    event = idle(lab, job, None)
    state = lab.scheduler.state
    assert Timer(TimerKind.IDLE, job) not in state.timers
    assert story.of_event(event, state).text == "its devices work again"
    assert "idle" not in projection.reason(state.jobs[job], state)


def test_a_job_that_is_no_shell_is_told_of_only() -> None:
    """A training that waits for its data is its owner's business, unless the lab says otherwise."""
    lab, job = holding(interactive=False)
    event = idle(lab, job, 3600.0, reclaim_s=7200.0)
    state = lab.scheduler.state
    assert Timer(TimerKind.IDLE, job) not in state.timers
    assert story.of_event(event, state).text == "its devices have done nothing for 1h00m"
    assert "ends at" not in projection.reason(state.jobs[job], state)


def due(lab: Lab, job: JobId) -> list[d.Decision]:
    """The time has passed that an idle job had."""
    timer = Timer(TimerKind.IDLE, job)
    lab.now_s = lab.scheduler.state.timers[timer]
    return lab.tell(e.TimerFired(**lab.at(), timer=timer))


def shrunk(lab: Lab, reclaim: Reclaim) -> JobId:
    """An elastic job alone on eight devices, which it leaves for one, as they do nothing."""
    lab.host("a", gpus=8, cores=64)
    lab.tell(e.SpeedLearned(**lab.at(), model="net", table=known(), why="trials"))
    job, _ = submit(lab, "net-1", 100_000)
    progress(lab, job, 10)
    event = idle(lab, job, 3600.0, reclaim_s=7200.0, reclaim=reclaim)
    assert "it shrinks to 1 device in 59m" in story.of_event(event, lab.scheduler.state).text
    start = d.StartMigration.match(due(lab, job), job=job)
    assert start is not None and start.devices == 1 and "its devices did nothing for 2h00m" in start.reason
    moved(lab, start)
    return job


def test_an_idle_elastic_job_shrinks_to_one_device_and_grows_once_that_works() -> None:
    lab = Lab()
    job = shrunk(lab, Reclaim.SHRINK)
    lab.now_s += 7200.0
    assert d.StartMigration.match(lab.tell(e.TimerFired(**lab.at(), timer=Timer(TimerKind.ROUND)))) is None
    assert Timer(TimerKind.IDLE, job) not in lab.scheduler.state.timers, "it keeps the one"
    event = e.IdlenessObserved(**lab.at(), job=job, attempt=1, since_s=None)
    grows = d.StartMigration.match(lab.tell(event), job=job)
    assert grows is not None and grows.devices == 8


def test_one_that_stays_idle_on_one_device_is_held_with_its_state() -> None:
    lab = Lab()
    job = shrunk(lab, Reclaim.SUSPEND)
    state = lab.scheduler.state
    assert "and it is suspended at" in projection.reason(state.jobs[job], state)
    stop = d.StopAttempt.match(due(lab, job), job=job)
    assert stop is not None and stop.keep, "it goes on where it was"
    lab.stopped(job)
    assert (state.jobs[job].state, state.holders) == (JobState.QUEUED, {})
    assert state.jobs[job].reason.startswith("suspended: its devices did nothing for 4h00m"), state.jobs[job].reason
    assert f"clusterd release {job}" in state.jobs[job].reason
    released = lab.tell(e.JobReleased(**lab.at(), job=job, by="ann"))
    assert d.LaunchAttempt.match(released, job=job) is not None


@pytest.mark.parametrize(
    ("what", "reclaim", "ends"),
    [
        ({"kind": JobKind.CHECKPOINTABLE}, Reclaim.SHRINK, None),
        ({"kind": JobKind.CHECKPOINTABLE}, Reclaim.SUSPEND, JobState.QUEUED),
        ({"kind": JobKind.CHECKPOINTABLE}, Reclaim.END, JobState.FAILED),
        ({}, Reclaim.SHRINK, None),
        ({}, Reclaim.SUSPEND, None),
        ({"preemptible": True}, Reclaim.SUSPEND, JobState.QUEUED),
        ({}, Reclaim.END, JobState.FAILED),
    ],
)
def test_of_other_jobs_only_what_goes_on_later_is_suspended(
    what: dict[str, Any], reclaim: Reclaim, ends: JobState | None
) -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(**what)
    lab.run(job)
    event = idle(lab, job, 3600.0, reclaim_s=7200.0, reclaim=reclaim)
    state = lab.scheduler.state
    assert (Timer(TimerKind.IDLE, job) in state.timers) == (ends is not None)
    assert ("if that lasts" in story.of_event(event, state).text) == (ends is not None)
    if ends is not None:
        due(lab, job)
        lab.stopped(job)
        assert (state.jobs[job].state, state.holders) == (ends, {})


def test_what_is_told_of_a_former_attempt_means_nothing() -> None:
    lab, job = holding()
    late = e.IdlenessObserved(**lab.at(), job=job, attempt=7, since_s=0.0, reclaim_at_s=1.0)
    assert lab.tell(late) == []
    assert lab.attempt(job).idle_since_s is None


def test_a_clock_that_is_set_moves_the_beginning() -> None:
    lab, job = holding()
    event = idle(lab, job, 3600.0, reclaim_s=7200.0)
    assert event.since_s is not None and event.reclaim_at_s is not None
    lab.now_s += 500.0
    lab.tell(e.ClockSet(**lab.at(), by_s=500.0))
    assert lab.attempt(job).idle_since_s == event.since_s + 500.0
    assert lab.scheduler.state.timers[Timer(TimerKind.IDLE, job)] == event.reclaim_at_s + 500.0


def test_devices_of_a_host_that_does_not_answer_are_not_reclaimed() -> None:
    lab, job = holding()
    idle(lab, job, 3600.0, reclaim_s=7200.0)
    lab.tell(e.HostDisconnected(**lab.at(), host=HostId("a"), why="cable"))
    assert d.StopAttempt.match(due(lab, job), job=job) is None
    assert lab.scheduler.state.timers[Timer(TimerKind.IDLE, job)] > lab.now_s


def test_a_job_that_waits_for_its_loader_says_so(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit()
    lab.run(job)

    def steps(first: int, shares: list[float | None]) -> str:
        for step, share in enumerate(shares, first):
            told = {"job": job, "attempt": 1, "step": step, "loss": None, "step_time_s": 0.1}
            lab.tell(e.AttemptProgressed(**lab.at(), **told, input_share=share))
        return projection.reason(lab.scheduler.state.jobs[job], lab.scheduler.state)

    assert steps(1, [0.05, None, 1.0, 0.05]) == "started on a"  # a single step, as where an epoch begins
    assert steps(5, [0.6] * 12) == "its devices wait for its data loader 57% of the time; started on a"
    # Regression: of several troubles the first hid the others.
    lab.tell(e.CheckpointFailed(**lab.at(), job=job, attempt=1, step=16, why="no space left"))
    idle(lab, job, 3600.0)
    reason = projection.reason(lab.scheduler.state.jobs[job], lab.scheduler.state)
    assert reason.startswith("idle: its devices have done nothing since ")
    assert "; not saved: no space left (the newest checkpoint: none); its devices wait for its data loader" in reason
    lab.tell(e.CheckpointTaken(**lab.at(), job=job, attempt=1, step=17, path="/shared/0"))
    lab.tell(e.IdlenessObserved(**lab.at(), job=job, attempt=1, since_s=None))
    assert steps(17, [0.0] * 9) == "started on a"
