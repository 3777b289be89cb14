"""Resumption: the first step from a checkpoint has the loss that it had where the checkpoint was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from migration_driver import Mover
from rank_pool import RankPool

from clusterd.plans.plan import Plan
from clusterd.train.checkpoint.dcp_files import NEXT_STEP
from clusterd.train.loop.resumption import Resumption
from clusterd.train.process.exits import Refused


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[RankPool, RankPool]]:
    modules = ["tests.foreign.hidden_state", "tests.foreign.settings"]
    made = RankPool(modules=modules), RankPool(modules=modules)
    yield made
    for pool in made:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "lost"), [("data_that_counts", True), ("clipped_one_cycle", False)])
def test_a_restart_tells_of_state_that_its_checkpoint_lacks(
    pools: tuple[RankPool, RankPool], tmp_path: Path, script: str, lost: bool
) -> None:
    mover = Mover(pools, tmp_path, {"script": script})
    try:
        mover.start("dp=1")
        mover.train(4)
        step = mover.checkpoint(tmp_path / "checkpoint")["step"]
        mover.wait(lambda: (tmp_path / "checkpoint" / NEXT_STEP).exists(), "the loss beside the checkpoint")
        mover.stop()
    finally:
        mover.close()
    run = (
        pools[0]
        .run_each(
            tmp_path / "again",
            "dp=1",
            [{"script": script, "steps": step + 3}],
            more=lambda _: {"restore": str(tmp_path / "checkpoint")},
        )[0]
        .checked()
    )
    told = f"step {step + 1} has a loss of " in run.ranks[0].output
    assert told == lost, run.ranks[0].output


def training(plan: str = "dp=1", **context: Any) -> Any:
    """Stand-in for a training, as far as a resumption reads it."""
    job = SimpleNamespace(sees_batch="global")
    context = {"rank": 0, "plan": Plan.parse(plan), "refuses_difference": True, **context}
    return SimpleNamespace(job=job, normalises_parts=False, rounds_as="fp32", context=SimpleNamespace(**context))


def written(folder: Path, *, drew: bool = False) -> str:
    before = Resumption(training(), "")
    before.written(7, str(folder))
    before.record(7, 3.0, drew=False)
    assert not (folder / NEXT_STEP).exists()
    before.record(8, 2.0, drew=drew)
    assert json.loads((folder / NEXT_STEP).read_text())["loss"] == 2.0
    return str(folder)


def test_a_person_who_resumes_is_asked(tmp_path: Path) -> None:
    resumed = Resumption(training(), written(tmp_path))
    with pytest.raises(Refused, match=r"step 8 has a loss of 2.1, but had one of 2 .* --accept-difference"):
        resumed.record(8, 2.1, drew=False)


@pytest.mark.parametrize(("plan", "drew", "loss"), [("dp=1", True, 2.00001), ("dp=2", True, 2.3), ("dp=2", False, 2.0)])
def test_what_may_differ_is_no_difference(tmp_path: Path, plan: str, drew: bool, loss: float) -> None:
    Resumption(training(plan), written(tmp_path, drew=drew)).record(8, loss, drew=drew)


@pytest.mark.slow
def test_later_steps_and_checkpoints_without_a_loss_are_not_compared(tmp_path: Path) -> None:
    Resumption(training(), str(tmp_path)).record(8, 9.0, drew=False)
    Resumption(training(), written(tmp_path)).record(9, 9.0, drew=False)
