"""One pool of real ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Starts real training processes."""
    pool = RankPool()
    yield pool
    pool.close()
