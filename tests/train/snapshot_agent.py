"""Test double of an agent that publishes state snapshots, and steps of a rank that takes them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from clusterd.protocol.control import MakeSegment, PublishSegment, SegmentReply
from clusterd.protocol.messages import Done
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.process.control import AgentRefused
from tests.hang import HANG_S


class Agent:
    """Creates segments, and answers a publish request when the test allows it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.published, self.refuses = directory, [], False
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def ask(self, request: MakeSegment | PublishSegment) -> SegmentReply | Done:
        path = self.directory / request.name
        if isinstance(request, MakeSegment):
            path.write_bytes(bytes(request.bytes))
            return SegmentReply(str(path))
        self.published.append((request.name, request.meta["step"]))
        self.asked.set()
        assert self.may_answer.wait(HANG_S)
        if self.refuses:
            raise AgentRefused("store", "no room")
        return Done()


def settle(taken: StateSnapshots) -> None:
    assert taken._thread is not None
    taken._thread.join(HANG_S)
    assert not taken._thread.is_alive()


def at_step(made: Any, taken: StateSnapshots, step: int) -> None:
    made.step = step
    taken.begin()
