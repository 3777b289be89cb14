"""Streams: the same samples make up the same global batches under every plan, after every move and restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from migration_driver import Mover
from rank_pool import RankPool

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


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ("without", "is a stream (WithoutPosition) without a position, so that no move"),
        ("late", "does not go on at its position: after 4 samples"),
        slow("drawn", "does not go on at its position"),
    ],
)
def test_a_stream_that_would_repeat_samples_is_refused_before_training(
    stream: str, says: str, ranks: RankPool, tmp_path: Path
) -> None:
    for rank in (run := ranks.run(tmp_path, "dp=1", **{**OPTIONS, "stream": stream})).ranks:
        assert rank.exit_code == 92
        assert says in rank.output
        assert "def load_state_dict(self, state)" in rank.output
    assert run.steps == []


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
