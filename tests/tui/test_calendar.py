"""The calendar of the terminal UI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clusterd.tui.widgets.dialogs import TextDialog
from tests.tui.staged import staged
from tests.tui.test_pilot import until


@pytest.mark.parametrize("width", [80, 160])
def test_a_key_shows_who_is_expected_where(width: int) -> None:
    async def run() -> None:
        app = staged()
        source: Any = app.shared.source
        now_s = app.shared.clock()
        source.answers["calendar"] = [
            {"what": "running", "host": "gpu01", "devices": ["gpu01:gpu0"], "from_s": now_s - 60.0, "until_s": None,
             "user": "ann", "job": "1", "text": "net (1)"},
            {"what": "booking", "host": "gpu01", "devices": ["gpu01:gpu1"], "from_s": now_s + 3600.0,
             "until_s": now_s + 7200.0, "user": "bob", "claim": "3", "text": "booking 3: paper"},
            {"what": "expected", "from_s": now_s + 60.0, "user": "eve", "job": "2", "text": "wide (2), expected"},
        ]  # fmt: skip
        async with app.run_test(size=(width, 40)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            await pilot.press("C")
            await until(pilot, lambda: isinstance(app.screen, TextDialog))
            text = app.screen.text  # type: ignore[attr-defined]
            assert text.splitlines()[0] == "gpu01"
            assert "now  gpu0  ann  net (1)" in text
            assert "gpu1  bob  booking 3: paper" in text
            assert "host not known yet" in text

    asyncio.run(run())
