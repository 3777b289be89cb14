"""Conversion of styled lines to Textual strips."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from clusterd.tui.model.lines import Line
from clusterd.tui.model.state_styles import style

CURSOR = Style(reverse=True)
CURSOR_UNFOCUSED = Style(bold=True, underline=True)
"""Cursor of a table without focus; visible without colours, too."""


def strip(runs: Line, base: Style) -> Strip:
    """The line on a base style."""
    return Strip([Segment(text, base + style(name)) for text, name in runs if text])


def cursor_strip(runs: Line, base: Style, focused: bool) -> Strip:
    """The line under the cursor: in one colour, so that its text stays readable; tiles keep theirs."""
    if not focused:
        return Strip([Segment(text, base + style(name) + CURSOR_UNFOCUSED) for text, name in runs if text])
    return Strip(
        [Segment(text, base + (style(name) if name.startswith("tile") else CURSOR)) for text, name in runs if text]
    )
