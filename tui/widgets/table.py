"""Table with rows by key: draws only visible rows, and redraws only changed ones.

Not Textual's DataTable: it draws and measures every row, and removing a row costs time proportional to their number,
which is what a filter over two thousand jobs does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from clusterd.tui.model.columns import Column, lay_out
from clusterd.tui.model.lines import Line, fit, line
from clusterd.tui.model.lines import width as line_cells
from clusterd.tui.model.state_styles import Look
from clusterd.tui.widgets.painting import PlainTextTitles, cursor_strip, strip

Cells = Callable[[str, Sequence[tuple[Column[Any], int]]], Sequence[Line]]
"""Cells of a key, one per column."""

_HEADER = 1
_GUTTER = 2


class Table(PlainTextTitles, ScrollView, can_focus=True):
    """Rows under a header line; cursor and marks belong to keys, not to positions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown,ctrl+d", "page(1)", "page down", show=False),
        Binding("pageup,ctrl+u", "page(-1)", "page up", show=False),
        Binding("home,g", "end(-1)", "first", show=False),
        Binding("end,G", "end(1)", "last", show=False),
        Binding("enter", "open", "open", show=False),
    ]

    class Moved(Message):
        """The cursor moved to another key."""

        def __init__(self, table: Table) -> None:
            self.table = table
            super().__init__()

    class Opened(Message):
        """A row was opened by enter or a double click."""

        def __init__(self, table: Table) -> None:
            self.table = table
            super().__init__()

    class Sorted(Message):
        """A heading was clicked."""

        def __init__(self, table: Table, column: str) -> None:
            self.table = table
            self.column = column
            super().__init__()

    def __init__(self, name: str, cells: Cells, look: Look, stay_on_top: bool = False) -> None:
        """`stay_on_top`: a cursor on the first row stays there when rows are inserted above."""
        super().__init__(id=name)
        self._cells = cells
        self._look = look
        self._stay_on_top = stay_on_top
        self._columns: Sequence[Column[Any]] = ()
        self._laid: list[tuple[Column[Any], int]] = []
        self._widest: dict[str, int] = {}  # cells of a column's widest cell so far
        self._laid_for = 0  # width of the last layout; a scrollbar changes it without a resize event
        self._drawn: dict[int, tuple[Any, ...]] = {}
        self.keys: list[str] = []
        self._places: dict[str, int] = {}
        self.cursor: str | None = None
        self._awaited: str | None = None  # row to move the cursor to when it appears
        self.marked: set[str] = set()
        self.sorted_by = ""
        self.descending = False
        self.empty: list[Line] = []

    # --- what is shown ------------------------------------------------------------------------------------------------

    def set_columns(self, columns: Sequence[Column[Any]], sorted_by: str, descending: bool) -> None:
        """Set the columns and the one that carries the sort mark."""
        if [column.name for column in columns] != [column.name for column in self._columns]:
            self._widest.clear()
        self._columns, self.sorted_by, self.descending = columns, sorted_by, descending
        self._lay_out()

    def show(self, keys: list[str]) -> None:
        """Show these rows in this order; cursor and scroll position follow their rows."""
        if keys is not self.keys or len(keys) != len(self._places):
            self._reorder(list(keys))
        self.redraw()

    def _reorder(self, keys: list[str]) -> None:
        before, was_at = self.cursor, self._places.get(self.cursor or "", 0)
        offset = was_at - self.scroll_offset.y
        self.keys = keys
        self._places = {key: at for at, key in enumerate(keys)}
        if before is not None and was_at == 0 and self._stay_on_top and self.scroll_offset.y == 0:
            before = keys[0] if keys else None
        elif before not in self._places:
            before = keys[min(was_at, len(keys) - 1)] if keys else None
        moved = before != self.cursor
        self.cursor = before
        self.marked &= self._places.keys()
        self.virtual_size = Size(0, len(keys) + _HEADER)
        if before is not None and 0 <= offset < max(self.size.height - _HEADER, 1):
            target = max(self._places[before] - offset, 0)
            if target != self.scroll_offset.y:
                self.scroll_to(y=target, animate=False, force=True, immediate=True)
        if moved:
            self.post_message(self.Moved(self))
        if self._awaited is not None and self._awaited in self._places:
            self.move_to(self._awaited)

    def redraw(self) -> None:
        """Redraw the visible rows that changed."""
        if not self.is_attached or not self.size.width:
            return
        if self._content_cells != self._laid_for or self._outgrown():
            self._lay_out()
        for y in range(self.size.height):
            content = self._content(y)
            if self._drawn.get(y) != content:
                self.refresh(Region(0, y, self.size.width, 1))

    def _content(self, y: int) -> tuple[Any, ...]:
        """Everything that the drawing of a line depends on."""
        if y < _HEADER:
            return ("header", self.sorted_by, self.descending, len(self._laid), self.has_focus)
        at = self.scroll_offset.y + y - _HEADER
        if at >= len(self.keys):
            return ("empty", at if not self.keys else -1)
        key = self.keys[at]
        flags = (key in self.marked, key == self.cursor, self.has_focus)
        return (key, flags, tuple(self._cells(key, self._laid)))

    @property
    def _content_cells(self) -> int:
        """Width without the scrollbar, which Textual draws over the last cell."""
        return self.size.width - self.scrollbar_size_vertical

    def _outgrown(self) -> bool:
        """Measure the visible rows; True where a cell is wider than its column was measured.

        Columns never get narrower while the table shows the same columns: they would jump with every row that leaves.
        """
        top = self.scroll_offset.y
        every = [(column, 0) for column in self._columns]
        before = dict(self._widest)
        for key in self.keys[top : top + self.size.height]:
            for (column, _), cell in zip(every, self._cells(key, every), strict=True):
                self._widest[column.name] = max(self._widest.get(column.name, 0), line_cells(cell))
        return self._widest != before

    # --- drawing ------------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        self._laid_for = self._content_cells
        self._laid = lay_out(self._columns, max(self._content_cells - _GUTTER, 1), self._widest)
        self._drawn.clear()
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        """Lay out for the new width."""
        self._lay_out()
        if self.cursor is not None:
            self.call_after_refresh(self._scroll_to_cursor)

    def render_line(self, y: int) -> Strip:
        if self._content_cells != self._laid_for:
            self._lay_out()
        content = self._content(y)
        self._drawn[y] = content
        base = self.rich_style
        cells = self.size.width
        if content[0] == "header":
            return self._header(base).adjust_cell_length(cells, base)
        if content[0] == "empty":
            hint = self.empty[content[1]] if 0 <= content[1] < len(self.empty) else ()
            return strip((("  ", ""), *hint), base).adjust_cell_length(cells, base)
        _, (marked, current, focused), found = content
        runs: list[tuple[str, str]] = [(f"{self._look.glyph('mark')} " if marked else "  ", "key")]
        more = self._look.glyph("more")
        for (column, width), cell in zip(self._laid, found, strict=True):
            runs += (*fit(cell, width, column.right, more, column.middle), (" ", ""))
        runs.pop()
        drawn = (
            cursor_strip(fit(tuple(runs), self._content_cells), base, focused) if current else strip(tuple(runs), base)
        )
        return drawn.adjust_cell_length(cells, base)

    def _header(self, base: Style) -> Strip:
        runs: list[tuple[str, str]] = [("  ", "")]
        for column, width in self._laid:
            falls = self.descending != column.falling
            arrow = self._look.glyph("down" if falls else "up") if column.name == self.sorted_by else ""
            runs += (*fit(line((column.title + arrow, "heading")), width, column.right, ""), (" ", ""))
        return strip(tuple(runs), base)

    def watch_has_focus(self, focused: bool) -> None:
        """Redraw: the cursor depends on the focus."""
        super().watch_has_focus(focused)
        self.redraw()

    def watch_show_vertical_scrollbar(self) -> None:
        """Redraw: a scrollbar changes the width without a resize event."""
        self.call_after_refresh(self.redraw)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Discard the cache of drawn lines."""
        super().watch_scroll_y(old_value, new_value)
        self._drawn.clear()

    # --- cursor and marks ---------------------------------------------------------------------------------------------

    def move_to(self, key: str) -> None:
        """Move the cursor to this row, or as soon as it appears unless the cursor is moved before."""
        self._awaited = None if key in self._places else key
        if key in self._places and key != self.cursor:
            self.cursor = key
            self.redraw()
            self.post_message(self.Moved(self))
        self._scroll_to_cursor()

    def _scroll_to_cursor(self) -> None:
        at = self._places.get(self.cursor or "")
        if at is None:
            return
        top, height = self.scroll_offset.y, max(self.size.height - _HEADER, 1)
        target = at if at < top else at - height + 1 if at >= top + height else top
        if target != top:
            self.scroll_to(y=target, animate=False, force=True, immediate=True)

    def action_move(self, by: int) -> None:
        """Move the cursor by rows."""
        if self.keys:
            at = self._places.get(self.cursor or "", 0) if self.cursor else -by
            self.move_to(self.keys[min(max(at + by, 0), len(self.keys) - 1)])

    def action_page(self, by: int) -> None:
        """Move the cursor by pages."""
        self.action_move(by * max(self.size.height - _HEADER - 1, 1))

    def action_end(self, which: int) -> None:
        """Move the cursor to the first or last row."""
        self.action_move(which * len(self.keys))

    def action_open(self) -> None:
        """Open the row under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Opened(self))

    def mark(self, key: str) -> None:
        """Toggle the mark of a row."""
        self.marked ^= {key}
        self.redraw()

    @property
    def chosen(self) -> list[str]:
        """The marked rows in order; without marks, the row under the cursor."""
        if self.marked:
            return [key for key in self.keys if key in self.marked]
        return [self.cursor] if self.cursor is not None else []

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to a row, open it on a double click, or sort by a heading."""
        where = event.get_content_offset(self)
        if where is None:  # the border
            return
        if where.y < _HEADER:
            column = self._column_at(where.x)
            if column is not None:
                self.post_message(self.Sorted(self, column))
            return
        at = self.scroll_offset.y + where.y - _HEADER
        if at < len(self.keys):
            self.move_to(self.keys[at])
            if event.chain == 2:
                self.action_open()

    def _column_at(self, x: int) -> str | None:
        left = _GUTTER
        for column, width in self._laid:
            if left <= x <= left + width:
                return column.name
            left += width + 1
        return None
