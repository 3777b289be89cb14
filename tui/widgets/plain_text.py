"""Text that is no markup. Textual looks for markup in titles and notices, and a job may be called ``a[/b]``."""

from __future__ import annotations

from textual.app import App
from textual.content import Content
from textual.notifications import SeverityLevel

from tui.model.lines import printable


class PlainTextTitles:
    """A widget whose titles are text. No widget itself: Textual takes style and keys from the first base that is."""

    def render_str(self, text_content: str | Content) -> Content:
        """As it is."""
        return text_content if isinstance(text_content, Content) else Content(printable(text_content))


class PlainTextApp(App[None]):
    """An application whose notices are text, whichever widget gives them."""

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """A few words in the corner; `markup` is what widgets hand on without being asked."""
        super().notify(printable(message), title=title, severity=severity, timeout=timeout, markup=False)
