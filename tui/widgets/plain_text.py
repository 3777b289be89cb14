"""Titles and notices without markup: Textual parses markup in them, and a job may be called ``a[/b]``."""

from __future__ import annotations

from textual.app import App
from textual.content import Content
from textual.notifications import SeverityLevel

from clusterd.tui.model.lines import printable


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
