"""Jobs whose devices do nothing: their owners are told, and shells end where an operator wants it."""

from __future__ import annotations

from clusterd import projection
from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core import story
from clusterd.core.events import Timer, TimerKind
from clusterd.types import RESERVATION_COMMAND, JobId, JobState
from tests.core.conftest import Lab


def holding(interactive: bool = True) -> tuple[Lab, JobId]:
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit(command=RESERVATION_COMMAND, interactive=interactive)
    lab.run(job)
    return lab, job


def idle(lab: Lab, job: JobId, for_s: float | None, reclaim_s: float | None = None) -> e.IdlenessObserved:
    since_s = None if for_s is None else lab.now_s - for_s
    event = e.IdlenessObserved(
        **lab.at(),
        job=job,
        attempt=lab.attempt(job).number,
        since_s=since_s,
        reclaim_at_s=None if since_s is None or reclaim_s is None else since_s + reclaim_s,
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
    """A training that waits for its data is its owner's business."""
    lab, job = holding(interactive=False)
    event = idle(lab, job, 3600.0, reclaim_s=7200.0)
    state = lab.scheduler.state
    assert Timer(TimerKind.IDLE, job) not in state.timers
    assert story.of_event(event, state).text == "its devices have done nothing for 1h00m"
    assert "ends at" not in projection.reason(state.jobs[job], state)


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
