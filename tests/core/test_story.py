"""Sentences about events and decisions, as `history`, `why` and the terminal UI print them."""

from __future__ import annotations

import re

from clusterd.core import decisions as d
from clusterd.core import events as e
from clusterd.core import story
from clusterd.core.timers import Timer, TimerKind
from clusterd.plans.plan import Plan
from clusterd.types import HostId, RankEnd, Reason
from tests.core.conftest import Lab
from tests.core.lifecycle.test_trials import move, running


def test_a_move_is_one_line_before_and_one_after_and_never_reads_as_a_failure(lab: Lab) -> None:
    lab.host("gpu01", gpus=4)
    job = running(lab)
    begun = len(lab.decisions), len(lab.log)
    lab.tell(e.MigrationRequested(**lab.at(), job=job, plan=Plan(dp=2), by="ann"))
    move(lab, job)
    lines = [story.of_decision(decision) for decision in lab.decisions[begun[0] :]]
    lines += [story.of_event(event, lab.scheduler.state) for event in lab.log[begun[1] :]]
    shown = [line.text for line in lines if not line.is_routine]
    assert len(shown) == 2
    assert shown[0].startswith("moves to dp=2 on gpu01: asked for by ann")
    after = r"moved to dp=2 on gpu01: asked for by ann; continues at step \d+, downtime [0-9.]+m?s"
    assert re.fullmatch(after, shown[1])
    assert not any("stop" in text or "fail" in text for text in shown)


def test_ends_and_restarts_say_why_once(lab: Lab) -> None:
    lab.host("gpu01", gpus=1)
    job, _ = lab.submit(devices=1)
    lab.run(job)
    lab.exit(job, end=RankEnd(reason=Reason.EXIT, exit_code=3))
    lab.stopped(job)
    (end,) = [story.of_decision(each).text for each in lab.decisions if isinstance(each, d.EndJob)]
    assert end == "failed: exit code 3 on gpu01"
    exits = [story.of_event(event, lab.scheduler.state) for event in lab.log if isinstance(event, e.RankExited)]
    assert all(line.is_routine for line in exits)


def test_a_lost_connection_is_told_once_and_redials_are_routine(lab: Lab) -> None:
    lab.host("gpu01", gpus=1)
    gpu01 = HostId("gpu01")
    for _ in range(3):
        lab.tell(e.HostDisconnected(**lab.at(), host=gpu01, why="gpu01: no route to host"))
    state = lab.scheduler.state
    lines = [story.of_event(each, state) for each in lab.log if isinstance(each, e.HostDisconnected)]
    assert [line.is_routine for line in lines] == [False, True, True]
    assert lines[0].text == "connection lost: no route to host"
    lab.fire(Timer(TimerKind.HOST_LOST, gpu01))
    given_up = story.of_event(lab.log[-1], state)
    assert (given_up.text, given_up.is_routine) == ("gpu01 is given up: it has not answered for too long", False)
