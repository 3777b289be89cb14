"""One pool of real ranks for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from rank_pool import ROOT, RankPool

sys.path.insert(0, str(ROOT / "examples/gpt"))  # the model that the scenarios train


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Starts real training processes."""
    pool = RankPool()
    yield pool
    pool.close()
