"""Files of wrong types, recordings with gaps, answers of another form: each is reported."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from clusterd.errors import ClusterError
from clusterd.tui.app import Top
from clusterd.tui.model import lines, rows
from clusterd.tui.model.fleet import host_summary
from clusterd.tui.model.job_page import read_metrics, read_steps
from clusterd.tui.model.state_styles import Look
from clusterd.tui.source.playback import Player, RecordingSource
from clusterd.tui.widgets.dialogs import TextDialog
from tests.tui.staged import LIVE, NOW_S, host, job, staged
from tests.tui.test_pilot import until, window
from tests.tui.test_windows import drive

FIRST: dict[str, Any] = {"snapshot": {"jobs": [], "hosts": [], "status": {}}, "number": 0, "at_s": NOW_S}


@pytest.mark.parametrize("at_s", ["noon", [5], {"s": 1}, 1e18, True])
def test_a_recording_with_a_time_that_is_none_is_refused(at_s: Any) -> None:
    with pytest.raises(ClusterError, match="item 2 of the recording cannot be read: at_s"):
        Player([FIRST, {"number": 1, "at_s": at_s}])


@pytest.mark.parametrize("bad", [{"at_s": NOW_S + 2}, {"number": 2, "jobs": [{"id": 7}], "at_s": NOW_S + 2}])
def test_a_recording_plays_up_to_its_first_damaged_frame(bad: dict[str, Any]) -> None:
    """The interface says so and stays at that point; going back works."""
    good = {"number": 1, "at_s": NOW_S + 1, "jobs": [job(1, "first", "running")]}

    async def run() -> None:
        app = Top(RecordingSource([FIRST, good, bad, {"number": 3, "at_s": NOW_S + 3}]))
        player = app.player
        assert player is not None
        player.speed = 100.0
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            shown = lambda: "".join(str(toast.render()) for toast in app.screen.query("Toast"))  # noqa: E731
            await until(pilot, lambda: "item 3 of the recording cannot be read" in shown())
            board: Any = app.board
            await until(pilot, lambda: board.table.keys == ["1"])
            assert (player.index, player.playing) == (1, False)
            await pilot.press("comma")
            await until(pilot, lambda: not board.table.keys)

    asyncio.run(run())


@pytest.mark.parametrize("at_s", [1e18, -math.inf, math.nan])
def test_an_instant_of_no_calendar_is_refused_where_it_comes_in(at_s: float) -> None:
    """Before a screen makes a date of it."""

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await source.queue.put({"number": 9, "jobs": [job(1, "gpt-large", "running", submitted_s=at_s)]})
        await until(pilot, lambda: source.rejected)
        assert "submitted_s" in source.rejected
        assert app.shared.model.number == 8

    drive(script)


@pytest.mark.parametrize(
    ("key", "verb", "answer"),
    [
        ("w", "why", {"reason": 5}),
        ("w", "why", None),
        ("C", "calendar", None),
        ("C", "calendar", [{"what": "booking", "from_s": "monday"}]),
        ("m", "migrate", {"from": 3}),
        ("K", "checkpoint", {"step": "seven"}),
    ],
)
def test_an_answer_of_another_form_is_said(key: str, verb: str, answer: Any) -> None:
    """For instance from a daemon of another version."""

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        source.answers[verb] = answer
        source.answers["plans"] = {"rows": "none"}
        await pilot.press(key)
        await window(pilot)
        if key == "m":
            await pilot.press("enter")
        if key == "K":
            await pilot.press(*"/x", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        assert "cannot be read" in app.screen.text  # type: ignore[attr-defined]

    drive(script)


def test_a_hosts_jobs_are_those_on_that_very_host() -> None:
    """Not of one whose name begins alike; a name with a bracket is no expression."""

    async def run() -> None:
        hosts = [host("gpu1"), host("gpu1-b"), host("gpu(2")]
        jobs = [
            job(number, f"job{number}", "running", holds_devices=True, hosts=names)
            for number, names in enumerate((["gpu1"], ["gpu1-b"], ["gpu(2", "gpu1"]), 1)
        ]
        app = staged([LIVE, {"snapshot": {"status": {}, "jobs": jobs, "hosts": hosts}, "number": 8}])
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.shared.model.number == 8)
            for name, found in (("gpu1", ["1", "3"]), ("gpu(2", ["3"]), ("gpu1-b", ["2"])):
                await pilot.press("1")
                board: Any = app.board
                board.table.move_to(name)
                await pilot.press("enter")
                await until(pilot, lambda: app.board.id == "queue")
                queue: Any = app.board
                await until(pilot, lambda: queue.table.keys == found)  # noqa: B023

    asyncio.run(run())


def test_files_whose_names_are_no_text_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal cannot show them; a directory that is gone has none."""
    (tmp_path / "good.toml").write_text("")
    (tmp_path / os.fsdecode(b"bad\xff.toml")).write_text("")
    gone = tmp_path / "gone"
    gone.mkdir()

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        monkeypatch.chdir(tmp_path)
        await pilot.press("n")
        ask = await window(pilot)
        assert list(ask._suggestions) == ["good.toml"]
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        monkeypatch.chdir(gone)
        gone.rmdir()
        await pilot.press("n")
        ask = await window(pilot)
        assert list(ask._suggestions) == []
        monkeypatch.chdir(tmp_path)

    drive(script)


def test_a_pager_without_room_for_the_log_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))

    async def script(app: Top, source: Any, pilot: Pilot[Any]) -> None:
        await pilot.press("o")
        refused = await window(pilot)
        assert "set TMPDIR" in refused.text

    drive(script)


def test_steps_that_a_job_wrote_wrongly_are_left_out() -> None:
    """An infinite step, a number too large, and what is no row; the others are there."""
    data = (
        b'{"step": Infinity, "loss": 1}\n{"step": 1, "loss": 1' + b"0" * 400 + b'}\n[]\n7\n{"step": 2, "loss": 0.5}\n'
    )
    assert read_steps(data) == ([(2, 0.5)], [])


def test_metrics_of_steps_and_evaluations_are_series_of_their_own() -> None:
    data = b"""{"step": 1, "loss": 2.0, "time_s": 0.1, "metrics": {"right": 0.25, "bad": null}}
{"evaluated": 1, "metrics": {"loss": 3.0}, "time_s": 1.0}
{"step": 2, "loss": 1.0, "metrics": 7}
{"step": 2, "los"""
    assert read_metrics(data) == {"right": [(1, 0.25)], "evaluation loss": [(1, 3.0)]}


def test_a_use_that_is_no_number_is_an_empty_bar() -> None:
    gpus = [{"index": 0, "utilisation": math.nan}, {"index": 1, "utilisation": math.inf}]
    known = rows.read(rows.Host, host("gpu01", link={"facts": {"gpus": gpus}}))
    shown = "\n".join(lines.plain(one) for one in host_summary(known, {}, Look(), NOW_S))
    assert "░░░░░░" in shown
