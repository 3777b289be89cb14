"""A headless Chromium driven over its DevTools protocol: reads the text on the page, and sends keys."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.hang import HANG_S

NAMES = ("chromium", "chromium-browser", "google-chrome")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--window-size=1200,800", "--remote-debugging-port=0",
)  # fmt: skip
"""Nothing but loopback is asked for: the page's font would be fetched from a server far away."""

CATCH_TERMINAL = """
Object.defineProperty(Object.prototype, "_core", {configurable: true, set(core) {
    Object.defineProperty(this, "_core", {value: core, writable: true, configurable: true});
    if ("loadAddon" in this) window.terminalUnderTest = this;
}});
window.terminalText = () => {
    const buffer = window.terminalUnderTest?.buffer.active;
    if (!buffer) return document.body?.innerText ?? "";
    return Array.from({length: buffer.length}, (_, y) => buffer.getLine(y).translateToString(true)).join("\\n");
};
"""
"""xterm.js keeps its terminal to itself; its first assignment of a member tells us which object it is."""

BRIGHT = """
(async () => {
    const picture = await createImageBitmap(await (await fetch("data:image/png;base64,%s")).blob());
    const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
    canvas.drawImage(picture, 0, 0);
    const bytes = canvas.getImageData(0, 0, picture.width, picture.height).data;
    let bright = 0;
    for (let at = 0; at < bytes.length; at += 4) bright += Math.max(bytes[at], bytes[at + 1], bytes[at + 2]) > 128;
    return bright / (bytes.length / 4);
})()
"""


def chromium() -> str | None:
    """The browser's executable, where there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None

    async def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; events are not listened to."""
        number = next(self._numbers)
        where = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **where})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"the browser hung up at {method}")

    async def open(self, url: str) -> None:
        """Go there, with eyes on its terminal."""
        target = await self._ask("Target.createTarget", url="about:blank")
        attached = await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        await self._ask("Page.enable")
        await self._ask("Page.addScriptToEvaluateOnNewDocument", source=CATCH_TERMINAL)
        await self.go(url)

    async def go(self, url: str) -> None:
        """Load another page; returns when the old one is gone."""
        await self._ask("Page.navigate", url=url)

    async def resize(self, width: int) -> None:
        """Look through a window of so many pixels, as on a telephone."""
        await self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    async def evaluate(self, script: str) -> Any:
        """Result of the script, once its promise has resolved."""
        answer = await self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text_with(self, *wanted: str, timeout_s: float = HANG_S) -> str:
        """Text of the terminal, or of a page without one, as soon as it holds all of these."""
        text = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # The page is another one after it was loaded, and its own clock drives the look: a frame each.
                    text = await self.evaluate(
                        "new Promise(done => requestAnimationFrame(() => done(window.terminalText?.() ?? '')))"
                    )
                    if all(word in text for word in wanted):
                        return str(text)
        except TimeoutError:
            raise AssertionError(f"{wanted} is not in the browser's terminal; it shows:\n{text}") from None

    async def click(self, x: int, y: int) -> None:
        """A click of the left button there."""
        for kind in ("mousePressed", "mouseReleased"):
            await self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str) -> None:
        """A key that types itself."""
        await self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def drawn(self, share: float, timeout_s: float = HANG_S) -> float:
        """The share of the page's pixels that are bright, text on a dark ground, as soon as it is above this one."""
        seen = 0.0
        try:
            async with asyncio.timeout(timeout_s):
                while seen <= share:  # the terminal fades in
                    picture = (await self._ask("Page.captureScreenshot", format="png"))["data"]
                    seen = float(await self.evaluate(BRIGHT % picture))
        except TimeoutError:
            raise AssertionError(f"only {seen:.4f} of the page's pixels are bright, not {share}") from None
        return seen


@asynccontextmanager
async def opened(browser: str, url: str, profile: Path) -> AsyncIterator[Page]:
    """A browser of its own with an empty profile, at this address; gone afterwards with all its processes."""
    process = await asyncio.create_subprocess_exec(
        browser, *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        endpoint = await asyncio.wait_for(_endpoint(process.stderr), 60)
        async with aiohttp.ClientSession() as session, session.ws_connect(endpoint, max_msg_size=0) as socket:
            page = Page(socket)
            await page.open(url)
            yield page
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), 20)


async def _endpoint(lines: asyncio.StreamReader) -> str:
    """Address on which the browser listens."""
    output = b""
    async for line in lines:
        output += line
        _, found, address = line.partition(b"DevTools listening on ")
        if found:
            return address.decode().strip()
    raise AssertionError(f"the browser did not start: {output.decode(errors='replace')[-2000:]}")
