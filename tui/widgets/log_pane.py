"""Log pane: follows a job's log, keeps its last lines, and redraws at most ten times a second."""

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
from clusterd.tui.model.filters import FilterTooSlow, time_limit
from clusterd.tui.model.lines import fit, line, wrap
from clusterd.tui.widgets.painting import PlainTextTitles, strip

REDRAW_S = 0.1
RETRY_S = 1.0
LAST_BYTES = 4 << 20
"""Bytes of the log requested from its end; the pager shows all of it."""

LINES_MAX = 5000
LINE_BYTES_MAX = 4096
"""Longer lines are truncated; the pager shows all of them."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LogSource(Protocol):
    """Source of log streams."""

    def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        """As `tui.source.sources.Source.stream`."""


class LogPane(PlainTextTitles, ScrollView, can_focus=True):
    """Follows the end of the log until scrolled up; resumes when scrolled to the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "down", show=False),
        Binding("k", "scroll_up", "up", show=False),
        Binding("g", "scroll_home", "first", show=False),
        Binding("G,f", "follow", "follow", show=False),
        Binding("ctrl+d", "page_down", "page down", show=False),
        Binding("ctrl+u", "page_up", "page up", show=False),
        Binding("W", "wrap", "wrap", show=False),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._window = LogWindow()
        self._starts_mid_log = False  # earlier bytes were not requested
        self._pulling: asyncio.Task[None] | None = None
        self._shown: tuple[int, str] | None = None  # number of lines, and the unfinished one
        self._lines: list[str] = []
        self._wrapped = False
        self._only: re.Pattern[str] | None = None
        self._job: str | None = None
        self.follows = True
        self.placeholder = ""
        """Text shown instead of a log."""

    def follow_job(self, source: LogSource, job: str | None, *, name: str = "", attempt: int | None = None) -> None:
        """Show this job's log; None for no log."""
        self.stop()
        self._window, self._starts_mid_log = LogWindow(), False
        self._job, self.follows, self.placeholder = job, True, ""
        which = "" if attempt is None else f", attempt {attempt}"
        self.border_title = f" log: {name}{which} " if job else " log "
        self.redraw(force=True)
        if job is not None:
            self._pulling = asyncio.create_task(self._pull(source, job, attempt), name=f"log of {job}")

    def show_placeholder(self, text: str) -> None:
        """Show a text instead of a log."""
        self.stop()
        self._window, self._starts_mid_log, self._job, self.placeholder = LogWindow(), False, None, text
        self.border_title = " log "
        self.redraw(force=True)

    async def _pull(self, source: LogSource, job: str, attempt: int | None) -> None:
        while True:
            read: dict[tuple[int, int, int], int] = {}  # end offset by log
            try:
                args: dict[str, Any] = {"rank": 0, "attempt": attempt, "follow": True, "last_bytes": LAST_BYTES}
                async with aclosing(source.stream("logs", job=job, **args)) as parts:
                    async for part in parts:
                        which = int(part["attempt"]), int(part.get("generation", 1)), int(part["rank"])
                        data, end = bytes(part["data"]), int(part["offset"])
                        if end - len(data) > read.get(which, 0):  # starts mid-log, so possibly mid-line
                            self._starts_mid_log = True
                            data = data.partition(b"\n")[2]
                        read[which] = end
                        self._window.feed(data)
                self.placeholder = "" if self._window.total else "the job wrote no output"
                self.redraw()
                return
            except ClusterError as error:
                self.placeholder = str(error)
                self.redraw(force=True)
                await asyncio.sleep(RETRY_S)
                self._window = LogWindow()  # retry from an empty window: the daemon may have been restarted
            except (KeyError, TypeError, ValueError) as error:
                self.placeholder = f"the daemon sent a log that cannot be read: {error!r}"
                self.redraw(force=True)
                return

    def stop(self) -> None:
        """Stop the log stream."""
        if self._pulling is not None:
            self._pulling.cancel()
            self._pulling = None

    def on_mount(self) -> None:
        """Redraw periodically: bytes may arrive faster than they can be drawn."""
        self.set_interval(REDRAW_S, self.redraw)

    def on_unmount(self) -> None:
        self.stop()

    # --- drawing ------------------------------------------------------------------------------------------------------

    def only(self, pattern: re.Pattern[str] | None) -> None:
        """Show only matching lines; None for all."""
        self._only = pattern
        self.redraw(force=True)

    def redraw(self, force: bool = False) -> None:
        """Draw new lines, if the pane is visible."""
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
        at = self.scroll_offset.y + y
        base = self.rich_style
        text = self._lines[at] if at < len(self._lines) else ""
        dim = Style(dim=True) if not self._window.total and self.placeholder else Style()
        shown = fit(line(text), self.size.width - self.scrollbar_size_vertical, more="")
        return strip(shown, base + dim).adjust_cell_length(self.size.width, base)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follow the log only while scrolled to the end."""
        super().watch_scroll_y(old_value, new_value)
        self.follows = new_value >= self.max_scroll_y

    def action_follow(self) -> None:
        """Scroll to the end and follow."""
        self.follows = True
        self.redraw(force=True)

    def action_wrap(self) -> None:
        """Toggle wrapping of long lines."""
        self._wrapped = not self._wrapped
        self.redraw(force=True)

    @property
    def text(self) -> str:
        """The lines shown."""
        return "\n".join(self._lines)


class LogWindow:
    """Last lines of a log; earlier ones are only counted."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self._limit = lines_max
        self._partial = b""
        self.lines: deque[str] = deque(maxlen=lines_max)
        self.total = 0
        """Number of lines so far."""

    def feed(self, data: bytes) -> None:
        """Append a chunk; only the lines that remain in the window are decoded."""
        data = self._partial + data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:  # an endless progress bar, or binary data
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
        """The unfinished last line."""
        return readable(self._partial) if self._partial else ""


def readable(raw: bytes) -> str:
    """Text of a line as a terminal would leave it: after the last carriage return, without escapes and controls."""
    text = raw[:LINE_BYTES_MAX].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = text.expandtabs(4)
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)
