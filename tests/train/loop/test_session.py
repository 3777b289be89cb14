"""Training with the script's own loop, compared with the loop of `train.run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import ENVIRONMENT, RankPool, Run

OPTIONS = {"depth": 2, "steps": 6, "global_batch": 8, "clip_norm": 1.0, "warmup": True}


@pytest.fixture(scope="module")
def evaluated(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    own = {"evaluate_every": 3}
    return ranks.run(tmp_path_factory.mktemp("alone"), "dp=1", **OPTIONS, own_loop=own).checked()


@pytest.mark.parametrize(
    "plan", ["dp=2", slow("dp=1"), slow("tp=2,pp=2,accumulation=2"), slow("dp=2,zero=3"), slow("dp=2,zero=1")]
)
def test_both_front_doors_train_bit_by_bit_alike(plan: str, evaluated: Run, ranks: RankPool, tmp_path: Path) -> None:
    """Also with evaluations between the steps of one of them, whose results are those of one process."""
    one_call = ranks.run(tmp_path / "run", plan, **OPTIONS).checked()
    own = ranks.run(tmp_path / "session", plan, **OPTIONS, own_loop={"evaluate_every": 3}).checked()
    assert own.losses == one_call.losses
    for rank, other in zip(own.ranks, one_call.ranks, strict=True):
        assert rank.result["losses"] == own.losses
        assert rank.result["sums"] == other.result["sums"]
        assert rank.result["outcome"] == 6
    assert own.logged.keys() == evaluated.logged.keys() == {3, 6}
    for step, metrics in own.logged.items():
        assert metrics == pytest.approx(evaluated.logged[step], rel=1e-5)
        assert metrics.keys() == {"val", "both.right", "both.loss"}


@pytest.mark.slow
def test_leaving_the_loop_ends_the_job_as_done(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    run = ranks.run(tmp_path, "dp=2", **OPTIONS, own_loop={"leave_after": 4}, save=str(file)).checked()
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4]
    assert all(rank.result["saved"] for rank in run.ranks)  # each may go on with the file


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("alone", "what"), [("leaves", "left its loop"), ("evaluates", "called run.evaluate()")])
def test_a_call_of_one_rank_alone_is_refused_there(ranks: RankPool, tmp_path: Path, alone: str, what: str) -> None:
    """The ranks waited for each other in operations of different kinds, forever or until one failed."""
    main, _ = ranks.run(tmp_path, "dp=2", **OPTIONS, own_loop={"alone": alone}).ranks
    assert (main.exit_code, "Traceback" in main.output) == (92, False)
    assert f"rank 0 {what} after step 3, and rank 1 did not: the script's loop must make the same calls" in main.output


def test_a_batch_that_is_left_out_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = ranks.run(tmp_path, "dp=1", **OPTIONS, own_loop={"skip": 3})
    assert run.ranks[0].exit_code == 92
    assert "the batch of step 3 was not given to run.step()" in run.ranks[0].output


TWICE = """
from clusterd import train
from tests.foreign import batches

with train.session(**batches.arguments()) as run:
    for step, batch in run:
        for _ in range(2):
            run.step(batch)
"""


def test_several_updates_on_a_batch_are_refused_with_the_way_to_make_them() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 92
    assert "the batch of step 1 was given to run.step() 2 times: several updates on the same" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plans", [("dp=2", "dp=1", "dp=2,zero=3"), slow(("dp=1", "tp=2", "pp=2,accumulation=2"))])
def test_a_loop_moves_with_the_state_of_its_objects(
    plans: tuple[str, ...], moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    mover = moving(own_loop={"evaluate_every": 3})
    mover.start(plans[0])
    mover.train(3)
    for plan in plans[1:]:
        mover.move(plan)
        mover.train(3)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(undisturbed()[: len(steps)], rel=1e-4)
    table = [0.0, 0.0, 0.0]
    for number in range(1, len(steps) + 1):
        table[number % 3] += number
    for rank in mover.now.run.result()[0].ranks:
        assert (rank.result["count"], rank.result["table"]) == (len(steps), table)


@pytest.mark.slow
def test_a_loop_goes_on_after_a_crash_and_from_a_checkpoint(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path
) -> None:
    mover = moving(rank_file={"snapshot_every": 2}, own_loop={"reads": False})
    mover.start("dp=2")
    mover.train(6)
    mover.wait(lambda: mover.newest_snapshot()[1] > 0)
    mover.recover("dp=1")
    mover.train(2)
    saved: dict[str, Any] = mover.checkpoint(tmp_path / "saved")
    last = mover.stop()[-1]["step"]
    assert mover.now.run.result()[0].ranks[0].result["count"] == last
    more = {"restore": str(tmp_path / "saved"), "generation": 9}
    again = ranks.run_each(
        tmp_path / "again", "dp=2", [{"depth": 2, "steps": saved["step"] + 2, "own_loop": {}}], more=lambda _: more
    )[0].checked()
    assert [step["step"] for step in again.steps] == [saved["step"] + 1, saved["step"] + 2]
    assert again.ranks[0].result["count"] == saved["step"] + 2
