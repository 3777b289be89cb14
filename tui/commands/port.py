"""Port through which the key commands reach the application; `tui.app.Top` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from clusterd.tui.model.lines import Line
from clusterd.tui.screens.base import Board
from clusterd.tui.source.sources import Context

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel
    from textual.screen import Screen
    from textual.widget import Widget

    from clusterd.tui.source.playback import Player

R = TypeVar("R")


class AppPort(Protocol):
    """State and operations of the application that commands use."""

    player: Player | None
    """Player of the recording; None when attached to a daemon."""

    @property
    def shared(self) -> Context:
        """Context of all screens."""

    @property
    def board(self) -> Board:
        """The visible screen."""

    @property
    def focused(self) -> Widget | None:
        """The pane with the focus."""

    def show_frame(self) -> None:
        """Redraw header, banner and footer."""

    def show_recording(self) -> None:
        """Redraw the screens after the player moved."""

    def clear_marks(self) -> None:
        """Unmark all rows."""

    def goto_job_row(self, job: str) -> None:
        """Open the queue with the cursor on `job`."""

    async def show_dialog(self, screen: Screen[R]) -> R | None:
        """Open a dialog and wait for its answer."""

    async def show_text(self, title: str, lines: list[Line], hang: int = 2) -> None:
        """Show lines to read in a dialog."""

    async def confirm(self, title: str, lines: list[Line], keys: dict[str, str]) -> str | None:
        """Ask a question; return the key pressed, or None."""

    async def prompt(
        self, title: str, lines: list[Line], value: str, read: Callable[[str], R], suggestions: Sequence[str] = ()
    ) -> R | None:
        """Ask for a line of text; return it as parsed by `read`, or None."""

    def notify(self, message: str, *, severity: SeverityLevel = "information", timeout: float | None = None) -> None:
        """Show a short notice in the corner."""

    def copy_to_clipboard(self, text: str) -> None:
        """Copy to the terminal's clipboard."""

    def suspend(self) -> AbstractContextManager[Any]:
        """Hand the terminal to another program for the duration of the block."""

    def exit(self) -> None:
        """End the application."""
