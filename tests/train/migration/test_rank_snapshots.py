"""A state snapshot holds the state between two steps, whatever happens during the copy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from scenarios import Recorded, job
from snapshot_agent import Agent, at_step, settle

from clusterd.plans.layout import layout
from clusterd.plans.plan import Plan
from clusterd.plans.snapshots import state_snapshot_outbox
from clusterd.train.loop.rank_training import Training
from clusterd.train.migration import snapshots
from clusterd.train.migration.snapshots import StateSnapshots
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from clusterd.train.state.copying import CopyBatch
from clusterd.train.state.segments import Segment
from tests.hang import HANG_S


def training(rank: int = 0, plan: Plan | None = None, **options: Any) -> Training:
    context = Context(rank=rank, plan=plan or Plan(), control_socket="an agent's")
    made = Training(job(Recorded(32), depth=1, **{"steps": 100, **options}), context, torch.device("cpu"), None)
    made.optimizer.make_state()
    return made


def ready(made: Any, agent: Agent) -> StateSnapshots:
    taken = StateSnapshots(made, cast(Control, agent), every=10)
    settle(taken)
    return taken


def test_buffers_are_those_of_the_step_though_the_next_forward_pass_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters wait for the copy; running statistics do not."""
    forward = threading.Event()
    copies_to_segment = snapshots.copies_to_segment

    def late(*args: Any) -> CopyBatch:
        assert forward.wait(HANG_S)
        return copies_to_segment(*args)

    monkeypatch.setattr(snapshots, "copies_to_segment", late)
    made = training(model="tables")
    taken = ready(made, Agent(tmp_path))
    seen = dict(made.parallel.module.named_buffers())["embed.seen"]
    seen.fill_(160)
    at_step(made, taken, 10)
    seen.add_(16)
    forward.set()
    settle(taken)
    shared = layout(made.shape, Plan()).deduplicated()
    part = next(p for p in state_snapshot_outbox(shared, 0).parts if shared.tensors[p.tensor].name == "embed.seen")
    assert Segment(str(tmp_path / ".0.g0.snap0.0")).view(torch.int64, (), part.offset).item() == 160


def test_the_newest_snapshot_is_never_written_over(tmp_path: Path) -> None:
    """A slow network skips one; the next must not overwrite the only complete one."""
    agent = Agent(tmp_path)
    made = training()
    taken = ready(made, agent)
    agent.may_answer.clear()
    at_step(made, taken, 10)
    assert agent.asked.wait(HANG_S)
    at_step(made, taken, 20)  # the previous one is still being fetched
    agent.may_answer.set()
    settle(taken)
    at_step(made, taken, 30)
    settle(taken)
    agent.refuses = True
    at_step(made, taken, 40)
    settle(taken)
    at_step(made, taken, 50)
    settle(taken)
    (first, _), *_ = agent.published
    other = agent.published[1][0]
    assert other != first
    assert agent.published == [(first, 10), (other, 30), (first, 40), (first, 50)]


def test_a_rank_without_a_share_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than tensors: without its publish request the step would never be complete."""
    agent = Agent(tmp_path)
    made = training()
    monkeypatch.setattr(snapshots, "state_snapshot_outbox", lambda shared, _: state_snapshot_outbox(shared, 10**6))
    taken = ready(made, agent)
    at_step(made, taken, 10)
    settle(taken)
    assert [step for _, step in agent.published] == [10]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": "drawn"}, "scheduler.shape is a function"),
        ({"schedule": "by hand"}, "the scheduler, a StatelessScheduler, has no state_dict or load_state_dict"),
        ({"optimizer": "rows and others"}, "InParts contains a SomeRows (_parts) that keeps state of its own"),
    ],
)
def test_state_that_cannot_be_carried_costs_the_snapshots_and_not_the_training(
    options: dict[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(tmp_path)
    made = training(**options)
    taken = ready(made, agent)
    at_step(made, taken, 10)
    at_step(made, taken, 20)
    taken.publish_final()
    assert agent.published == []
    assert capsys.readouterr().out.count(f"no state snapshots: {why}") == 1


ENDS_EARLY = """
import sys, time
from pathlib import Path
from test_rank_snapshots import Agent, cast, ready, snapshots, torch, training

class Slow:
    def run(self, after):
        print("copying", flush=True)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            torch.zeros(1 << 16).add_(1)
        return []

made = training(steps=40)
taken = ready(made, Agent(Path(sys.argv[1])))
snapshots.copies_to_segment = lambda segment, pieces: Slow()
made.step = 10
taken.begin()
"""


@pytest.mark.slow
def test_a_process_does_not_end_under_a_copy(tmp_path: Path) -> None:
    """Regression: the process died of SIGABRT after its last step, and the job failed with 134."""
    command = [sys.executable, "-c", ENDS_EARLY, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "copying\n"), done.stderr


def test_the_last_step_needs_no_snapshot(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    made = training(steps=20)
    taken = ready(made, agent)
    made.step = 20
    taken.begin()
    settle(taken)
    assert agent.published == []
