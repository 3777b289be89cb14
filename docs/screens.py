"""Capture the screens of the terminal UI, in docs/tui, and the web pages, in docs/web, from a cluster in this machine.

``python docs/screens.py`` starts the cluster, submits jobs of every kind, draws the screens without a terminal and
rewrites the captures; it takes some minutes. The pages need chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from textual.pilot import Pilot

from clusterd.client import Client
from clusterd.replay import recording
from clusterd.tui.app import Top
from clusterd.tui.source.playback import RecordingSource
from clusterd.tui.source.sources import DaemonSource, Source

FOLDER = Path(__file__).parent / "tui"
WEB = Path(__file__).parent / "web"
PORT = 18765
WIDE, NARROW = (1200, 640), (420, 900)
"""Sizes of pages in pixels: narrow ones are dark."""

GPT = Path(__file__).parent.parent / "examples" / "gpt"

SMALL, LARGE = (80, 24), (120, 36)
DRAWN = ("fleet", "queue", "job", "decisions", "events")
"""Screens that the pages show as pictures, beside their text."""
LIMIT_S = 600.0

FIRST = {
    "gpt-small": 'kind = "elastic"\ncommand = ["python", "train.py", "--steps", "20000"]\nresources = { devices = 2 }',
    "tokenise": 'command = ["python3", "-c", "print(8000)"]\nresources = { cpus = 1 }',
    "convert": 'command = ["sh", "-c", "exit 3"]\nresources = { cpus = 1 }',
}
"""Jobs of the time before the captures."""

SECOND = {
    "render": 'command = ["sleep", "900"]\nresources = { devices = 2 }\nlimits = { time = "15m" }',
    "gpt-wide": 'kind = "elastic"\npriority = 5\ncommand = ["python", "train.py", "--steps", "20000", "--depth", "6"]\n'
    'resources = { devices = 1, plan = "dp=1" }',
    "evaluate": 'command = ["sleep", "100"]\nresources = { devices = 2 }',
}
"""Jobs that share the devices with the first, or wait."""


class Lab:
    """Cluster with jobs, for the time of the captures."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "clusterd.sock"

    def run(self, *arguments: str) -> str:
        """Output of one command."""
        done = subprocess.run([sys.executable, "-m", "clusterd", *arguments], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"clusterd {arguments[0]} failed with exit code {done.returncode}")
        return done.stdout

    def submit(self, jobs: dict[str, str]) -> None:
        for name, text in jobs.items():
            file = self.directory / f"{name}.toml"
            file.write_text(f'name = "{name}"\nworkdir = "{GPT}"\npython = "{sys.executable}"\n{text}\n')
            self.run("submit", "--wait-for-hosts", str(file))

    def wait_for(self, name: str, condition: Callable[[dict[str, Any]], Any]) -> None:
        """Wait until the job's row satisfies the condition."""
        with Client(self.socket) as cluster:
            deadline_s = time.monotonic() + LIMIT_S
            while not condition(row := cluster.call("job", job=name)):
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"{name} is {row['state']} after {LIMIT_S:g} s: {row['reason']}")
                time.sleep(0.5)


def text_of(app: Top) -> str:
    """The whole screen as text, without spaces at the ends of lines."""
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(app.screen._compositor.render_update(full=True))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


def draw(
    source: Source, size: tuple[int, int], script: Callable[[Top, Pilot[Any]], Awaitable[None]], first: str = "queue"
) -> None:
    """Open the UI at this size and let the script press keys."""

    async def run() -> None:
        app = Top(source, first=first)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.shared.model.number >= 0)
            await script(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[Any], condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("the screen never showed what was to be captured:\n" + text_of(pilot.app))  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def capture(app: Top, pilot: Pilot[Any], name: str, wanted: str = "") -> None:
    """Write the screen once it shows the wanted text."""
    await until(pilot, lambda: wanted in text_of(app))
    await pilot.pause(1.0)  # logs and histories arrive in parts
    (FOLDER / f"{name}.txt").write_text(text_of(app))
    if name in DRAWN:
        (FOLDER / f"{name}.svg").write_text(app.export_screenshot(title=f"clusterd top: {name}"))
    print(f"docs/tui/{name} is written")


async def live_screens(app: Top, pilot: Pilot[Any]) -> None:
    """Screens of the cluster, beginning at the queue with the cursor on its first row."""
    await capture(app, pilot, "queue", "ms/step")
    await pilot.press("w")
    await capture(app, pilot, "why", "esc closes")
    await pilot.press("escape", "m", "down")  # the first plan may be the one that it runs under
    await capture(app, pilot, "move", "downtime  about")
    await pilot.press("escape", "1")
    await capture(app, pilot, "fleet", "a job's")
    await pilot.press("2", "/", *"gpt-small", "enter", "enter")
    await capture(app, pilot, "job", "downtime")
    await pilot.press("4")
    await capture(app, pilot, "decisions", "because")
    await pilot.press("5")
    await capture(app, pilot, "events", "at_s")


def pages(jobs: dict[str, str]) -> None:
    """Take a picture of each web page.

    Args:
        jobs: ids by name.
    """
    running, waiting = jobs["gpt-wide"], jobs["evaluate"]
    for name, path, (width, height) in (
        ("queue", "", WIDE),
        ("fleet", "fleet", WIDE),
        ("history", "history", WIDE),
        ("job", f"jobs/{running}", WIDE),
        ("waiting", f"jobs/{waiting}", NARROW),
    ):
        dark = ["--blink-settings=preferredColorScheme=0"] if width < height else []
        options = [f"--window-size={width},{height}", f"--screenshot={WEB / name}.png", "--virtual-time-budget=10000"]
        address = f"http://127.0.0.1:{PORT}/{path}"
        browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        subprocess.run([*browser, *dark, *options, address], stderr=subprocess.DEVNULL, check=True)
        print(f"docs/web/{name} is written")


async def replay_screen(app: Top, pilot: Pilot[Any]) -> None:
    """A recording, paused where half of it has been played."""
    player = app.player
    assert player is not None
    await pilot.press("space")
    while player.index < len(player) // 2:
        await pilot.press("right_square_bracket")
    await capture(app, pilot, "replay", "running")


def main() -> None:
    """Start the cluster, capture, and end it."""
    directory = Path(tempfile.mkdtemp(prefix="clusterd-screens-"))
    (directory / "clusterd.toml").write_text(f'[web]\nport = {PORT}\nvisibility = "all"\n')
    os.environ |= {"CLUSTERD_STATE_DIR": str(directory), "CLUSTERD_CONFIG": str(directory / "clusterd.toml")}
    for name in ("CLUSTERD_SOCKET", "CLUSTERD_HOST", "NO_COLOR"):
        os.environ.pop(name, None)
    lab = Lab(directory)
    lab.run("start", "--local", "2", "--devices", "2")
    try:
        lab.submit(FIRST)
        lab.wait_for("gpt-small", lambda row: row["step"] > 150 and not row["profiling"])
        lab.wait_for("convert", lambda row: row["ended_s"])
        lab.submit(SECOND)
        lab.wait_for("gpt-wide", lambda row: row["step"] > 100 and row["trials"] > 4 and not row["profiling"])
        with Client(lab.socket) as cluster:
            pages({row["name"]: row["id"] for row in cluster.call("jobs")})
        draw(DaemonSource(lab.socket), LARGE, live_screens)
        draw(DaemonSource(lab.socket), SMALL, lambda app, pilot: capture(app, pilot, "queue-80x24", "ms/s"))
        lab.run("simulate", "--cluster", "4x4:a800", "--generate", "jobs=24,seed=1", "--record", str(directory / "run"))
        draw(RecordingSource(list(recording(directory / "run", "default"))), LARGE, replay_screen)
    finally:
        with Client(lab.socket) as cluster:
            left = [row["id"] for row in cluster.call("jobs")]
        lab.run("cancel", "--wait", *left)
        lab.run("host", "remove", "local0", "local1")
        lab.run("stop")
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
