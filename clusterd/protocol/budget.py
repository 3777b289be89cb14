"""Budget of bytes in memory, shared by the connections of a server.

Whoever lets peers send or ask for large frames reserves their bytes first and waits while there are none left: peers
that send half a frame, or do not read their answers, then cost others time but never memory. Runs on hosts: standard
library only, Python 3.10.
"""

from __future__ import annotations

import asyncio
from collections import Counter

FREE_BYTES = 16 << 10
"""A smaller reservation is always granted at once: requests to stop something are never held up by large frames."""


class ByteBudget:
    """Bytes reserved by owner (a user, a job's attempt), with one limit for each owner and one for all together."""

    def __init__(self, owner_bytes_max: int, bytes_max: int) -> None:
        self._owner_bytes_max, self._bytes_max = owner_bytes_max, bytes_max
        self._reserved: Counter[str] = Counter()
        self._released = asyncio.Event()

    async def reserve(self, owner: str, count: int) -> None:
        """Wait until `count` more bytes fit, and take them; to be followed by `release` in any case."""
        while count > FREE_BYTES and not self._fits(owner, count):
            await self._released.wait()
        self._reserved[owner] += count

    def release(self, owner: str, count: int) -> None:
        """Give bytes back."""
        self._reserved[owner] -= count
        if self._reserved[owner] <= 0:
            del self._reserved[owner]
        self._released.set()
        self._released = asyncio.Event()

    def _fits(self, owner: str, count: int) -> bool:
        # One that is alone is granted whatever its size: the limit on frames is another one.
        mine, everybody = self._reserved[owner], self._reserved.total()
        return (not mine or mine + count <= self._owner_bytes_max) and (
            not everybody or everybody + count <= self._bytes_max
        )
