"""Scrollable pane of wrapped lines, and bars of unwrapped ones; both redraw only what changed."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from clusterd.tui.model.lines import EMPTY, Line, wrap
from clusterd.tui.widgets.painting import PlainTextTitles, strip


class TextPane(PlainTextTitles, ScrollView, can_focus=True):
    """Lines wrapped to the width of the pane."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "down", show=False),
        Binding("k", "scroll_up", "up", show=False),
        Binding("g", "scroll_home", "first", show=False),
        Binding("G", "scroll_end", "last", show=False),
        Binding("ctrl+d", "page_down", "page down", show=False),
        Binding("ctrl+u", "page_up", "page up", show=False),
    ]

    def __init__(self, name: str, hang: int = 11) -> None:
        """`hang`: indent of continuation lines."""
        super().__init__(id=name)
        self._hang = hang
        self._source: list[Line] = []
        self._lines: list[Line] = []
        self._wrapped_for = 0  # width of the last wrap; the first frame is drawn before a pane gets its size

    def show(self, lines: list[Line]) -> None:
        """Show these lines."""
        if lines == self._source:
            return
        self._source = lines
        self._wrap()

    def _wrap(self) -> None:
        if not self.size.width:  # not laid out yet: wrapping would briefly show one letter per line
            return
        before, fresh = self._lines, self._wrapped_lines()
        self._lines = fresh
        if self.virtual_size.height != len(fresh):
            self.virtual_size = Size(0, len(fresh))
        top = self.scroll_offset.y
        for y in range(self.size.height):
            old = before[top + y] if top + y < len(before) else None
            new = fresh[top + y] if top + y < len(fresh) else None
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))

    def _wrapped_lines(self) -> list[Line]:
        self._wrapped_for = self.size.width
        cells = max(self.size.width - 1, 1)
        return [part for runs in self._source for part in wrap(runs, cells, self._hang)]

    def on_resize(self, event: events.Resize) -> None:
        self._wrap()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        if self._wrapped_for != self.size.width:
            self._lines = self._wrapped_lines()
        at = self.scroll_offset.y + y
        base = self.rich_style
        runs = self._lines[at] if at < len(self._lines) else EMPTY
        return strip(runs, base).adjust_cell_length(self.size.width, base)

    @property
    def text(self) -> str:
        """The text shown, before wrapping."""
        return "\n".join("".join(part for part, _ in runs) for runs in self._source)


class Bar(Widget):
    """A few full-width lines: header, banner, footer. Runs with an action can be clicked."""

    class Pressed(Message):
        """A run with an action was clicked."""

        def __init__(self, action: str) -> None:
            self.action = action
            super().__init__()

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._lines: list[Line] = []
        self._actions: dict[str, str] = {}

    def show(self, lines: list[Line], actions: dict[str, str] | None = None) -> None:
        """Show these lines; `actions`: action by text of a run."""
        self._actions = actions or {}
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        runs = self._lines[y] if y < len(self._lines) else EMPTY
        return strip(runs, base).adjust_cell_length(self.size.width, base)

    def on_click(self, event: events.Click) -> None:
        """Post the action of the run under the mouse."""
        at = 0
        for text, _ in self._lines[event.y] if event.y < len(self._lines) else EMPTY:
            if at <= event.x < at + len(text) and text in self._actions:
                self.post_message(self.Pressed(self._actions[text]))
            at += len(text)

    @property
    def text(self) -> str:
        """The text shown."""
        return "\n".join("".join(part for part, _ in runs) for runs in self._lines)
