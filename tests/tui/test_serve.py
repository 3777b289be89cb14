"""The interface in a browser: served on loopback alone, with a working socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterd.tui.serve import HOST
from tests.conftest import REPOSITORY
from tests.hang import HANG_S
from tests.tui.browser import chromium, opened


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`clusterd top --serve` on a port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "clusterd", "top", "--serve", "--port", str(port)]
    argv += ["--socket", str(tmp_path / "absent.sock")]
    process = subprocess.Popen(
        argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    address = process.stderr.readline().split()[2]
    assert address.startswith(f"http://{HOST}:{port}/?key=")
    rest = threading.Thread(target=process.stderr.read)
    rest.start()
    deadline_s = time.monotonic() + HANG_S
    while True:
        try:
            with socket.create_connection((HOST, port), timeout=1):
                break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, "nothing is served"
            time.sleep(0.05)
    yield address
    process.terminate()
    process.wait(20)
    rest.join(20)
    process.stderr.close()


def test_the_page_is_served_and_its_socket_speaks(served: str) -> None:
    import aiohttp

    socket = served.partition("?")[0].replace("http:", "ws:") + "ws?width=100&height=30"

    async def talk() -> bytes:
        drawn = b""
        jar = aiohttp.CookieJar(unsafe=True)  # an address of numbers
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            async with session.get(served) as answer:
                assert "clusterd" in await answer.text()
            async with session.ws_connect(socket) as speaks, asyncio.timeout(30):
                async for message in speaks:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        drawn += message.data
                    if b"Queue" in drawn and b"no daemon" in drawn:
                        return drawn
        return drawn

    assert b"no daemon" in asyncio.run(talk())


def test_nobody_else_is_let_in(served: str) -> None:
    """Another user, who does not know the address; another page in the same browser, which has the cookie."""
    import aiohttp

    plain = served.partition("?")[0]
    socket = plain.replace("http:", "ws:") + "ws?width=80&height=24"

    async def try_all() -> list[int]:
        refused = []
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            for address in (plain, f"{plain}?key=guessed", f"{plain}static/js/textual.js"):
                async with session.get(address) as answer:
                    refused.append(answer.status)
            with pytest.raises(aiohttp.WSServerHandshakeError) as stranger:
                await session.ws_connect(socket)
            async with session.get(served) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.WSServerHandshakeError) as page:
                await session.ws_connect(socket, headers={"Origin": "http://evil.example"})
        return [*refused, stranger.value.status, page.value.status]

    assert asyncio.run(try_all()) == [403] * 5


@pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH")
def test_a_browser_draws_it_and_its_keys_arrive(served: str, tmp_path: Path) -> None:
    """The terminal in the page shows our screen, in pixels too, and a key that is pressed there opens the help."""

    async def look() -> None:
        browser = chromium()
        assert browser is not None
        async with opened(browser, served, tmp_path / "profile") as page:
            text = await page.text_with("no daemon", "Queue", "Decisions", "quit")
            assert "keys on queue" not in text
            before = await page.drawn(0.005)
            await page.click(300, 300)  # as a person gives the terminal the keyboard
            await page.press("?")
            await page.text_with("keys on queue", "all keys")
            assert await page.drawn(before * 1.3) < 0.5

    asyncio.run(look())
