"""Source side of a migration that is aborted, at moments that a complete migration seldom hits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from scenarios import Recorded, job

from clusterd.protocol.control import MakeSegment, SegmentReply
from clusterd.protocol.rank import RankMessage
from clusterd.train.inspect.describe import describe
from clusterd.train.loop.rank_training import Training
from clusterd.train.migration import source
from clusterd.train.migration.source import MigrationSource
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from clusterd.train.state.copying import CopyBatch
from clusterd.train.state.segments import Segment

MOVE = "test.1.2"


class Agent(Control):
    """Creates segments, and can abort the migration."""

    def __init__(self, context: Context, directory: Path) -> None:
        super().__init__(context)
        self.said: list[str] = []
        self.aborts_at = ""
        self._directory = directory

    def ask(self, request: Any, timeout_s: float = 0.0) -> Any:
        self.passes(request.verb)
        path = self._directory / request.name
        if isinstance(request, MakeSegment):
            path.write_bytes(bytes(request.bytes))
        return SegmentReply(str(path))

    def report(self, message: RankMessage) -> None:
        self.said.append(message.what)

    def passes(self, what: str) -> None:
        """Abort if this is the moment, on the control thread."""
        if what == self.aborts_at:
            hearing = threading.Thread(target=self._dispatch, args=[{"event": "abort", "move": MOVE}])
            hearing.start()
            hearing.join()

    def prepare(self, shape: dict[str, Any]) -> None:
        side = {"plan": {"dp": 1}, "hosts": ["a"]}
        sides = {"old": {**side, "generation": 1, "devices": ["a:0"]}, "new": {**side, "generation": 2, "devices": []}}
        self._dispatch({"event": "move", "move": {"id": MOVE, "shape": shape, **sides}})
        for thread in threading.enumerate():
            if thread.name == "clusterd-prepare":
                thread.join()

    def quiesce(self) -> None:
        self._dispatch({"event": "quiesce", "move": MOVE})


@pytest.mark.parametrize("moment", ["segment", "copy", "publish", "never"])
def test_memory_is_let_go_of_once_and_never_under_a_copy(
    moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy into unmapped memory crashes the process; on a GPU one into unpinned memory may."""
    closed: list[bool] = []  # True: while a copy was running
    copying = threading.Event()
    close, run = Segment.close, CopyBatch.run
    context = Context()
    agent = Agent(context, tmp_path)

    def closes(segment: Segment) -> None:
        closed.append(copying.is_set())
        close(segment)

    def runs(copies: CopyBatch, threads: int = 1) -> list[int]:
        copying.set()
        agent.passes("copy")
        sums = run(copies, threads)
        copying.clear()
        return sums

    monkeypatch.setattr(source.Segment, "close", closes)
    monkeypatch.setattr(CopyBatch, "run", runs)
    task = job(Recorded(32), depth=1)
    training = Training(task, context, torch.device("cpu"), None)
    departing = MigrationSource(training, agent)
    agent.aborts_at = moment
    agent.prepare(describe(task, trace=False).to_dict())
    agent.quiesce()
    if moment == "never":
        agent.request("stop", "moved")
    assert departing.hand_over(at_s=0.0) == ("stop" if moment == "never" else "abort")
    assert closed == ([] if moment == "never" else [False])
    assert ("resumed" in agent.said) == (moment in ("copy", "publish"))
    assert ("quiesced" in agent.said) == (moment != "segment")


@pytest.mark.parametrize("before", ["in place", "elsewhere"])
@pytest.mark.parametrize("after", ["in place", "elsewhere"])
def test_handed_over_state_is_of_the_last_step(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Copies are prepared during a step; some optimizers reallocate what they update, in that step or in any."""
    copies_to_segment = Mock(wraps=source.copies_to_segment)
    monkeypatch.setattr(source, "copies_to_segment", copies_to_segment)
    task = job(Recorded(32), depth=1)
    shape = describe(task, trace=False).to_dict()
    training = Training(task, Context(), torch.device("cpu"), None)

    def step(how: str) -> None:
        for parameter in training.parallel.module.parameters():
            if how == "in place":
                parameter.data.add_(1.0)
            else:
                parameter.data = parameter.data + 1.0
        training.step += 1

    def handed_over(name: str, *steps: str) -> bytes:
        (tmp_path / name).mkdir()
        agent = Agent(training.context, tmp_path / name)
        departing = MigrationSource(training, agent)
        agent.prepare(shape)
        for how in steps[:1]:
            step(how)
        agent.quiesce()
        early = copies_to_segment.call_count
        for how in steps[1:]:
            step(how)
        agent.request("stop", "moved")
        assert departing.hand_over(at_s=0.0) == "stop"
        assert "quiesced" in agent.said
        assert early == (before == "in place" and bool(steps))
        assert copies_to_segment.call_count == (1 if early and after == "in place" else early + 1)
        copies_to_segment.reset_mock()
        (segment,) = (tmp_path / name).iterdir()
        return segment.read_bytes()

    ahead = handed_over("ahead", before, after)
    assert ahead == handed_over("between steps")
    step("in place")
    assert ahead != handed_over("later")
