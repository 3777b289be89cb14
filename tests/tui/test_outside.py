"""What comes from outside: files of wrong types, recordings with holes, answers of another form. It is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from clusterd.errors import ConfigError
from tests.tui.test_pilot import window
from tests.tui.test_windows import drive
from tui import saved_views
from tui.app import Top
from tui.dialogs import Say


@pytest.mark.parametrize(
    "row",
    [
        {"name": 3, "screen": "queue"},
        {"name": "a", "screen": "queue", "filter": 5},
        {"name": "a", "screen": "queue", "descending": "yes"},
        {"name": "a", "screen": "queue", "columns": "id"},
        {"name": "a"},
        [],
        7,
    ],
)
def test_saved_views_of_wrong_types_are_said_to_be_none(row: Any) -> None:
    """And the screen stays as it is."""
    saved_views.path().write_text(json.dumps([row]))

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("v")
        refused = await window(pilot)
        assert isinstance(refused, Say)
        assert "holds no saved views" in refused.text

    drive(script)


def test_saved_views_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    view = saved_views.SavedView("mine", "queue", "state:queued", "name", True, ("id", "name"))
    saved_views.save(file, view)
    assert saved_views.load(file) == [view]
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="move it away"):
        saved_views.load(file)
