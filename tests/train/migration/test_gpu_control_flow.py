"""Ranks that take their CPU for a GPU: the control flow of training and migration on GPUs, without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
        if place == len(mover.generations) - 1:  # what it pinned to read, it has unpinned
            assert [gpu["registered"] for gpu in gpus] == [0] * len(gpus)
        if place:  # a target rank leaves memory to the source ranks until it resumes
            assert all(gpu["calls"]["empty_cache"] for gpu in gpus)
            assert {gpu["limits"][-1] for gpu in gpus} == {None}
            assert 0 < gpus[0]["limits"][0] < TOTAL_BYTES  # on the same device as a source rank
        if place < len(mover.generations) - 1:  # a source rank frees what it caches when a migration begins
            assert all(gpu["calls"]["empty_cache"] > bool(place) for gpu in gpus)
            assert sum(gpu["calls"].get("register", 0) for gpu in gpus) > 0


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
