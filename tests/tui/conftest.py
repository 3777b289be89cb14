"""Times of day in UTC, and no saved views of a user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def a_terminal_like_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The same picture on every machine."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC")
        changed.delenv("NO_COLOR", raising=False)
        changed.setenv("CLUSTERD_VIEWS", str(tmp_path / "views.json"))
        time.tzset()
        yield
    time.tzset()
