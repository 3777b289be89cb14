"""Time from a submit to the first step, phase by phase."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.projection import attempt_row
from clusterd.types import JobKind
from tests.core.conftest import Lab
from tests.core.lifecycle.test_clock import set_clock
from tests.core.lifecycle.test_model_descriptions import SHAPE


def test_the_phases_of_a_start_add_up_to_the_time_until_its_first_step(lab: Lab) -> None:
    lab.host("a", gpus=1)
    other, _ = lab.submit("other")
    lab.run(other)
    job, _ = lab.submit("net", kind=JobKind.ELASTIC)
    lab.now_s += 5.0
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE))
    lab.now_s += 30.0
    lab.finish(other)
    lab.run(job)
    attempt = lab.attempt(job)
    of_rank = (("began_s", attempt.started_s + 2.0), ("process", 1.5), ("build", 3.0), ("first step", 0.5))
    report = {"job": job, "attempt": 1, "loss": 2.0, "step_time_s": 0.1}
    lab.tell(e.AttemptProgressed(**lab.at(), **report, step=1, start=of_rank))
    lab.tell(e.AttemptProgressed(**lab.at(), **report, step=9))
    phases = [(phase.phase, phase.seconds) for phase in attempt_row(attempt).start]
    assert [name for name, _ in phases] == ["inspect", "queue", "launch", "process", "build", "first step"]
    known = lab.scheduler.state.jobs[job]
    assert phases[0][1] >= 5.0 and phases[1][1] >= 30.0
    assert sum(seconds for _, seconds in phases) == attempt.started_s + 7.0 - known.submitted_s


def test_a_clock_that_is_set_is_no_time_in_the_queue(lab: Lab) -> None:
    lab.host("a", gpus=1)
    other, _ = lab.submit("other")
    lab.run(other)
    job, _ = lab.submit("net", kind=JobKind.ELASTIC)
    lab.tell(e.ModelDescribed(**lab.at(), job=job, shape=SHAPE))
    set_clock(lab, 3600.0)
    lab.finish(other)
    lab.run(job)
    started = (("began_s", lab.attempt(job).started_s + 1.0), ("process", 1.0))
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=1, loss=2.0, step_time_s=0.1, start=started))
    assert all(phase.seconds < 60.0 for phase in attempt_row(lab.attempt(job)).start)


def test_a_start_of_which_nothing_is_known_has_no_phases(lab: Lab) -> None:
    lab.host("a", gpus=1)
    job, _ = lab.submit("net", kind=JobKind.CHECKPOINTABLE)
    lab.run(job)
    lab.tell(e.AttemptProgressed(**lab.at(), job=job, attempt=1, step=1, loss=2.0, step_time_s=0.1))
    assert attempt_row(lab.attempt(job)).start == ()
