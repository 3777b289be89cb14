"""Words of agents that somebody waits for."""

from __future__ import annotations

from typing import Any

import anyio


class Expected:
    """One of them, in its registry as long as it is waited for."""

    def __init__(self, registry: dict[Any, Expected], key: Any) -> None:
        self._registry = registry
        self._key = key
        registry[key] = self
        self._event = anyio.Event()
        self._report: dict[str, Any] | None = None

    def arrive(self, report: dict[str, Any] | None) -> None:
        """It is here; None: it will not come."""
        self._report = report
        self._event.set()

    async def wait(self) -> dict[str, Any] | None:
        """Until it is here."""
        await self._event.wait()
        return self._report

    def close(self) -> None:
        """Nobody waits any more."""
        if self._registry.get(self._key) is self:
            del self._registry[self._key]
