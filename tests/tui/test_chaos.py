"""The interface survives garbage from the socket, tiny terminals, floods, and a daemon that dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd.replay import recording
from clusterd.tui.app import Top
from clusterd.tui.model.view import LinkState
from clusterd.tui.source import sources
from clusterd.tui.source.sources import DaemonSource
from tests.conftest import REPOSITORY, RunningCluster, until
from tests.hang import HANG_S
from tests.tui import test_pilot
from tests.tui.terminal import Terminal


@pytest.fixture
def socket() -> Iterator[Path]:
    """A short path."""
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/tmp") as name:
        yield Path(name) / "s"


def pretend(socket: Path, *options: str) -> subprocess.Popen[bytes]:
    """A daemon that only pretends."""
    argv = [sys.executable, "-m", "tests.tui.pretend", str(socket), *options]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    until(socket.exists)
    return process


def top(socket: Path, columns: int = 100, rows: int = 30) -> Terminal:
    """`clusterd top` in a terminal."""
    return Terminal([sys.executable, "-m", "clusterd", "top", "--socket", str(socket)], columns, rows)


def test_ends_with_its_terminal_though_hang_ups_are_ignored(socket: Path) -> None:
    """Regression: under nohup, or where a dropped connection sends no SIGHUP, it read the end of its input for ever."""
    daemon = pretend(socket)
    argv = [
        "sh",
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        sys.executable,
        "-m",
        "clusterd",
        "top",
        "--socket",
        str(socket),
    ]
    terminal = Terminal(argv, 100, 30)
    try:
        terminal.expect(b"Queue")
        terminal.hang_up()
        assert terminal.process is not None
        assert terminal.process.wait(HANG_S) == 129
    finally:
        terminal.close()
        daemon.kill()
        daemon.wait()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("garbage", ["text", "length", "msgpack", "rows", "item", "error"])
def test_garbage_is_reported_and_the_rows_stay(socket: Path, garbage: str) -> None:
    daemon = pretend(socket, "--garbage", garbage)

    async def run() -> None:
        app = Top(DaemonSource(socket))
        async with app.run_test(size=(100, 30)) as pilot:
            await test_pilot.until(pilot, lambda: len(app.shared.model.jobs) == 20)
            await test_pilot.until(pilot, lambda: app.link.state in (LinkState.LOST, LinkState.REFUSED))
            assert app.link.why
            assert len(app.shared.model.jobs) == 20
            await pilot.press("1", "2")
            assert app.board.id == "queue"

    try:
        asyncio.run(run())
    finally:
        daemon.terminate()
        daemon.wait()


def test_a_flood_of_log_lines_and_a_tiny_terminal_leave_it_usable(socket: Path) -> None:
    """100,000 lines a second, 20x10 and back, and a terminal as it was before."""
    daemon = pretend(socket, "--log-rate", "100000", "--rate", "200")
    terminal = top(socket)
    try:
        terminal.expect(b"of a log that nobody can")
        terminal.resize(20, 10)
        terminal.type("1")
        terminal.expect(b"host000")
        terminal.type("2")
        terminal.resize(100, 30)
        terminal.expect(b"of a log that nobody can")
        terminal.type("?")
        terminal.expect(b"keys on queue")
        terminal.type("\x1b")
        terminal.expect(b"of a log that nobody can")
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.is_restored
    finally:
        terminal.close()
        daemon.terminate()
        daemon.wait()


def test_updates_during_another_program_in_the_terminal_are_shown_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager for a quarter of an hour is no silence of the daemon's."""
    monkeypatch.setattr(sources, "SILENCE_S", 0.1)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        received: asyncio.Future[str] = loop.create_future()

        async def stream() -> AsyncGenerator[str, None]:
            yield await received

        def pager() -> None:
            answer = threading.Thread(target=loop.call_soon_threadsafe, args=[received.set_result, "alive"])
            answer.start()
            answer.join()
            blocked_until_s = time.monotonic() + 0.3
            while time.monotonic() < blocked_until_s:
                pass

        loop.call_soon(pager)
        assert await sources._next(stream()) == "alive"
        silent = stream()
        received = loop.create_future()
        monkeypatch.setattr(sources, "LAST_LOOK_S", 0.1)
        with pytest.raises(TimeoutError):
            await sources._next(silent)

    asyncio.run(run())


@pytest.mark.slow
def test_a_shell_is_in_the_cluster_that_is_looked_at(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """The environment names another one, as for whoever has a cluster of their own."""
    script = "import time; time.sleep(1000)"
    job = local_cluster.run("run", "-d", "--no-snapshot", "--name", "seen", "--", sys.executable, "-c", script).stdout
    local_cluster.wait_for(job.strip(), lambda row: row["state"] == "running")
    argv = [sys.executable, "-m", "clusterd", "top", "--socket", str(local_cluster.socket)]
    terminal = Terminal(argv, 100, 30, {"CLUSTERD_STATE_DIR": str(tmp_path), "PS1": "$ "})
    try:
        terminal.expect(b"seen")
        terminal.expect(b"running")
        terminal.type("!")
        terminal.expect(b"\x1b[?1049l")
        terminal.type("echo in-$CLUSTERD_JOB_NAME; exit\r")
        terminal.expect(b"in-seen")
        terminal.expect(b"seen")
        terminal.type("q")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_the_daemon_is_killed_and_started_again_under_an_open_interface(cluster: RunningCluster) -> None:
    """The interface says so, keeps its last state, and reconnects to the new daemon."""
    cluster.start()
    cluster.run("submit", _job(cluster.directory))

    async def run() -> None:
        app = Top(DaemonSource(cluster.socket))
        async with app.run_test(size=(100, 30)) as pilot:
            await test_pilot.until(pilot, lambda: len(app.shared.model.jobs) == 1)
            await asyncio.to_thread(cluster.kill)
            await test_pilot.until(pilot, lambda: app.link.state is LinkState.LOST)
            banner = app.query_one("#banner")
            assert "Jobs keep running" in banner.text  # type: ignore[attr-defined]
            assert len(app.shared.model.jobs) == 1
            await asyncio.to_thread(cluster.start)
            await test_pilot.until(pilot, lambda: app.link.state is LinkState.LIVE)
            await asyncio.to_thread(cluster.run, "priority", "1", "9")
            await test_pilot.until(pilot, lambda: app.shared.model.jobs["1"].priority == 9)
            assert not banner.has_class("shown")

    asyncio.run(run())


@pytest.mark.slow
def test_a_daemon_that_has_heard_from_its_hosts_is_up_again(cluster: RunningCluster) -> None:
    """Killed while a job runs: the new one recovers until the job's host is heard, and then says so."""
    cluster.start(hosts=1)
    job = cluster.submit('command = ["sleep", "1000"]\n', "sleeps")
    cluster.wait_for(job, lambda row: row["state"] == "running")

    async def run() -> None:
        app = Top(DaemonSource(cluster.socket))
        async with app.run_test(size=(100, 30)) as pilot:
            head: Any = app.query_one("#head")
            await test_pilot.until(pilot, lambda: "daemon up" in head.text)
            await asyncio.to_thread(cluster.kill)
            await test_pilot.until(pilot, lambda: app.link.state is LinkState.LOST)
            await asyncio.to_thread(cluster.start, 1)
            await test_pilot.until(pilot, lambda: app.link.state is LinkState.LIVE and "daemon up" in head.text)

    asyncio.run(run())
    answer = [item["recovering"] for item in recording(cluster.directory) if "number" in item and "jobs" in item]
    assert ["local0"] in answer
    assert answer[-1] == []


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("garbage", ["text", "length", "msgpack", "rows", "item", "error"])
def test_garbage_leaves_a_usable_screen_and_the_terminal_as_it_was(socket: Path, garbage: str) -> None:
    """A real terminal shows the error in the banner; keys still work, and quitting restores the terminal."""
    daemon = pretend(socket, "--garbage", garbage)
    terminal = top(socket)
    try:
        terminal.expect(b"job-1")
        terminal.expect(b"retrying")
        terminal.type("1")
        terminal.expect(b"host000")
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.is_restored
    finally:
        terminal.close()
        daemon.terminate()
        daemon.wait()


def test_a_daemon_that_dies_leaves_a_usable_screen_and_the_terminal_as_it_was(socket: Path) -> None:
    """Killed, looked at meanwhile, started again, killed again, and left."""
    daemon = pretend(socket)
    terminal = top(socket)
    try:
        terminal.expect(b"job-1")
        for _ in range(2):
            daemon.kill()
            daemon.wait()
            terminal.expect(b"Jobs keep running")
            terminal.type("1")
            terminal.expect(b"host000")
            socket.unlink()
            daemon = pretend(socket)
            terminal.expect(b"reconnected to the daemon")
            terminal.type("2")
            terminal.expect(b"job-1")
        daemon.kill()
        daemon.wait()
        terminal.expect(b"Jobs keep running")
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.is_restored
    finally:
        terminal.close()
        daemon.kill()
        daemon.wait()


def _job(directory: Path) -> str:
    file = directory / "waits.toml"
    file.write_text('name = "waits"\ncommand = ["true"]\nresources = { gpus = 4 }\n')
    return str(file)
