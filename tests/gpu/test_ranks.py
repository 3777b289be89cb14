"""Ranks on real GPUs: the same losses as on CPUs, under any plan, migrated and killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import Figures
from migration_driver import Mover
from rank_pool import RankPool

GPUS = torch.cuda.device_count()
TOLERANCE = 1e-3
"""Other kernels, other roundings."""

pytestmark = [pytest.mark.gpu, pytest.mark.time_limit(100)]


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[RankPool, RankPool]]:
    with closing(RankPool(gpus=GPUS)) as first, closing(RankPool(gpus=GPUS)) as second:
        yield first, second


@pytest.fixture(scope="module")
def stand_in(kind: str) -> dict[str, Any]:
    """Further options of a job whose ranks take their CPU for a GPU."""
    return {"stand_in": True} if kind == "cpu" else {}


@pytest.fixture
def mover(pools: tuple[RankPool, RankPool], tmp_path: Path, stand_in: dict[str, Any]) -> Iterator[Mover]:
    made = Mover(pools, tmp_path, {"depth": 2, "pace_s": 0.03, **stand_in})
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
    plan: str,
    pools: tuple[RankPool, RankPool],
    on_a_cpu: list[float],
    kind: str,
    stand_in: dict[str, Any],
    tmp_path: Path,
) -> None:
    device = {"device": {"kind": kind}}
    run = pools[0].run_each(tmp_path, plan, [{"depth": 2, "steps": 20, **stand_in}], more=lambda _: device)[0]
    assert run.checked().losses == pytest.approx(on_a_cpu[:20], rel=TOLERANCE)


@pytest.mark.parametrize(
    "walk",
    [
        ["cpu dp=1", "cuda dp=1", "cuda dp=1,offload=optimizer", "cpu dp=2", "cuda dp=1,zero=3,offload=parameters"],
        ["cuda dp=2", "cuda tp=2", "cuda dp=1", "cuda dp=2,zero=3", "cpu tp=2"],
        ["cuda dp=2,tp=2", "cuda dp=4,zero=1", "cuda dp=2", "cuda pp=4,accumulation=4"],
    ],
)
def test_a_job_moves_between_kinds_of_devices(
    walk: list[str], mover: Mover, on_a_cpu: list[float], kind: str, figures: Figures
) -> None:
    for number, place in enumerate(walk):
        where, plan = place.split(" ")
        mover.rank_file = {"device": {"kind": "cpu" if where == "cpu" else kind}}
        if number:
            moved = mover.move(plan)
            assert moved is not None
            figures.record(f"downtime of a small job: {walk[number - 1]} to {place}", moved.downtime_s * 1e3, "ms")
        else:
            mover.start(plan)
        mover.train(3)
    steps = mover.stop()
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    both = min(len(steps), len(on_a_cpu))
    assert [s["loss"] for s in steps[:both]] == pytest.approx(on_a_cpu[:both], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("plan", "dead", "after"),
    [
        ("dp=2", 1, "dp=1"),
        ("dp=2,tp=2", 3, "tp=2"),  # communicators of two dimensions
        ("dp=2,pp=2,accumulation=2", 3, "dp=2"),
    ],
)
def test_survivors_on_gpus_hand_over_what_they_hold(
    mover: Mover, plan: str, dead: int, after: str, kind: str, up_to_cuda: Callable[[str], None]
) -> None:
    """torch would abort them with their peer, and only the agent notifies them."""
    up_to_cuda("a pool of ranks has torch imported")
    mover.rank_file = {"device": {"kind": kind}}
    mover.start(plan)
    mover.train(3)
    left = mover.kill(dead, told=True)
    step = max(said["step"] for said in left.values())
    behind = {r for r, said in left.items() if said["step"] < step - (1 if said["may_finish"] else 0)}
    # As the scheduler does: ranks that cannot follow to the newest step are lost too.
    assert mover.move(after, lost=[dead, *behind], step=step) is not None
    mover.train(3)
    steps = mover.stop()
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))


def test_a_job_resumes_from_the_state_snapshot_of_killed_ranks(mover: Mover, on_a_cpu: list[float], kind: str) -> None:
    """Copied from GPUs while steps ran; under another plan afterwards."""
    mover.rank_file = {"device": {"kind": kind}, "snapshot_every": 2}
    mover.start("dp=2")
    mover.wait(lambda: mover.newest_snapshot()[1] >= 4, "a state snapshot")
    step = mover.recover("tp=2")
    mover.train(3)
    mover.stop()
    after = mover.now.steps()
    assert [s["step"] for s in after] == list(range(step + 1, step + 1 + len(after)))
    assert [s["loss"] for s in after] == pytest.approx(on_a_cpu[step : step + len(after)], rel=TOLERANCE)
