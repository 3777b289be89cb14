"""Every screen as a picture: full, empty, without a daemon, refused by one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from clusterd.tui.model.view import SCREENS
from clusterd.tui.screens.queue import QueueBoard
from tests.tui.staged import LIVE, LOST, NOW_S, REFUSED, items, staged

STATES: dict[str, list[Any]] = {
    "normal": items(),
    "empty": [LIVE, {"snapshot": {"status": {"started_s": NOW_S - 5}, "jobs": [], "hosts": []}, "number": 0}],
    "disconnected": [*items(), LOST],
    "error": [REFUSED],
}


async def settled(pilot: Pilot[Any]) -> None:
    """Everything asked for has come, and is drawn."""
    app: Any = pilot.app
    await pilot.pause()
    for _ in range(100):
        busy = [worker for worker in app.workers if worker.name != "pump" and not worker.is_finished]
        if not busy and app.feed.is_shown:
            break
        await asyncio.sleep(0.01)
    if isinstance(app.board, QueueBoard):
        log = app.board.log_pane
        for _ in range(100):
            if log.text or log.placeholder or not app.board.table.keys:
                break
            await asyncio.sleep(0.01)
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=["80x24", "160x48"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("screen", SCREENS)
def test_screen(snap_compare: Any, screen: str, state: str, size: tuple[int, int]) -> None:
    app = staged(STATES[state], first=screen)
    app.shared.job = "1"
    assert snap_compare(app, terminal_size=size, run_before=settled)


@pytest.mark.parametrize("screen", SCREENS)
def test_small_terminal(snap_compare: Any, screen: str) -> None:
    """A corner of a screen: the list of each has its rows, and a host its name."""
    app = staged(first=screen)
    app.shared.job = "1"
    assert snap_compare(app, terminal_size=(40, 10), run_before=settled)


@pytest.mark.parametrize("keys", [["question_mark"], ["m"], ["c"], ["n"], ["d"], ["slash"], ["s"], ["f2"]])
def test_window(snap_compare: Any, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window over the screen it belongs to, in a directory with three job files to choose from."""
    for name in ("checkpointable", "gpt", "hf"):
        (tmp_path / "examples" / name).mkdir(parents=True)
        (tmp_path / "examples" / name / "job.toml").touch()
    monkeypatch.chdir(tmp_path)
    app = staged(first="fleet" if keys == ["d"] else "queue")
    source: Any = app.shared.source
    best = {"plan": "dp=4,zero=1", "step_time_s": 0.36, "lower_s": 0.34, "upper_s": 0.39, "device_bytes": 9e9}
    source.answers["plans"] = {
        "known": "fitted on 4 runs",
        "rows": [
            {**best, "devices": 4},
            {"plan": "dp=2,tp=2", "devices": 4, "step_time_s": 0.40, "lower_s": 0.39, "upper_s": 0.42, "current": True},
            {"plan": "dp=4", "devices": 4, "fits": False, "why": "needs 31 GiB, a device has 24 GiB"},
        ],
    }  # fmt: skip
    source.answers["migrate"] = {
        "from": "dp=2,tp=2", "plan": "dp=4,zero=1", "devices": [f"gpu01:gpu{n}" for n in range(4)],
        "local_bytes": 1 << 30, "network_bytes": 0, "predicted_downtime_s": 0.31, "migrations": 1,
    }  # fmt: skip

    async def press(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        await pilot.press(*keys)
        for _ in range(1000 if keys == ["m"] else 0):
            if any(verb == "migrate" for verb, _ in source.calls):
                break  # the cost of a move is asked for when the cursor has rested
            await asyncio.sleep(0.01)
        await settled(pilot)
        for field in app.screen.query(Input):
            field.cursor_blink = False  # or the picture depends on when it is taken

    assert snap_compare(app, terminal_size=(100, 30), run_before=press)


@pytest.mark.slow_after(1)
def test_ascii(snap_compare: Any) -> None:
    """Not one character beyond ASCII."""
    app = staged(first="job", ascii=True)
    app.shared.job = "1"
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled)
