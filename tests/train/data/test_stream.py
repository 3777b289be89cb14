"""Streams: the same samples make up the same global batches under every plan, after every move and restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import ROOT, RankPool

OPTIONS = {"depth": 2, "steps": 7, "global_batch": 16, "samples": 70, "stream": "noisy"}
"""An epoch has four global batches, and six samples more."""


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = ranks.run(tmp_path_factory.mktemp("alone"), "dp=1", **OPTIONS).checked()
    asked = run.ranks[0].result["asked"]
    assert len(set(asked[:64])) == 64
    assert len(asked) == 70 + 3 * 16
    return run.losses


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3",
        slow("dp=2,shares=6:10,accumulation=2"),
        slow("dp=2"),
        slow("tp=2"),
        slow("pp=2,accumulation=2"),
        slow("pp=3,accumulation=4"),
    ],
)
def test_losses_do_not_depend_on_the_plan(plan: str, ranks: RankPool, tmp_path: Path, alone: list[float]) -> None:
    assert ranks.run(tmp_path, plan, **OPTIONS).checked().losses == pytest.approx(alone, rel=1e-4)


def test_a_process_beside_the_rank_reads_the_same(ranks: RankPool, tmp_path: Path, alone: list[float]) -> None:
    assert ranks.run(tmp_path, "dp=1", **OPTIONS, num_workers=2).checked().losses == alone


def test_a_stream_without_a_position_is_refused_before_training(ranks: RankPool, tmp_path: Path) -> None:
    for rank in (run := ranks.run(tmp_path, "dp=1", **{**OPTIONS, "stream": "without"})).ranks:
        assert rank.exit_code == 92
        assert "is a stream (WithoutPosition) without a position, so that no move" in rank.output
        assert "def load_state_dict(self, state)" in rank.output
    assert run.steps == []


@pytest.mark.slow
def test_a_stream_that_would_repeat_samples_moves_nowhere_and_a_restart_tells(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path
) -> None:
    """It counts a sample after it was used: the first sample after a move shows it."""
    mover = moving(samples=20_000, stream="late")
    mover.start("dp=1")
    mover.train(2)
    with pytest.raises(AssertionError, match="does not go on at its position after step"):
        mover.move("dp=1,accumulation=2")  # one rank: no other one's end hides the reason
    mover.undo()
    mover.train(2)
    saved = mover.checkpoint(tmp_path / "saved")
    mover.stop()
    options = {"depth": 2, "samples": 20_000, "stream": "late", "steps": saved["step"] + 2}
    more = {"restore": str(tmp_path / "saved")}
    run = ranks.run_each(tmp_path / "again", "dp=1", [options], more=lambda _: more)[0].checked()
    assert f"does not go on at its position after step {saved['step']}" in run.ranks[0].output


SCRIPT = """
import json, queue, sys, threading
import torch
from torch.utils.data import IterableDataset
from clusterd import train

class Lines(IterableDataset):
    def __init__(self, path):
        self.file, self.read = open(path), 0  # an open file, whose position forked processes share
        self.lines = queue.Queue(3)
        if sys.argv[3] == "thread":
            threading.Thread(target=self.fill, daemon=True).start()
    def fill(self):
        while line := self.file.readline():
            self.lines.put(line)
    def __iter__(self):
        while line := self.lines.get() if sys.argv[3] == "thread" else self.file.readline():
            self.read += 1
            yield torch.tensor([float(line)]), torch.tensor([0.0])
    def state_dict(self):
        return {"read": self.read}
    def load_state_dict(self, state):
        for _ in range(state["read"]):
            next(iter(self))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.seen = []
    def forward(self, x):
        self.seen += x.flatten().tolist()
        return self.w * x

made = []
def model():
    made.append(Net())
    return made[-1]

train.run(
    model=model, loss=lambda out, target: (out - target).square().mean(), data=Lines(sys.argv[1]),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=8, steps=12, save=sys.argv[2] + ".pt",
    num_workers=int(sys.argv[4]),
)
json.dump(made[-1].seen, open(sys.argv[2], "w"))
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "workers"), [("file", "0"), slow("file", "1"), ("thread", "0")])
def test_a_stream_is_read_to_train_on_it_and_by_nobody_else(kind: str, workers: str, tmp_path: Path) -> None:
    """A forked process that read ahead moved the file's position, or waited for the reader's thread for minutes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{i:>4000}\n" for i in range(200)))
    arguments = [sys.executable, "train.py", str(lines), "seen", kind, workers]
    run = subprocess.run(
        arguments, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen == [float(i) for i in range(12 * 8)]


@pytest.mark.slow
def test_a_stream_that_cannot_begin_anew_ends_the_job_in_words(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", **{**OPTIONS, "stream": "once"})
    assert run.ranks[0].exit_code == 92
    assert "the stream has ended, and yields 0 samples when it is iterated again" in run.ranks[0].output
    assert run.steps[-1]["step"] >= 3


@pytest.mark.slow
def test_an_evaluation_by_epochs_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", **OPTIONS, evaluate={})
    assert run.ranks[0].exit_code == 92
    assert "every is 'epoch', but a stream has no length: give steps" in run.ranks[0].output


@pytest.mark.slow
def test_processes_with_other_streams_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=2", **OPTIONS, unlike="rank")
    assert [rank.exit_code for rank in run.ranks] == [92, 92]
    assert "the data of rank 1 and rank 0 differ: sample 0 is another one" in run.ranks[0].output


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("stream_by_rank", "StreamByRank yields other samples for step 5 on rank 1 than on rank 0"),
        ("sharded_by_rank", "has other data than one process: 32 samples instead of 64 samples"),
    ],
)
def test_data_that_are_sharded_once_ranks_are_known_are_refused(
    script: str, reason: str, ranks: RankPool, tmp_path: Path
) -> None:
    """The first samples are read before there is a process group: they were the same, and later ones were not."""
    run = ranks.run(tmp_path, "dp=2", script=script, steps=8)
    assert [rank.exit_code for rank in run.ranks] == [92, 92]
    assert reason in run.ranks[0].output
    assert "Data must not be sharded by rank" in run.ranks[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("noisy", ("dp=1", "dp=2,zero=3")),
        slow("own", ("dp=2", "pp=3,accumulation=4", "dp=2,zero=3", "dp=1")),
        slow("noisy", ("pp=2,accumulation=2", "tp=2", "dp=3,shares=2:5:9", "dp=2,zero=1")),
    ],
)
def test_a_stream_goes_on_through_moves_and_a_restart(
    kind: str,
    plans: tuple[str, ...],
    moving: Callable[..., Mover],
    undisturbed: Callable[..., list[float]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    mover = moving(samples=70, stream=kind, num_workers=kind == "own")
    mover.start(plans[0])
    for plan in plans[1:]:
        mover.train(3)
        mover.move(plan)
    mover.train(2)
    saved: dict[str, Any] = mover.checkpoint(tmp_path / "saved")
    steps = mover.stop()
    expected = undisturbed(samples=70, stream=kind, steps=steps[-1]["step"] + 10)
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=1e-4)
    options = {"depth": 2, "samples": 70, "stream": kind, "steps": saved["step"] + 5}
    restored = ranks.run_each(
        tmp_path / "again", "dp=2", [options], more=lambda _: {"restore": str(tmp_path / "saved")}
    )[0].checked()
    assert restored.losses == pytest.approx(expected[saved["step"] : saved["step"] + 5], rel=1e-4)


@pytest.mark.slow
def test_a_stream_goes_on_after_a_crash(moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]) -> None:
    mover = moving(samples=70, stream="noisy", rank_file={"snapshot_every": 2})
    mover.start("dp=2")
    mover.train(6)
    mover.wait(lambda: mover.newest_snapshot()[1] > 0)
    step = mover.recover("dp=1")
    mover.train(step + 5)
    mover.stop()
    after = mover.now.steps()
    assert [s["step"] for s in after][:5] == list(range(step + 1, step + 6))
    expected = undisturbed(samples=70, stream="noisy", steps=after[-1]["step"])
    assert [s["loss"] for s in after] == pytest.approx(expected[step : step + len(after)], rel=1e-4)
