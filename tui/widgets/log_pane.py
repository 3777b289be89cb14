"""A job's log as it grows: a window on its last lines, drawn at most ten times a second."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from clusterd.errors import ClusterError
from tui.model.filters import FilterTooSlow, time_limit
from tui.model.lines import fit, line, wrap
from tui.widgets.painting import strip
from tui.widgets.plain_text import PlainTextTitles

REDRAW_S = 0.1
RETRY_S = 1.0
LAST_BYTES = 4 << 20
"""Of a log, that are read; all of it is in a pager."""

LINES_MAX = 5000
LINE_BYTES_MAX = 4096
"""A longer line is cut: nobody reads it here, and a pager shows all of it."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LogSource(Protocol):
    """What a log is pulled from."""

    def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """As `tui.source.sources.Source.stream`."""


class LogPane(PlainTextTitles, ScrollView, can_focus=True):
    """Follows the end of the log until it is scrolled up; follows again at the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "down", show=False),
        Binding("k", "scroll_up", "up", show=False),
        Binding("g", "scroll_home", "first", show=False),
        Binding("G,f", "follow", "follow", show=False),
        Binding("ctrl+d", "page_down", "page down", show=False),
        Binding("ctrl+u", "page_up", "page up", show=False),
        Binding("W", "wrap", "wrap", show=False),
    ]

    def __init__(self, name: str, title: str = "log") -> None:
        super().__init__(id=name)
        self._title = title
        self._window = LogWindow()
        self._starts_mid_log = False  # what was before has not been read
        self._pulling: asyncio.Task[None] | None = None
        self._shown: tuple[int, str] | None = None  # lines, and the one that is not over
        self._lines: list[str] = []
        self._wrapped = False
        self._only: re.Pattern[str] | None = None
        self._job: str | None = None
        self.follows = True
        self.placeholder = ""
        """What stands there instead of a log."""

    def follow_job(
        self, source: LogSource, job: str | None, *, name: str = "", attempt: int | None = None, rank: int | None = 0
    ) -> None:
        """Show this job's log from now on; None: nothing."""
        self.stop()
        self._window, self._starts_mid_log = LogWindow(), False
        self._job, self.follows, self.placeholder = job, True, ""
        which = "" if attempt is None else f", attempt {attempt}"
        self.border_title = f" {self._title}: {name}{which} " if job else f" {self._title} "
        self.redraw(force=True)
        if job is not None:
            self._pulling = asyncio.create_task(self._pull(source, job, attempt, rank), name=f"log of {job}")

    def show_placeholder(self, text: str) -> None:
        """This instead of a log."""
        self.stop()
        self._window, self._starts_mid_log, self._job, self.placeholder = LogWindow(), False, None, text
        self.border_title = f" {self._title} "
        self.redraw(force=True)

    async def _pull(self, source: LogSource, job: str, attempt: int | None, rank: int | None) -> None:
        while True:
            read: dict[tuple[int, int, int], int] = {}  # of each log, up to where
            try:
                args: dict[str, Any] = {"rank": rank, "attempt": attempt, "follow": True, "last_bytes": LAST_BYTES}
                async with aclosing(source.stream("logs", job=job, **args)) as parts:
                    async for part in parts:
                        which = int(part["attempt"]), int(part.get("generation", 1)), int(part["rank"])
                        data, end = bytes(part["data"]), int(part["offset"])
                        if end - len(data) > read.get(which, 0):  # begins in the middle of it, and of a line
                            self._starts_mid_log = True
                            data = data.partition(b"\n")[2]
                        read[which] = end
                        self._window.feed(data)
                self.placeholder = "" if self._window.total else "it wrote nothing"
                self.redraw()
                return
            except ClusterError as error:
                self.placeholder = str(error)
                self.redraw(force=True)
                await asyncio.sleep(RETRY_S)
                self._window = LogWindow()  # once more: the daemon may be another one
            except (KeyError, TypeError, ValueError) as error:
                self.placeholder = f"the daemon sent a log that cannot be read: {error!r}"
                self.redraw(force=True)
                return

    def stop(self) -> None:
        """Let go of the log."""
        if self._pulling is not None:
            self._pulling.cancel()
            self._pulling = None

    def on_mount(self) -> None:
        """Look at the window regularly: the bytes may come faster than the screen."""
        self.set_interval(REDRAW_S, self.redraw)

    def on_unmount(self) -> None:
        """Nobody looks any more."""
        self.stop()

    # --- drawing ------------------------------------------------------------------------------------------------------

    def only(self, pattern: re.Pattern[str] | None) -> None:
        """Show lines that match; None: all."""
        self._only = pattern
        self.redraw(force=True)

    def redraw(self, force: bool = False) -> None:
        """Draw what came since the last time; nothing while the pane is hidden."""
        window = self._window
        state = window.total, window.partial
        if (not force and state == self._shown) or not self.is_attached or not self.display:
            return
        self._shown = state
        lines = [*window.lines, window.partial] if window.partial else list(window.lines)
        if self._only is not None:
            lines = self._matching(lines, self._only)
        dropped = window.total - len(window.lines)
        if (dropped > 0 or self._starts_mid_log) and self._only is None:
            count = "" if self._starts_mid_log else f"{dropped} "
            lines.insert(0, f"({count}earlier lines: o opens all of them in a pager)")
        if self._wrapped:
            cells = max(self.size.width - 1, 8)
            lines = ["".join(t for t, _ in part) for text in lines for part in wrap(line(text), cells)]
        if not lines and self.placeholder:
            lines = ["".join(t for t, _ in part) for part in wrap(line(self.placeholder), max(self.size.width - 1, 8))]
        self._lines = lines
        self.virtual_size = Size(0, len(lines))
        if self.follows:
            self.scroll_to(y=max(len(lines) - self.size.height, 0), animate=False, force=True, immediate=True)
        self.refresh()

    def _matching(self, lines: list[str], only: re.Pattern[str]) -> list[str]:
        try:
            with time_limit():
                return [text for text in lines if only.search(text)]
        except FilterTooSlow as error:
            self._only = None
            self.app.notify(str(error), severity="error")
            return lines

    def render_line(self, y: int) -> Strip:
        """One line of what is in sight."""
        at = self.scroll_offset.y + y
        base = self.rich_style
        text = self._lines[at] if at < len(self._lines) else ""
        dim = Style(dim=True) if not self._window.total and self.placeholder else Style()
        shown = fit(line(text), self.size.width - self.scrollbar_size_vertical, more="")
        return strip(shown, base + dim).adjust_cell_length(self.size.width, base)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolled up by hand: stay there. At the end: follow."""
        super().watch_scroll_y(old_value, new_value)
        self.follows = new_value >= self.max_scroll_y

    def action_follow(self) -> None:
        """To the end, and stay there."""
        self.follows = True
        self.redraw(force=True)

    def action_wrap(self) -> None:
        """Wrap long lines, or cut them."""
        self._wrapped = not self._wrapped
        self.redraw(force=True)

    @property
    def text(self) -> str:
        """What is lines_max of the log."""
        return "\n".join(self._lines)


class LogWindow:
    """The newest lines; what falls out is counted, not lines_max."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self._limit = lines_max
        self._partial = b""
        self.lines: deque[str] = deque(maxlen=lines_max)
        self.total = 0
        """Lines so far, lines_max or not."""

    def feed(self, data: bytes) -> None:
        """Take in a part; only what will be shown is looked at."""
        data = self._partial + data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:  # a progress bar without an end, or no text at all
            rest = rest[-LINE_BYTES_MAX:]
        self._partial = rest
        if not newline:
            return
        count = whole.count(b"\n") + 1
        self.total += count
        newest = whole.rsplit(b"\n", self._limit)[-self._limit :] if count > self._limit else whole.split(b"\n")
        self.lines.extend(readable(raw) for raw in newest)

    @property
    def partial(self) -> str:
        """The line that is not over yet."""
        return readable(self._partial) if self._partial else ""

    def add_notice(self, text: str) -> None:
        """A line of our own between those of the log."""
        if self._partial:
            self.feed(b"\n")
        self.total += 1
        self.lines.append(text)


def readable(raw: bytes) -> str:
    """One line as a terminal would leave it: after the last carriage return, without escapes and controls."""
    text = raw[:LINE_BYTES_MAX].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = text.expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)
