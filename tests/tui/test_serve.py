"""The same in a browser: the page is served on loopback alone, and its socket speaks."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tui.serve import HOST


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`clusterd top --serve` on a port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "clusterd.cli.main", "top", "--serve", "--port", str(port)]
    argv += ["--socket", str(tmp_path / "absent.sock")]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection((HOST, port), timeout=1):
                break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, "nothing is served"
            time.sleep(0.05)
    yield f"{HOST}:{port}"
    process.terminate()
    process.wait(20)


def test_the_page_is_served_and_its_socket_speaks(served: str) -> None:
    import aiohttp

    with urllib.request.urlopen(f"http://{served}/", timeout=20) as answer:
        page = answer.read().decode()
    assert "clusterd" in page

    async def talk() -> bytes:
        drawn = b""
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{served}/ws?width=100&height=30") as speaks,
        ):
            async with asyncio.timeout(30):
                async for message in speaks:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        drawn += message.data
                    if b"Queue" in drawn and b"no daemon" in drawn:
                        return drawn
        return drawn

    assert b"no daemon" in asyncio.run(talk())


@pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="no Chromium on PATH"
)
def test_a_browser_draws_it(served: str, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--virtual-time-budget=8000", f"--user-data-dir={tmp_path}/profile",
         "--dump-dom", f"http://{served}/"],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert "xterm" in done.stdout
