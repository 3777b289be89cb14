"""Styled lines as strips of Textual, and texts without markup: Textual parses it, and a job may be called ``a[/b]``."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.content import Content
from textual.notifications import SeverityLevel
from textual.strip import Strip

from clusterd.tui.model.lines import Line, printable
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


class PlainTextTitles:
    """Mixin of widgets whose titles are plain text.

    Not a widget itself: Textual takes style and bindings from the first base class that is one.
    """

    def render_str(self, text_content: str | Content) -> Content:
        """Render without parsing markup."""
        return text_content if isinstance(text_content, Content) else Content(printable(text_content))


class PlainTextApp(App[None]):
    """Application whose notices are plain text, whichever widget sends them."""

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a notice; `markup` is ignored (widgets pass it on by default)."""
        super().notify(printable(message), title=title, severity=severity, timeout=timeout, markup=False)
