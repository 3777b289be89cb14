"""The same in a browser: the page is served on loopback alone, and its socket speaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.tui.browser import chromium, opened
from tui.serve import HOST


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`clusterd top --serve` on a port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "clusterd", "top", "--serve", "--port", str(port)]
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


@pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH")
def test_a_browser_draws_it_and_its_keys_arrive(served: str, tmp_path: Path) -> None:
    """The terminal in the page shows our screen, in pixels too, and a key that is pressed there opens the help."""

    async def look() -> None:
        browser = chromium()
        assert browser is not None
        async with opened(browser, f"http://{served}/", tmp_path / "profile") as page:
            text = await page.text_with("no daemon", "Queue", "Decisions", "quit")
            assert "keys on queue" not in text
            before = await page.drawn(0.005)
            await page.click(300, 300)  # as a person gives the terminal the keyboard
            await page.press("?")
            await page.text_with("keys on queue", "all keys")
            assert await page.drawn(before * 1.3) < 0.5

    asyncio.run(look())
