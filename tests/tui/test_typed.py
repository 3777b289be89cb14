"""Nothing that is typed ends the interface: it is taken, or said what is wrong with it, right under it."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from tests.tui.test_pilot import type_in, until, window
from tests.tui.test_windows import drive
from tui.app import Top


@pytest.mark.parametrize(
    ("key", "typed", "said"),
    [
        ("p", "--5", "a whole number"),
        ("p", "-", "a whole number"),
        ("p", "9" * 5000, "a whole number"),
        ("n", "~nouser/x.toml", "home directory"),
        ("n", "a" * 300, "File name too long"),
        ("n", "", "there is no file"),
        ("K", "relative", "an absolute path"),
        ("v", "", "a name"),
        ("slash", "(", "no regular expression"),
    ],
    ids=lambda text: text[:12],
)
def test_a_slip_is_said_under_what_was_typed(key: str, typed: str, said: str) -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        before = list(source.calls)
        await pilot.press(key)
        if key == "v":
            chooser = await window(pilot)
            chooser.list.highlighted = [name for name, _ in chooser._options].index("keep")
            await pilot.press("enter")
            await until(pilot, lambda: type(app.screen).__name__ == "Ask")
        ask = await window(pilot)
        await type_in(pilot, typed)
        await until(pilot, lambda: said in str(ask._wrong.content))
        assert app.screen is ask
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert [call for call in source.calls if call[0] != "history"] == [c for c in before if c[0] != "history"]

    drive(script)


def test_a_priority_is_sent_as_the_number_that_was_typed() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        source.answers["priority"] = {}
        await pilot.press("p")
        await window(pilot)
        await type_in(pilot, " +07 ")
        await until(pilot, lambda: source.calls[-1] == ("priority", {"job": "1", "priority": 7}))

    drive(script)


def test_a_pager_that_is_no_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unbalanced quote in the environment."""
    monkeypatch.setenv("PAGER", 'less "-R')

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("o")
        said = await window(pilot)
        assert "$PAGER" in said.text
        assert "No closing quotation" in said.text

    drive(script)
