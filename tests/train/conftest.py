"""One pool of real ranks for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import ROOT, RankPool

sys.path[:0] = [str(ROOT / "examples/gpt"), str(ROOT / "examples/hf")]  # the models that the scenarios train


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Pool that starts real training processes."""
    pool = RankPool()
    yield pool
    pool.close()


OPTIONS = {"depth": 2, "pace_s": 0.03}


@pytest.fixture(scope="session")
def pools(ranks: RankPool) -> Iterator[tuple[RankPool, RankPool]]:
    second = RankPool()
    yield ranks, second
    second.close()


@pytest.fixture
def moving(pools: tuple[RankPool, RankPool], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from migration_driver import Mover  # it needs the model that is on the path by now

    movers: list[Mover] = []

    def moving(hosts: str = "a", rank_file: dict[str, Any] | None = None, **options: Any) -> Mover:
        movers.append(Mover(pools, tmp_path, {**OPTIONS, **options}, tuple(hosts), rank_file or {}))
        return movers[-1]

    yield moving
    for mover in movers:
        mover.close()


@pytest.fixture(scope="session")
def undisturbed(
    pools: tuple[RankPool, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[float]]:
    """Losses of one process that never migrates."""
    known: dict[str, list[float]] = {}

    def losses(**options: Any) -> list[float]:
        key = repr(sorted(options.items()))
        if key not in known:
            run = pools[0].run(tmp_path_factory.mktemp("one"), "dp=1", **{"depth": 2, "steps": 400, **options})
            known[key] = run.checked().losses
        return known[key]

    return losses
