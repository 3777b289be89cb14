"""From lines to what Textual draws."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from tui.model.lines import Line
from tui.model.state_styles import style

CURSOR = Style(reverse=True)
CURSOR_ELSEWHERE = Style(bold=True, underline=True)
"""Of a table that has not the focus: seen without colours, too."""


def strip(runs: Line, base: Style) -> Strip:
    """The line on a background."""
    return Strip([Segment(text, base + style(name)) for text, name in runs if text])


def cursor_strip(runs: Line, base: Style, focused: bool) -> Strip:
    """The line under the cursor: one colour throughout, so that its text stays readable; tiles stay tiles."""
    if not focused:
        return Strip([Segment(text, base + style(name) + CURSOR_ELSEWHERE) for text, name in runs if text])
    return Strip(
        [Segment(text, base + (style(name) if name.startswith("tile") else CURSOR)) for text, name in runs if text]
    )
