"""Key commands that act on the screens only: marks, filter, order, columns, playback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from clusterd.tui.model.filters import parse
from clusterd.tui.model.lines import line
from clusterd.tui.screens.base import TableBoard
from clusterd.tui.source.playback import Player

if TYPE_CHECKING:
    from clusterd.tui.app import Top


class ViewCommands:
    """Commands that change nothing in the cluster; method names are the actions of `tui.model.keys`."""

    def __init__(self, app: Top) -> None:
        self._app = app

    @property
    def _board(self) -> TableBoard[Any]:
        board = self._app.board
        if not isinstance(board, TableBoard):
            raise ClusterError("this screen has no table")
        return board

    # --- rows ---------------------------------------------------------------------------------------------------------

    async def mark(self) -> None:
        """Mark the row under the cursor and move to the next."""
        board = self._board
        if board.table.cursor is not None:
            board.table.mark(board.table.cursor)
            board.table.action_move(1)
            board.table.border_title = board.table_title()

    async def mark_all(self) -> None:
        """Mark all shown rows; if all are marked, unmark them."""
        table = self._board.table
        table.marked = set() if table.marked >= set(table.keys) else set(table.keys)
        table.redraw()
        table.border_title = self._board.table_title()

    async def copy(self) -> None:
        """Copy the id under the cursor to the clipboard (OSC 52, which tmux and SSH pass on)."""
        app = self._app
        found = app.board.hosts() if app.board.id == "fleet" else app.board.jobs()
        if not found:
            raise ClusterError("there is nothing under the cursor to copy")
        app.copy_to_clipboard(" ".join(found))
        app.notify(f"copied: {' '.join(found[:5])}")

    async def filter(self) -> None:
        """Prompt for a filter of the rows."""
        board = self._board

        lines = [
            line("regular expressions, field:value, field:>3, !not; empty shows all"),
            line(("fields: " + ", ".join(sorted(board.fields)), "dim")),
        ]
        chosen = await self._app.prompt("filter", lines, board.filter.text, lambda text: parse(text, board.fields))
        if chosen is not None:
            board.use_filter(chosen)
            self._app.show_frame()

    async def sort(self) -> None:
        """Choose the column to sort by."""
        from clusterd.tui.widgets.dialogs import ChoiceDialog

        board = self._board
        options = [(column.name, line(column.title)) for column in board.all_columns]
        hint = "enter sorts, the same one again reverses   esc closes"
        column = await self._app.show_dialog(ChoiceDialog("sort by", options, board.sort, hint))
        if column is not None:
            board.sort_by(column)
            self._app.show_frame()

    async def show_all(self) -> None:
        """Toggle between all rows and those that matter."""
        self._board.show_all()

    async def columns(self) -> None:
        """Choose the columns to show, where the terminal is wide enough."""
        from clusterd.tui.widgets.dialogs import MultiChoiceDialog

        board = self._board
        options = [(column.name, column.title) for column in board.all_columns]
        chosen = await self._app.show_dialog(MultiChoiceDialog("columns", options, board.columns))
        if chosen:
            board.columns = chosen
            board.apply_choices()

    async def help(self) -> None:
        """Show all keys of the screen."""
        from clusterd.tui.screens.base import help_lines

        app = self._app
        shared = app.shared
        lines = help_lines(str(app.board.id), shared.can_act, app.player is not None, shared.readonly)
        await app.show_text(f"keys on {app.board.id}", lines, hang=16)

    async def quit(self) -> None:
        """Leave the application."""
        self._app.exit()

    # --- recordings ---------------------------------------------------------------------------------------------------

    @property
    def _player(self) -> Player:
        player = self._app.player
        if player is None:
            raise ClusterError("this is not a recording")
        return player

    async def play(self) -> None:
        """Play or pause the recording."""
        self._player.play()
        self._app.show_recording()

    async def step_on(self) -> None:
        """Step one change forward."""
        self._player.step(1)
        self._app.show_recording()

    async def step_back(self) -> None:
        """Step one change back."""
        self._player.step(-1)
        self._app.show_recording()

    async def faster(self) -> None:
        """Double the playback speed."""
        self._player.speed = min(self._player.speed * 2, 1 << 24)
        self._app.show_frame()

    async def slower(self) -> None:
        """Halve the playback speed."""
        self._player.speed = max(self._player.speed / 2, 1 / 64)
        self._app.show_frame()

    async def skip_on(self) -> None:
        """Skip a twentieth of the recording forward."""
        self._skip(0.05)

    async def skip_back(self) -> None:
        """Skip a twentieth of the recording back."""
        self._skip(-0.05)

    def _skip(self, share: float) -> None:
        player = self._player
        player.seek_time(player.now_s + share * (player.end_s - player.start_s))
        self._app.show_recording()

    async def rewind(self) -> None:
        """Go back to the start of the recording."""
        self._player.seek(0)
        self._app.show_recording()
