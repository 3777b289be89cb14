"""A running job moves from plan to plan, and no loss shows it.

Real ranks, real segments; agents and daemon are played (`agent_double`, `mover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mover import Mover
from rank_pool import RankPool

PACE_S = 0.03
TOLERANCE = 1e-4
OPTIONS = {"depth": 2, "pace_s": PACE_S}


@pytest.fixture(scope="session")
def pools(ranks: RankPool) -> Iterator[tuple[RankPool, RankPool]]:
    second = RankPool()
    yield ranks, second
    second.close()


@pytest.fixture
def moving(pools: tuple[RankPool, RankPool], tmp_path: Path) -> Iterator[Callable[..., Mover]]:
    movers: list[Mover] = []

    def moving(hosts: str = "a", **options: Any) -> Mover:
        movers.append(Mover(pools, tmp_path, {**OPTIONS, **options}, tuple(hosts)))
        return movers[-1]

    yield moving
    for mover in movers:
        mover.close()


@pytest.fixture(scope="session")
def undisturbed(pools: tuple[RankPool, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """Losses of one process that nobody moves."""
    known: dict[str, list[float]] = {}

    def losses(**options: Any) -> list[float]:
        key = repr(sorted(options.items()))
        if key not in known:
            run = pools[0].run(tmp_path_factory.mktemp("one"), "dp=1", **{"depth": 2, "steps": 400, **options})
            known[key] = run.checked().losses
        return known[key]

    return losses


def assert_undisturbed(steps: list[dict[str, Any]], expected: list[float]) -> None:
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=TOLERANCE)


@pytest.mark.parametrize(
    "walk",
    [
        ["dp=2", "tp=2", "pp=2,accumulation=2", "dp=2,zero=3", "dp=2,zero=1"],
        ["dp=2,tp=2", "tp=4", "dp=4,zero=3", "dp=2,pp=2,accumulation=2", "dp=1"],
        ["dp=2,tp=2,zero=3", "dp=2,zero=3,offload=parameters", "dp=2,shares=5:11", "dp=2,offload=optimizer", "pp=2,tp=2,accumulation=2"],
    ],
    ids=" > ".join,
)
def test_moves_change_no_loss(
    walk: list[str], moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    expected = undisturbed()
    mover = moving()
    mover.start(walk[0])
    for plan in walk[1:]:
        mover.train(3)
        print(plan, mover.move(plan))
    mover.train(10)
    assert_undisturbed(mover.stop(), expected)
