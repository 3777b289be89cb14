"""Full-screen log of any attempt, with search, wrapping and a pager."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from clusterd.tui.model import rows
from clusterd.tui.model.filters import BadFilter, pattern
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.log_pane import LogPane
from clusterd.units import counted


class LogScreen(ModalScreen[str]):
    """A job's log; dismissed with ``pager`` when the user asks for a pager."""

    SCOPED_CSS = False
    CSS = """
    LogScreen { background: $background; }
    LogScreen LogPane { height: 1fr; }
    LogScreen #search { display: none; }
    LogScreen .hint { color: $foreground 70%; height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "back", show=False),
        Binding("left_square_bracket", "attempt(-1)", "attempt before", show=False),
        Binding("right_square_bracket", "attempt(1)", "attempt after", show=False),
        Binding("slash", "search", "only lines that match", show=False),
        Binding("o", "pager", "pager", show=False),
    ]

    def __init__(self, context: Context, job: rows.Job, attempt: int | None) -> None:
        """`attempt`: None for the newest."""
        super().__init__()
        self.shared = context
        self.job = job
        self.attempt = attempt
        self.log_pane = LogPane("whole-log")
        self._input = Input(placeholder="only lines that match this regular expression; empty: all", id="search")
        self._input.display = False

    def compose(self) -> ComposeResult:
        yield self.log_pane
        yield self._input
        hint = "esc back   G follow   / only matching   W wrap   [ ] attempts   o pager"
        yield Static(hint, classes="hint", markup=False)

    def on_mount(self) -> None:
        self._follow()
        self.log_pane.focus()

    def _follow(self) -> None:
        self.log_pane.follow_job(self.shared.source, self.job.id, name=self.job.name, attempt=self.attempt)

    def action_attempt(self, by: int) -> None:
        """Show the previous or next attempt."""
        newest = self.job.attempt
        wanted = (self.attempt or newest) + by
        if 1 <= wanted <= newest:
            self.attempt = wanted
            self._follow()
        else:
            self.notify(f"{self.job.name} has had {counted(newest, 'attempt')}")

    def action_search(self) -> None:
        """Open the input for a search."""
        self._input.display = True
        self._input.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only lines that match."""
        event.stop()
        try:
            only = pattern(event.value) if event.value else None
        except BadFilter as error:
            self.notify(str(error), severity="error")
            return
        self.log_pane.only(only)
        self._input.display = False
        self.log_pane.focus()

    def action_pager(self) -> None:
        """Leave and open the whole log in a pager."""
        self.dismiss("pager")

    def action_leave(self) -> None:
        """Close the search, or the screen."""
        if self._input.display:
            self._input.display = False
            self.log_pane.focus()
        else:
            self.dismiss(None)
