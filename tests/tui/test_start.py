"""Imports before the interface's first picture, which dominate its start."""

from __future__ import annotations

import subprocess
import sys

from tests.hang import HANG_S

LATE = (
    "numpy", "scipy", "torch", "asyncssh", "plotext", "anyio", "sqlite3", "clusterd.core", "clusterd.daemon",
    "clusterd.client", "clusterd.profiling", "clusterd.plans", "clusterd.tui.source.playback",
    "clusterd.tui.widgets.dialogs", "clusterd.tui.model.job_page", "clusterd.tui.commands.actions",
    "clusterd.tui.screens.streams",
)  # fmt: skip


def test_nothing_is_imported_that_the_first_picture_does_not_show() -> None:
    script = f"""
import sys
import clusterd.cli.top, clusterd.cli.main, clusterd.tui.source.sources
from tests.tui.staged import staged
loaded = [name for name in {LATE!r} if name in sys.modules]
assert not loaded, f"before the interface is made: {{loaded}}"
app = staged()
async def first_picture() -> None:
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        assert app.board.table.keys
import asyncio
asyncio.run(first_picture())
loaded = [name for name in {LATE!r} if name in sys.modules]
assert not loaded, f"with the first picture: {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
