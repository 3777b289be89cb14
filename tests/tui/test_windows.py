"""Requests of windows to the source."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from clusterd.tui.app import Top
from clusterd.tui.commands import actions
from clusterd.tui.commands.actions import job_files
from clusterd.tui.model.keys import COMMANDS
from clusterd.tui.widgets.log_pane import LogPane
from clusterd.tui.widgets.migrate_dialog import MigrationDialog, PlanDialog
from clusterd.tui.widgets.table import Table
from tests.tui.staged import NOW_S, staged
from tests.tui.test_pilot import until, window

PREVIEW = {
    "from": "dp=2,tp=2", "plan": "dp=4,zero=1", "devices": ["gpu01:gpu0"], "local_bytes": 1 << 30, "network_bytes": 0,
    "predicted_downtime_s": 0.31, "migrations": 1,
}  # fmt: skip


def drive(script: Callable[[Top, Any, Pilot[Any]], Awaitable[None]], **options: Any) -> None:
    """Open the interface on a staged source."""

    async def run() -> None:
        app = staged(**options)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            await script(app, app.shared.source, pilot)

    asyncio.run(run())


def test_the_best_plan_is_first_and_its_cost_is_asked_before_anything_moves() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        source.answers["plans"] = {
            "rows": [
                {"plan": "dp=4,zero=1", "devices": 4, "step_time_s": 0.36},
                {"plan": "dp=2,tp=2", "devices": 4, "step_time_s": 0.40, "current": True},
            ]
        }
        source.answers["migrate"] = PREVIEW
        await pilot.press("m")
        chooser = await window(pilot)
        assert isinstance(chooser, PlanDialog)
        await until(pilot, lambda: "310ms" in chooser.preview.text)
        asked = [args for verb, args in source.calls if verb == "migrate"]
        assert asked == [{"job": "1", "plan": "dp=4,zero=1", "dry_run": True}]
        await pilot.press("enter")
        await until(pilot, lambda: type(app.screen).__name__ == "ConfirmDialog")
        await pilot.press("y")
        await until(pilot, lambda: isinstance(app.screen, MigrationDialog))
        assert source.calls[-1] == ("migrate", {"job": "1", "plan": "dp=4,zero=1", "pin": False})

    drive(script)


def test_a_job_with_a_loop_of_its_own_is_started_again() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        job = {"id": "1", "name": "own", "kind": "checkpointable", "state": "running", "plan": "dp=4"}
        await source.queue.put({"number": 9, "jobs": [job]})
        await until(pilot, lambda: app.shared.model.jobs["1"].kind == "checkpointable")
        source.answers["migrate"] = {"from": "dp=4", "plan": "dp=2", "restarts": True}
        await pilot.press("m")
        await window(pilot)
        await pilot.press(*["backspace"] * 4, *"dp=2", "enter")
        await until(pilot, lambda: type(app.screen).__name__ == "ConfirmDialog")
        await pilot.press("y")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert source.calls[-1] == ("migrate", {"job": "1", "plan": "dp=2", "pin": False})
        assert not any(verb == "plans" for verb, _ in source.calls)

    drive(script)


def test_a_refused_verb_shows_the_daemons_message() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("w")
        output = await window(pilot)
        assert "does not know 'why'" in output.text

    drive(script)


def test_leaving_a_window_asks_nothing() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: any(verb == "history" for verb, _ in source.calls))
        before = list(source.calls)
        for key in ("c", "p", "K", "n", "slash", "s", "f2", "question_mark"):
            await pilot.press(key)
            await window(pilot)
            await pilot.press("escape")
            await until(pilot, lambda: len(app.screen_stack) == 1)
        assert source.calls == before

    drive(script)


def test_the_cursor_stays_with_its_job_when_others_come_and_go() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        board: Any = app.board
        await pilot.press("a")  # also jobs that are over
        board.table.move_to("5")
        new = [{"id": str(n), "name": f"new{n}", "state": "running", "submitted_s": NOW_S} for n in range(100, 160)]
        change = {"number": 9, "at_s": NOW_S, "jobs": new}
        await source.queue.put(change)
        await until(pilot, lambda: len(board.table.keys) == 66)
        assert board.table.cursor == "5"
        at = board.table.keys.index("5") + 1 - board.table.scroll_offset.y
        assert 1 <= at < board.table.size.height
        await pilot.press("space")
        assert board.table.marked == {"5"}
        await source.queue.put({"number": 10, "jobs": [{"id": "5", "name": "sweep-17", "state": "failed"}]})
        await until(pilot, lambda: app.shared.model.jobs["5"].state == "failed")
        await pilot.pause(0.15)
        assert board.table.marked == {"5"}

    drive(script)


def test_the_cursor_goes_to_a_job_that_is_not_there_yet() -> None:
    """The answer to a submit may be here before the news of its job: the cursor stayed where it was."""

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        board: Any = app.board
        app.goto_job_row("77")
        await pilot.pause()
        new = [{"id": str(n), "name": f"new{n}", "state": "queued", "submitted_s": NOW_S} for n in (76, 77)]
        await source.queue.put({"number": 9, "at_s": NOW_S, "jobs": new})
        await until(pilot, lambda: board.jobs() == ["77"])
        await pilot.press("home")
        await source.queue.put({"number": 10, "jobs": [{**new[0], "id": "78"}]})
        await until(pilot, lambda: "78" in board.table.keys)
        assert board.jobs() != ["77"], "once"

    drive(script)


def test_a_daemon_that_recovers_is_up_when_the_last_host_is_heard() -> None:
    """The snapshot says which hosts it waits for, and each change which of them are left."""

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        head: Any = app.query_one("#head")
        status = {"started_s": NOW_S - 5, "recovering": ["gpu01", "gpu02"]}
        await source.queue.put({"snapshot": {"status": status, "jobs": [], "hosts": []}, "number": 9})
        await until(pilot, lambda: "daemon recovering" in head.text)
        await source.queue.put({"number": 10, "recovering": ["gpu02"]})
        await until(pilot, lambda: app.shared.model.number == 10)
        assert "daemon recovering" in head.text
        await source.queue.put({"number": 11, "recovering": []})
        await until(pilot, lambda: "daemon up 5.0s" in head.text)

    drive(script)


def test_the_newest_event_is_on_top_until_the_cursor_leaves_the_top() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        board: Any = app.board
        await until(pilot, lambda: len(board.table.keys) == 4)
        first = board.table.cursor
        event = {"kind": "TimerFired", "id": 9, "at_s": NOW_S, "timer": "a"}
        await source.queue.put({"number": 9, "at_s": NOW_S, "events": [event]})
        await until(pilot, lambda: len(board.table.keys) == 5)
        assert board.table.cursor == board.table.keys[0] != first
        await pilot.press("j")
        second = board.table.cursor
        await source.queue.put({"number": 10, "at_s": NOW_S, "events": [{**event, "id": 10}]})
        await until(pilot, lambda: len(board.table.keys) == 6)
        assert board.table.cursor == second

    drive(script, first="events")


def test_mouse_and_tab_reach_every_pane() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.click("#queue-table", offset=(8, 3))
        board: Any = app.board
        assert board.table.cursor == board.table.keys[1]
        await pilot.click("#head", offset=(3, 1))
        await until(pilot, lambda: app.board.id == "fleet")
        await pilot.press("2", "tab", "tab")
        await until(pilot, lambda: app.focused is board.log_pane)

    drive(script)


def test_job_files_are_gone_through_with_the_arrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new user presses down; what is typed first narrows it."""
    for name in ("one.toml", "two.toml", "three.toml"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("n")
        ask = await window(pilot)
        seen = []
        for key in ("down", "down", "down", "down", "up"):
            await pilot.press(key)
            seen.append(ask._input.value)
        assert seen == ["one.toml", "three.toml", "two.toml", "one.toml", "two.toml"]
        ask._input.value = "th"
        await pilot.press("up")
        assert ask._input.value == "three.toml"
        await pilot.press("escape")

    drive(script)


def test_job_files_are_looked_for_near_first_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a user's data there is no end of directories."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c/far.toml", "z/near.toml", ".venv/lib/none.toml", "here.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert job_files() == ["here.toml", "z/near.toml", "a/b/c/far.toml"]
    monkeypatch.setattr(actions, "LOOK_S", 0.0)
    assert job_files() == []


def test_in_a_small_terminal_a_window_of_plans_keeps_its_keys_in_sight() -> None:
    """Thirty plans at 80x24: the list scrolls, the cost and the keys stay."""

    async def run() -> None:
        app = staged()
        source: Any = app.shared.source
        source.answers["plans"] = {
            "rows": [{"plan": f"dp={n}", "devices": n, "step_time_s": 1 / n} for n in range(1, 31)]
        }
        source.answers["migrate"] = PREVIEW
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            await pilot.press("m")
            chooser = await window(pilot)
            await until(pilot, lambda: "310ms" in chooser.preview.text)
            box = chooser.query_one(".dialog").region
            for part in (chooser.preview, chooser.query_one(".hint")):
                assert box.contains_region(part.region), part
                assert part.size.height == part.region.height > 0

    asyncio.run(run())


def test_in_a_small_terminal_a_short_queue_leaves_its_rows_to_the_panes_below() -> None:
    """Regression: at 80x24 half of the lines were the table's, empty with two jobs, while the details were cut."""

    async def run(height: int) -> tuple[int, int]:
        app = staged()
        async with app.run_test(size=(80, height)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            table = app.query_one("#queue-table", Table)
            await until(pilot, lambda: table.size.height > 0)
            return table.outer_size.height, max(table.virtual_size.height + 1, 6)

    high, wanted = asyncio.run(run(60))
    assert high == wanted
    assert asyncio.run(run(24))[0] <= 11
    assert asyncio.run(run(14))[0] > 6, "all of a screen without panes"


def test_a_filter_that_is_none_is_refused_where_it_is_typed() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("slash")
        ask = await window(pilot)
        await pilot.press(*"sate:x", "enter")
        assert "no field 'sate'" in str(ask._wrong.content)
        await pilot.press("escape")
        assert len(app.screen_stack) == 1

    drive(script)


def test_a_filter_that_takes_for_ever_is_taken_off() -> None:
    """Each star of it may take what any other could."""

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        board: Any = app.board
        everything = list(board.table.keys)
        await pilot.press("slash")
        ask = await window(pilot)
        ask._input.value = "(.*)*(.*)*(.*)*X$"
        await pilot.press("enter")
        await until(pilot, lambda: not board.filter)
        assert list(board.table.keys) == everything
        await until(pilot, lambda: any("took too long" in note.message for note in app._notifications))

    drive(script)


def test_a_progress_bar_of_one_width_goes_on() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        pane = app.query_one("#queue-log", LogPane)
        await until(pilot, lambda: "step 2" in pane.text)
        pane._window.feed(b"\r 10% |#   |")
        await until(pilot, lambda: pane.text.endswith(" 10% |#   |"))
        pane._window.feed(b"\r 20% |##  |")
        await until(pilot, lambda: pane.text.endswith(" 20% |##  |"))

    drive(script)


def test_of_a_long_log_the_end_is_shown_from_its_next_line_on() -> None:
    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        source.log_begin = 1 << 30
        pane = app.query_one("#queue-log", LogPane)
        pane.follow_job(source, "1", name="gpt")
        await until(pilot, lambda: "step 2  loss 9.9" in pane.text)
        assert "(earlier lines: o opens all of them in a pager)" in pane.text
        assert "step 1" not in pane.text

    drive(script)


def test_every_verb_of_the_table_is_carried_out_by_somebody() -> None:
    app = staged()
    for command in COMMANDS:
        assert hasattr(app.cluster_commands, command.action) or hasattr(app.view_commands, command.action), (
            command.action
        )
