"""Typed text is accepted, or its mistake is shown below it; none ends the interface."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.pilot import Pilot

from clusterd.tui.app import Top
from tests.tui.staged import LIVE, host, job, staged
from tests.tui.test_pilot import type_in, until, window
from tests.tui.test_windows import drive


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("key", "typed", "message"),
    [
        ("p", "--5", "a whole number"),
        ("p", "-", "a whole number"),
        ("p", "9" * 5000, "a whole number"),
        ("n", "~nouser/x.toml", "home directory"),
        ("n", "a" * 300, "File name too long"),
        ("n", "", "there is no file"),
        ("K", "relative", "an absolute path"),
        ("slash", "(", "not a regular expression"),
        ("slash", "x{99999999999}", "not a regular expression"),
        ("slash", "(" * 3000, "not a regular expression"),
        ("slash", "!" * 3000 + "(", "not a regular expression"),
        ("slash", "step:>nan", "not a number"),
    ],
    ids=lambda text: text[:12],
)
def test_an_input_error_is_shown_under_the_input(key: str, typed: str, message: str) -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        before = list(source.calls)
        await pilot.press(key)
        ask = await window(pilot)
        await type_in(pilot, typed)
        await until(pilot, lambda: message in str(ask._wrong.content))
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
        message = await window(pilot)
        assert "$PAGER" in message.text
        assert "No closing quotation" in message.text

    drive(script)


MARKUP = "a[/b]["
"""A name that is no markup, and would be bad markup."""


def test_typed_text_is_not_markup() -> None:
    """Of a checkpoint's path, of a search in a log: shown to the letter."""

    async def noticed(pilot: Pilot[Any], terms: str) -> None:
        await until(pilot, lambda: any(terms in str(toast.render()) for toast in pilot.app.screen.query("Toast")))

    async def script(pilot: Pilot[Any], app: Top) -> None:
        source: Any = app.shared.source
        source.answers["checkpoint"] = {"step": 7, "path": f"/tmp/{MARKUP}", "blocked_s": 0.1}
        await pilot.press("K")
        await window(pilot)
        await type_in(pilot, f"/tmp/{MARKUP}")
        await noticed(pilot, f"step 7 is in /tmp/{MARKUP}")
        await pilot.press("l")
        await window(pilot)
        await pilot.press("slash")
        await type_in(pilot, f"{MARKUP}(")
        await noticed(pilot, f"'{MARKUP}(' is not a regular expression")

    async def run() -> None:
        app = staged()
        async with app.run_test(size=(120, 40), notifications=True) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            await script(pilot, app)

    asyncio.run(run())


def test_names_that_look_like_markup_stand_in_titles_as_they_are() -> None:
    """A job's and a host's, on every screen and in the windows about them."""
    rows = {"status": {}, "jobs": [job(1, MARKUP, "running", attempt=1)], "hosts": [host(MARKUP, jobs=[MARKUP])]}

    async def run() -> None:
        app = staged([LIVE, {"snapshot": rows, "number": 8}])
        source: Any = app.shared.source
        source.answers["plans"] = {"rows": [{"plan": "dp=2", "devices": 2}]}
        why = {"state": "running", "reason": MARKUP, "ahead": [], "holders": {}, "unusable": [], "decisions": []}
        source.answers["why"] = why
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            board: Any = app.board
            assert MARKUP in str(board.detail._border_title)
            await until(pilot, lambda: MARKUP in str(board.log_pane._border_title))
            for key in "wmcpKlL":
                await pilot.press(key)
                await window(pilot)
                await pilot.press("escape")
                await until(pilot, lambda: len(app.screen_stack) == 1)
            await pilot.press("3")
            board = app.board
            assert MARKUP in str(board.page._border_title)
            await pilot.press("1")
            board = app.board
            assert MARKUP in str(board.detail._border_title)
            await pilot.press("d")
            ask = await window(pilot)
            assert MARKUP in str(ask.query_one(".dialog")._border_title)

    asyncio.run(run())
