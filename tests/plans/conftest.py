"""Real ranks for the tests that train; shared with the tests of `clusterd.train`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Pool that starts real training processes."""
    pool = RankPool()
    yield pool
    pool.close()
