"""Times of day in UTC."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def a_terminal_like_any_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same picture on every machine."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC")
        changed.delenv("NO_COLOR", raising=False)
        time.tzset()
        yield
    time.tzset()
