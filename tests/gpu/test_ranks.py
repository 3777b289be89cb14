"""Ranks on real GPUs: the same losses as on CPUs, under any plan, migrated and killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from migration_driver import Mover
from rank_pool import RankPool

GPUS = torch.cuda.device_count()
TOLERANCE = 1e-3
"""Other kernels, other roundings."""

pytestmark = pytest.mark.gpu
on_cuda = {"device": {"kind": "cuda"}}


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[RankPool, RankPool]]:
    both = RankPool(gpus=GPUS), RankPool(gpus=GPUS)
    yield both
    for pool in both:
        pool.close()


@pytest.fixture
def mover(pools: tuple[RankPool, RankPool], tmp_path: Path) -> Iterator[Mover]:
    made = Mover(pools, tmp_path, {"depth": 2, "pace_s": 0.03})
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_a_cpu(
    pools: tuple[RankPool, RankPool], tmp_path_factory: pytest.TempPathFactory, up_to_cuda: Callable[[str], None]
) -> list[float]:
    options = {"depth": 2, "steps": 400}
    run = pools[0].run_each(
        tmp_path_factory.mktemp("cpu"), "dp=1", [options], more=lambda _: {"device": {"kind": "cpu"}}
    )
    losses: list[float] = run[0].checked().losses
    up_to_cuda(f"ranks trained {len(losses)} steps on a CPU, to compare with")
    return losses


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=1,accumulation=2,checkpointing",
        "dp=1,offload=optimizer",
        "dp=1,zero=3,offload=parameters",
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "tp=2",
        "dp=2,zero=3,offload=parameters",
        "pp=2,accumulation=4",
        "dp=2,tp=2",
        "dp=2,tp=2,zero=3",
        "dp=2,pp=2,accumulation=2",
    ],
)
def test_a_gpu_trains_as_a_cpu_does(
    plan: str, pools: tuple[RankPool, RankPool], on_a_cpu: list[float], tmp_path: Path
) -> None:
    run = pools[0].run_each(tmp_path, plan, [{"depth": 2, "steps": 20}], more=lambda _: on_cuda)[0]
    assert run.checked().losses == pytest.approx(on_a_cpu[:20], rel=TOLERANCE)


@pytest.mark.parametrize(
    "walk",
    [
        ["cpu dp=1", "cuda dp=1", "cuda dp=1,offload=optimizer", "cpu dp=2", "cuda dp=1,zero=3,offload=parameters"],
        ["cuda dp=2", "cuda tp=2", "cuda dp=1", "cuda dp=2,zero=3", "cpu tp=2"],
        ["cuda dp=2,tp=2", "cuda dp=4,zero=1", "cuda dp=2", "cuda pp=4,accumulation=4"],
    ],
)
def test_a_job_moves_between_kinds_of_devices(walk: list[str], mover: Mover, on_a_cpu: list[float]) -> None:
    for number, place in enumerate(walk):
        kind, plan = place.split(" ")
        mover.rank_file = {"device": {"kind": kind}}
        if number:
            assert mover.move(plan) is not None
        else:
            mover.start(plan)
        mover.train(3)
    steps = mover.stop()
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert [s["loss"] for s in steps] == pytest.approx(on_a_cpu[: len(steps)], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("plan", "dead", "after"),
    [
        ("dp=2", 1, "dp=1"),
        ("dp=2,tp=2", 3, "tp=2"),  # communicators of two dimensions
        ("dp=2,pp=2,accumulation=2", 3, "dp=2"),
    ],
)
def test_survivors_on_gpus_hand_over_what_they_hold(
    mover: Mover, plan: str, dead: int, after: str, up_to_cuda: Callable[[str], None]
) -> None:
    """torch would abort them with their peer, and only the agent notifies them."""
    up_to_cuda("a pool of ranks has torch imported")
    mover.rank_file = on_cuda
    mover.start(plan)
    mover.train(3)
    mover.kill(dead, told=True)
    assert mover.move(after, lost=[dead]) is not None
    mover.train(3)
    steps = mover.stop()
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
