"""Ranks that take their CPU for a GPU: the control flow of training and migration on GPUs, without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_state
from cases import slow
from stand_in import TOTAL_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "walk",
    [
        ["dp=2", "tp=2", "dp=1"],
        slow(["dp=1", "dp=1,offload=optimizer", "dp=2,zero=3"]),
        slow(["dp=2,zero=1", "pp=2,accumulation=2", "dp=2,tp=2"]),
    ],
)
def test_moves_beside_pinned_memory_change_no_loss(
    walk: list[str], moving: Callable[..., Any], undisturbed: Callable[..., list[float]]
) -> None:
    """The stand-in's memory is pinned in pages, so that nearly every tensor crosses a border."""
    mover = moving(stand_in=True)
    mover.start(walk[0])
    for plan in walk[1:]:
        mover.train(7)  # a timed step is among them
        assert mover.move(plan) is not None
    mover.train(3)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(undisturbed()[: len(steps)], rel=1e-4)
    for place, generation in enumerate(mover.generations):
        gpus = [rank.result["gpu"] for rank in generation.run.result()[0].ranks]
        if place == len(mover.generations) - 1:  # what it pinned and opened to read, it has released
            assert [(gpu["registered"], gpu["opened"]) for gpu in gpus] == [(0, 0)] * len(gpus)
        if place:  # a target rank leaves memory to the source ranks until it resumes
            assert all(gpu["calls"]["empty_cache"] for gpu in gpus)
            assert {gpu["limits"][-1] for gpu in gpus} == {None}
            assert 0 < gpus[0]["limits"][0] < TOTAL_BYTES  # on the same device as a source rank
        if place < len(mover.generations) - 1:  # a source rank frees what it caches when a migration begins
            assert all(gpu["calls"]["empty_cache"] > bool(place) for gpu in gpus)
            assert sum(gpu["calls"].get("register", 0) for gpu in gpus) > 0


@pytest.mark.parametrize(
    ("options", "walk"),
    [
        slow({"optimizer": "adafactor"}, ["dp=2", "dp=2,zero=1", "dp=1"]),
        slow({"model": "tables", "optimizer": "counting"}, ["dp=2,zero=1", "dp=1", "pp=2,accumulation=2"]),
        ({"model": "tables"}, ["dp=1", "dp=1,offload=optimizer"]),
    ],
    ids=["odd slots", "buffers that are replaced by others", "part of it in host memory"],
)
def test_every_bit_of_the_state_is_read_from_the_memory_of_the_source_rank(
    options: dict[str, Any], walk: list[str], moving: Callable[..., Any], tmp_path: Path
) -> None:
    mover = moving(**options, stand_in=True, record=str(tmp_path / "state"))
    mover.start(walk[0])
    for plan in walk[1:]:
        mover.train(3)
        assert mover.move(plan) is not None
        said = mover.said(mover.now, "loaded", mover.moves[-1].id).values()
        shared = min(generation.plan.ranks for generation in mover.generations[-2:])  # the first ranks' devices
        assert sum(each["bytes_device"] > 0 for each in said) == shared
        if plan.endswith("optimizer"):
            assert all(each["bytes_device"] < each["bytes_local"] for each in said)
    mover.train(3)
    mover.stop()
    for number in range(2, 1 + len(walk)):
        left = recorded_state.read(tmp_path / "state", f"test.1.{number}-old")
        arrived = recorded_state.read(tmp_path / "state", f"test.1.{number}-new")
        recorded_state.assert_equal(left, arrived)


@pytest.mark.slow
def test_memory_that_the_driver_does_not_share_goes_through_the_host(
    moving: Callable[..., Any], undisturbed: Callable[..., list[float]]
) -> None:
    mover = moving(stand_in="alone")
    mover.start("dp=1")
    mover.train(3)
    assert mover.move("dp=1,checkpointing") is not None
    move = mover.moves[-1].id
    assert [each["bytes_device"] for each in mover.said(mover.now, "loaded", move).values()] == [0]
    [prepared] = mover.said(mover.generations[0], "prepared", move).values()
    assert "gives no handles" in prepared["not_shared"]
    mover.train(3)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(undisturbed()[: len(steps)], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["prepared", slow("quiesced")])
def test_an_undone_move_leaves_shared_memory_to_the_source_ranks(
    after: str, moving: Callable[..., Any], undisturbed: Callable[..., list[float]]
) -> None:
    mover = moving(stand_in=True)
    mover.start("dp=2")
    for _ in range(2):
        mover.train(2)
        mover.move("tp=2", abort_after=after)
    mover.train(2)
    mover.move("dp=1")
    mover.train(3)
    steps = mover.stop()
    assert [s["loss"] for s in steps] == pytest.approx(undisturbed()[: len(steps)], rel=1e-4)


@pytest.mark.slow
def test_a_job_resumes_from_pinned_state_snapshots_under_another_plan(
    moving: Callable[..., Any], undisturbed: Callable[..., list[float]]
) -> None:
    """Tensor-parallel ranks read columns of whole tensors: copies with gaps, beside the borders of pinned memory."""
    mover = moving(stand_in=True, rank_file={"snapshot_every": 2})
    mover.start("dp=2")
    mover.wait(lambda: mover.newest_snapshot()[1] >= 4)
    step = mover.recover("tp=2")
    mover.train(5)
    mover.stop()
    after = mover.now.steps()
    assert [s["step"] for s in after] == list(range(step + 1, step + 1 + len(after)))
    assert [s["loss"] for s in after] == pytest.approx(undisturbed()[step : step + len(after)], rel=1e-4)
