"""Every verb through its key, against a real daemon with embedded hosts and training jobs."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from clusterd.tui.app import Top
from clusterd.tui.screens.job import JobBoard
from clusterd.tui.screens.log import LogScreen
from clusterd.tui.screens.queue import QueueBoard
from clusterd.tui.source.sources import DaemonSource
from clusterd.tui.widgets.dialogs import TextDialog
from clusterd.tui.widgets.migrate_dialog import MigrationDialog, PlanDialog
from tests.conftest import GPT, RunningCluster
from tests.hang import HANG_S


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningCluster]:
    """One daemon for all of these; each test submits what it needs and cancels it."""
    made = RunningCluster(Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp")))
    made.start(hosts=2)
    yield made
    made.close()


@pytest.fixture
def running(shared: RunningCluster) -> Iterator[str]:
    """A job that trains on two of four devices until it is told to end."""
    text = 'kind = "elastic"\ntrials = false\ncommand = ["python", "train.py", "--steps", "100000"]\n'
    text += "resources = { devices = 2, plan = { dp = 2 } }\n"
    job = shared.submit(text, "steady")
    shared.wait_for(job, lambda row: row["step"] > 0)
    yield job
    row = shared.job(job)
    if row["ended_s"] is None:
        shared.call("cancel", job=job)
        shared.wait_for(job, lambda row: row["ended_s"] is not None)


def drive(cluster: RunningCluster, script: Callable[[Top, Pilot[Any]], Awaitable[None]], **options: Any) -> None:
    """Open the interface, let `script` press its keys, and leave."""

    async def run() -> None:
        app = Top(DaemonSource(cluster.socket), **options)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.shared.model.number >= 0)
            await script(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[Any], condition: Callable[[], Any], timeout_s: float = HANG_S) -> None:
    """Wait for something on the screen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s; the screen is {pilot.app.screen}"
        await pilot.pause(0.02)


async def window(pilot: Pilot[Any]) -> Any:
    """The window that opens."""
    await until(pilot, lambda: len(pilot.app.screen_stack) > 1)
    await pilot.pause()
    return pilot.app.screen


async def on_job(app: Top, pilot: Pilot[Any], job: str) -> QueueBoard:
    """The queue, with the cursor on this job."""
    await pilot.press("2")
    board = app.board
    assert isinstance(board, QueueBoard)
    await until(pilot, lambda: job in board.table.keys)
    board.table.move_to(job)
    await pilot.pause()
    return board


async def type_in(pilot: Pilot[Any], text: str) -> None:
    """Put this into the line that is asked for, and press enter."""
    line = pilot.app.screen.query_one(Input)
    line.value = text
    await pilot.press("enter")


def test_why_and_priority_of_a_job_that_waits(shared: RunningCluster, running: str) -> None:
    """Somebody's job does not start: why? It needs all devices; it gets a priority, and is cancelled."""
    waits = shared.submit('command = ["true"]\nresources = { devices = 4 }\n', "waits")

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await on_job(app, pilot, waits)
        await pilot.press("w")
        message = await window(pilot)
        assert isinstance(message, TextDialog)
        assert "no host has more than 2" in message.text
        assert "steady has 2 devices" in message.text
        await pilot.press("escape", "p")
        await window(pilot)
        await type_in(pilot, "-7")
        await until(pilot, lambda: app.shared.model.jobs[waits].priority == -7)
        await pilot.press("c")
        await window(pilot)
        await pilot.press("enter")  # never by habit
        assert app.shared.model.jobs[waits].state == "queued"
        await pilot.press("y")
        await until(pilot, lambda: app.shared.model.jobs[waits].state == "cancelled")

    drive(shared, script)


def test_a_job_is_moved_and_its_phases_are_seen(shared: RunningCluster, running: str) -> None:
    """From dp=2 to a plan that is typed, with the cost shown before; pinned there, unpinned; its page tells of it."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await on_job(app, pilot, running)
        before = len(app.shared.model.jobs[running].migrations)
        await pilot.press("m")
        chooser = await window(pilot)
        if isinstance(chooser, PlanDialog):  # something is known of the model already
            await pilot.press("end", "enter")
            await until(pilot, lambda: type(app.screen).__name__ == "PromptDialog")
        await type_in(pilot, "tp=2")
        await until(pilot, lambda: type(app.screen).__name__ == "ConfirmDialog")
        await pilot.press("P")
        await until(pilot, lambda: isinstance(app.screen, MigrationDialog))
        watch = app.screen
        assert isinstance(watch, MigrationDialog)
        await until(pilot, lambda: "done: esc closes" in watch.pane.text)
        assert "quiesce" in watch.pane.text
        assert "downtime" in watch.pane.text
        job = app.shared.model.jobs[running]
        assert job.plan == "tp=2"
        assert len(job.migrations) > before
        await pilot.press("escape")
        await until(pilot, lambda: app.shared.model.jobs[running].pinned)
        await pilot.press("P")
        await window(pilot)
        await pilot.press("y")
        await until(pilot, lambda: not app.shared.model.jobs[running].pinned)
        await pilot.press("enter")
        page = app.board
        assert isinstance(page, JobBoard)
        await until(pilot, lambda: "dp=2 → tp=2" in page.page.text)
        await until(pilot, lambda: "plans so far" in page.page.text and " A " in page.page.text)
        await pilot.press("escape")
        assert app.board.id == "queue"

    drive(shared, script)


@pytest.mark.slow
def test_checkpoint_logs_and_the_id(shared: RunningCluster, running: str, tmp_path: Path) -> None:
    """Its checkpoint, its log on the whole screen and in a pager, its id in the clipboard."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        board = await on_job(app, pilot, running)
        await until(pilot, lambda: "step" in board.log_pane.text)
        await pilot.press("K")
        await window(pilot)
        await type_in(pilot, "relative")
        assert len(app.screen_stack) == 2, "a relative path was taken"
        await type_in(pilot, str(tmp_path / "kept"))
        await until(pilot, lambda: app.shared.model.jobs[running].checkpoint == str(tmp_path / "kept"))
        await pilot.press("l")
        log = await window(pilot)
        assert isinstance(log, LogScreen)
        await until(pilot, lambda: "loss" in log.log_pane.text)
        await pilot.press("slash")
        await pilot.press(*"nothing", "enter")
        assert log.log_pane.text == ""
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("y")
        await until(pilot, lambda: app.clipboard == running)
        await pilot.press("L")
        message = await window(pilot)
        assert "no log of an earlier one" in message.text

    drive(shared, script)


@pytest.mark.slow
def test_a_shell_is_refused_where_there_is_no_terminal(shared: RunningCluster, running: str) -> None:
    """For instance in a browser, or in this test."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await on_job(app, pilot, running)
        await pilot.press("!")
        message = await window(pilot)
        assert "no terminal for this" in message.text

    drive(shared, script)


def test_submit_from_a_file(shared: RunningCluster, tmp_path: Path) -> None:
    """A wrong path is said, a right one is shown before it is sent."""
    file = tmp_path / "quick.toml"
    gate = tmp_path / "gate"
    command = f'["sh", "-c", "until test -e {gate}; do sleep 0.1; done"]'  # jobs that are over are not shown
    file.write_text(f'name = "quick"\ncommand = {command}\nworkdir = "{GPT}"\npython = "{sys.executable}"\n')

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await pilot.press("n")
        await window(pilot)
        await type_in(pilot, "/nowhere.toml")
        assert len(app.screen_stack) == 2
        await type_in(pilot, str(file))
        await until(pilot, lambda: type(app.screen).__name__ == "ConfirmDialog")
        await pilot.press("y")
        await until(pilot, lambda: any(job.name == "quick" for job in app.shared.model.jobs.values()))
        number = next(job.id for job in app.shared.model.jobs.values() if job.name == "quick")
        await until(pilot, lambda: app.board.jobs() == [number])
        gate.touch()
        await until(pilot, lambda: app.shared.model.jobs[number].state == "finished")

    drive(shared, script)


def test_hosts_are_drained_and_used_again(shared: RunningCluster) -> None:
    """Both at once, by marks."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await pilot.press("1", "space", "space")
        await until(pilot, lambda: sorted(app.board.hosts()) == ["local0", "local1"])
        await pilot.press("d")
        await window(pilot)
        await type_in(pilot, "fan")
        await until(pilot, lambda: all(host.drained for host in app.shared.model.hosts.values()))
        assert "fan" in (app.shared.model.hosts["local0"].drained or "")
        await pilot.press("A", "u")
        await until(pilot, lambda: all(host.drained is None for host in app.shared.model.hosts.values()))

    drive(shared, script)


@pytest.mark.slow
def test_many_jobs_at_once(shared: RunningCluster) -> None:
    """Three are marked and cancelled with one answer; the filter and the order are kept."""
    jobs = [shared.submit('command = ["true"]\nresources = { gpus = 4 }\n', f"many{n}") for n in range(3)]

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        board = await on_job(app, pilot, jobs[0])
        await pilot.press("slash")
        await window(pilot)
        await type_in(pilot, "name:many")
        await until(pilot, lambda: sorted(board.table.keys) == sorted(jobs))
        await pilot.press("s")
        await window(pilot)
        await pilot.press("down", "enter")
        await until(pilot, lambda: board.sort != "state")
        await pilot.press("space", "space", "space", "c")
        await window(pilot)
        await pilot.press("y")
        await until(pilot, lambda: all(app.shared.model.jobs[job].state == "cancelled" for job in jobs))
        await until(pilot, lambda: len(app.screen_stack) == 1 and not board.table.marked)
        await pilot.press("escape")
        assert not board.filter

    drive(shared, script)


def test_an_array_is_one_row_and_is_cancelled_whole(shared: RunningCluster) -> None:
    command = ("run", "-d", "--no-snapshot", "--name", "array", "--array", "0-2%1", "--", "sleep", "1000")
    jobs = shared.run(*command).stdout.split()

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        board = await on_job(app, pilot, f"{jobs[0]}_*")
        assert jobs[1] not in board.table.keys
        await pilot.press("c")
        await window(pilot)
        await pilot.press("y")
        await until(pilot, lambda: all(app.shared.model.jobs[job].state == "cancelled" for job in jobs), 60.0)

    drive(shared, script)


def test_a_job_is_paused_and_goes_on(shared: RunningCluster) -> None:
    job = shared.run("run", "-d", "--no-snapshot", "--name", "stands", "--", "sleep", "1000").stdout.strip()
    shared.wait_for(job, lambda row: row["state"] == "running")

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await on_job(app, pilot, job)
        await pilot.press("H")
        await window(pilot)
        await pilot.press("y")
        await until(pilot, lambda: app.shared.model.jobs[job].paused_by is not None)
        await pilot.press("H")
        await until(pilot, lambda: app.shared.model.jobs[job].paused_by is None)

    drive(shared, script)
    shared.run("cancel", "--wait", job)


def test_readonly_has_no_key_that_changes_anything(shared: RunningCluster) -> None:
    """The help lists no such key either."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        for screen in "12345":
            await pilot.press(screen, "m", "c", "p", "P", "K", "n", "d", "u")
            assert len(app.screen_stack) == 1, screen
        await pilot.press("question_mark")
        message = await window(pilot)
        assert "cancel" not in message.text
        assert "read-only" in message.text

    drive(shared, script, readonly=True)


def test_two_clients_see_the_same(shared: RunningCluster) -> None:
    """Changes made by one client are shown by the other."""

    async def run() -> None:
        one, two = Top(DaemonSource(shared.socket)), Top(DaemonSource(shared.socket))
        async with one.run_test(size=(120, 40)) as first:
            await until(first, lambda: one.shared.model.number >= 0)
            await first.press("1", "d")
            await window(first)
            await first.press("enter")
            await until(first, lambda: one.shared.model.hosts["local0"].drained is not None)
            async with two.run_test(size=(80, 24)) as second:
                await until(second, lambda: two.shared.model.number >= 0)
                assert two.shared.model.hosts["local0"].drained is not None
                await second.press("1", "u")
                await until(second, lambda: two.shared.model.hosts["local0"].drained is None)
            await until(first, lambda: one.shared.model.hosts["local0"].drained is None)

    asyncio.run(run())


def test_earlier_events_are_listed(shared: RunningCluster) -> None:
    """Decisions and events from before it was opened, and a filter by job."""

    async def script(app: Top, pilot: Pilot[Any]) -> None:
        await pilot.press("4")
        board: Any = app.board
        await until(pilot, lambda: board.table.keys)
        assert "because" in board.detail.text
        await pilot.press("5")
        board = app.board
        await until(pilot, lambda: board.table.keys)
        kinds = {event.kind for _, event in app.shared.model.events}
        assert "DaemonStarted" in kinds

    drive(shared, script)
